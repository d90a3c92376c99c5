"""Named places in the code at which tests make a process fail.

The variable MMCOMPILE_FAIL holds a JSON list of `Strike`. Where it is not set, a fail point costs one look-up in the environment.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from mmcompile.errors import ConfigError

VARIABLE = "MMCOMPILE_FAIL"
_HOLD_POLL_S = 0.02


class FaultAction(StrEnum):
    """Kinds of faults that a test can inject into a process."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"
    EXIT = "exit"
    SEGFAULT = "segfault"
    EXCEPTION = "exception"
    GIL = "gil"
    """Hold the interpreter lock for ever."""
    SLEEP = "sleep"
    """Sleep for `seconds` (by default five)."""
    HOLD = "hold"
    """Block while the file `Strike.marker` exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault, and the process and moment that it strikes. A field of None matches any value."""

    point: str
    action: FaultAction
    rank: int | None = None
    step: int | None = None
    generation: int | None = None
    marker: str | None = None
    """Path of a file. The fault strikes only if it can create the file: once over all processes. None: every time."""
    seconds: float = 5.0


class InjectedFault(Exception):
    """Exception that a fail point raises."""


def fail_point(point: str, *, rank: int | None = None, step: int | None = None, generation: int | None = None) -> None:
    """Inject a fault here if a `Strike` in MMCOMPILE_FAIL matches the point, rank, step and generation."""
    if text := os.environ.get(VARIABLE):
        for strike in _strikes(text):
            wanted = (strike.rank, strike.step, strike.generation)
            fits = all(
                want is None or want == have for want, have in zip(wanted, (rank, step, generation), strict=True)
            )
            if strike.point == point and fits and _first(strike.marker):
                _act(strike)


@functools.lru_cache(maxsize=8)
def _strikes(text: str) -> tuple[Strike, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[Strike, ...])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE} must be a JSON list of faults: {error}") from error


def _first(marker: str | None) -> bool:
    if marker is None:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _act(strike: Strike) -> None:
    match strike.action:
        case FaultAction.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultAction.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultAction.TERM:
            os.kill(os.getpid(), signal.SIGTERM)
        case FaultAction.EXIT:
            os._exit(7)
        case FaultAction.SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        case FaultAction.EXCEPTION:
            raise InjectedFault(f"fault injected at {strike.point}")
        case FaultAction.GIL:
            # PyDLL calls keep the interpreter locked, so no thread of this process runs meanwhile.
            ctypes.PyDLL(None).sleep(1000)
        case FaultAction.SLEEP:
            time.sleep(strike.seconds)
        case FaultAction.HOLD:
            while strike.marker is not None and os.path.exists(strike.marker):
                time.sleep(_HOLD_POLL_S)
