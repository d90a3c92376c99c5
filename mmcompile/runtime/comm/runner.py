"""`Runner`: a thread that does what may block in C++, so that the user's thread still hears Ctrl-C."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_POLL_S = 0.03


@dataclass(kw_only=True, slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    done: threading.Event = field(default_factory=threading.Event)
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None


class Runner:
    """Runs functions one at a time on a daemon thread of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mmcompile-step", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], check: Callable[[], None]) -> T:
        """Run a function on the thread and wait for its result.

        Args:
            check: called every 30 ms while waiting; what it raises ends the wait (the function is left behind).
        """
        call = _Call[T](function=function)
        self._calls.put(cast("_Call[object]", call))
        while not call.done.wait(_POLL_S):
            check()
        if call.error is not None:
            error, call.error = call.error, None
            try:
                raise error
            finally:
                # Its traceback refers to this frame: a cycle would keep what the function worked on.
                del error
        return call.result[0]

    def end(self, timeout_s: float) -> None:
        """Let the thread end, and wait for it a while: it may be stuck in a message nobody answers."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result.append(call.function())
            except BaseException as error:
                call.error = error
            call.done.set()
            # Not keep the last step's tensors alive until the next call.
            del call
