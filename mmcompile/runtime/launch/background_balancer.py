"""`BackgroundBalancer`: a balancer that assigns samples in a process of its own, at low priority.

A thread that plans the next step shares Python's lock with the thread that runs the current one; comparing assignments of
thousands of samples would delay the step. The process gets costs and returns an assignment, so it needs neither model nor
samples. It ends when its socket is closed, at the latest with the process that started it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import msgspec
import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.errors import ConfigError
from mmcompile.runtime.comm.framing import frame, receive_frame
from mmcompile.runtime.launch.local_workers import worker_environment

T = TypeVar("T")

_NICE = 10
_MODULE = "mmcompile.runtime.launch.background_balancer"
"""Name of this module. It is run as a process, with the file descriptor of a socket as its argument."""
_END_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Names a function and its text arguments, by which another process makes an equal balancer."""

    module: str
    function: str
    arguments: tuple[str, ...]

    def make(self) -> Balancer:
        """Import and call the function, and return the balancer."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    costs: SampleCosts
    grid: Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    assignment: Assignment | None = None
    reason: str = ""
    error: str = ""
    """Message of a ConfigError, raised instead of an assignment; "" without an error."""


@final
class BackgroundBalancer(Balancer):
    """Assigns samples in another process once that is ready, and in this one until then; both give the same assignment.

    Args:
        inner: balancer that runs in this process.
        recipe: makes an equal balancer in the other process.
    """

    name: ClassVar[str] = "aside"

    def __init__(self, inner: Balancer, recipe: Recipe) -> None:
        self.inner = inner
        self._recipe = recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._up = False

    @property
    def title(self) -> str:
        """Title of the balancer `inner`: its name, with options that are not the default."""
        return self.inner.title

    @property
    def is_up(self) -> bool:
        """True once the process is ready to assign."""
        if not self._up and self._line is not None and select.select([self._line], [], [], 0)[0]:
            self._up = self._heard() is not None
        return self._up

    def start(self) -> None:
        """Start the process without waiting for it; a second call has no effect."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A session of its own: Ctrl-C in the terminal is not for it.
                start_new_session=True,
            )
        self._line = ours
        self._tell(self._recipe)

    def close(self) -> None:
        """End the balancer's process. Safe to call twice."""
        if self._line is not None:
            self._line.close()
        self._line, self._up = None, False
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()
            self._process.wait()

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Return the assignment of samples to microbatches: made in the other process if that is ready, else by `self.inner`."""
        return self.explained(costs, grid)[0]

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return the assignment of samples to microbatches as by `assign`, and the balancer's explanation of it as text."""
        if not self.is_up:
            return self.inner.explained(costs, grid)
        self._tell(_Question(costs=costs, grid=grid))
        answer = self._heard()
        if answer is None:
            return self.inner.explained(costs, grid)
        if answer.assignment is None:
            raise ConfigError(answer.error)
        return answer.assignment, answer.reason

    def _tell(self, message: object) -> None:
        assert self._line is not None, "the process was not started"
        with contextlib.suppress(OSError):  # what is read next tells that it is gone
            _send(self._line, message)

    def _heard(self) -> _Answer | None:
        assert self._line is not None, "the process was not started"
        answer = None
        with contextlib.suppress(OSError):
            answer = _received(self._line, _Answer)
        if answer is None:
            self._line.close()
            self._line, self._up = None, False
            warnings.warn("the balancer's process ended; steps are balanced in this process from now on", stacklevel=2)
        return answer


def serve(line: socket.socket) -> None:
    """Answer assignment requests on a socket until it is closed."""
    _yield_cores()
    recipe = _received(line, Recipe)
    if recipe is None:
        return
    balancer = recipe.make()
    _send(line, _Answer())
    while (question := _received(line, _Question)) is not None:
        try:
            assignment, reason = balancer.explained(question.costs, question.grid)
            _send(line, _Answer(assignment=assignment, reason=reason))
        except ConfigError as error:
            _send(line, _Answer(error=str(error)))


def _yield_cores() -> None:
    """Lower this process's priority below that of ranks on the same cores: its work may take a whole step."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(_NICE)


def _send(line: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message, enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))
    line.sendall(frame(data))


def _received(line: socket.socket, kind: type[T]) -> T | None:
    data = receive_frame(line)
    return None if data is None else msgspec.msgpack.decode(data, type=kind, dec_hook=_array)


def _array(_: type, value: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own_line:
        serve(own_line)
