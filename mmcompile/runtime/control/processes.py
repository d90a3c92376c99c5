"""Child processes by fork: children start in milliseconds since all modules are loaded, and end with their parent.

The parent must have no other threads that hold locks, and must not have used a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection

_PR_SET_PDEATHSIG = 1
_STANDARD = 3
_TRACEBACK_LINES = 30


def fork_process(function: Callable[[], int], *, keep: Collection[int]) -> int:
    """Start a process that runs `function` and exits with its result, or with 1 if it raises; return the process id.

    The process leads a session of its own, is killed when its parent ends (on Linux), reads no input from the terminal, and has
    no open files of the parent but standard output, standard error and those in `keep`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _settle(parent, keep)
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # No destructors: those of gloo wait for peers that may be gone.
        os._exit(code)


class ChildProcess:
    """A process made by `fork_process`, whose exit code is kept."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Exit code of the process; -n if signal n killed it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children; safe if it has ended."""
        if self.code is None:
            kill_group(self.pid)
            self.wait()


def kill_group(pid: int) -> None:
    """Kill a process made by `fork_process` and its children; safe if they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        # Before the child has made its session there is no such group.
        os.kill(pid, signal.SIGKILL)


def describe_code(code: int) -> str:
    """Return a description of an exit code, which is -n if signal n killed the process."""
    return f"died with signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def last_lines(error: BaseException) -> str:
    """Return the last lines of an error's traceback."""
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:])


def _settle(parent: int, keep: Collection[int]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for file in map(int, os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")):
        if file >= _STANDARD and file not in keep and file != null:
            # Not closed: objects of the parent still name these numbers, and would write to, or close, what takes them next.
            with contextlib.suppress(OSError):
                os.fstat(file)
                os.dup2(null, file)
    # The parent's may be other files than 1 and 2, which are gone now.
    sys.stdout, sys.stderr = (open(file, "w", buffering=1, closefd=False) for file in (1, 2))  # noqa: SIM115  (kept open)
