"""A limit on how long a block may run: ranks that wait for each other for ever fail a test instead of stopping the run."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from collections.abc import Iterator
from types import FrameType


class Hung(BaseException):
    """The block did not end in time. No `except Exception` on the way can take it for a failure of its own."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `Hung` in the main thread if the block runs longer; all threads' stacks go to stderr.

    An engine that is interrupted stops its ranks, so none is left behind.
    """

    def give_up(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        raise Hung(f"still running after {seconds:g} s: ranks wait for each other, or the machine is far too slow")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
