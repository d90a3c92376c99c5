"""`RunDisplay`: progress of a run with templates: steps, members, and the last recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmcompile.cli.console import errors
from mmcompile.codegen.program import OnWarmUp
from mmcompile.runtime.control.events import EventKind, RunEvent, recoveries
from mmcompile.runtime.elastic.generation_plan import StepRecord
from mmcompile.units import format_seconds


def step_progress(*, disable: bool = False) -> Progress:
    """Return a progress bar of steps, whose tasks have two fields: the loss, and a text beside it."""
    return Progress(
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[beside]}"),
        TimeRemainingColumn(),
        console=errors(),
        disable=disable,
    )


@contextlib.contextmanager
def capturing() -> Generator[OnWarmUp]:
    """Print each capture of a warm-up, with its reason, and show a spinner on a terminal meanwhile; yield what does so."""
    with errors().status("looking at the first batches") as status:

        def show(number: int, about: int, reason: str) -> None:
            errors().print(f"capturing {number} of about {about}: {reason}", markup=False, soft_wrap=True)
            status.update(f"capturing {number} of about {about}")

        yield show


def print_capture(count: int, reason: str) -> None:
    """Print that a step captures the model again, and the reason; `count`: captures so far."""
    errors().print(f"capturing {count + 1}: {reason}", markup=False, soft_wrap=True)


class RunDisplay:
    """A progress bar with the membership beside it, fed with the event log.

    Args:
        steps: number of steps of the run; None if it is not known.
    """

    def __init__(self, steps: int | None) -> None:
        self.progress = step_progress()
        self._task = self.progress.add_task("step", total=steps, loss=float("nan"), beside="starting nodes")
        self._nodes: set[str] = set()
        self._generation = 0
        self._pending: list[RunEvent] = []
        self._last = ""
        self._waiting = ""

    def note(self, event: RunEvent) -> None:
        """Update steps, members and the last recovery from one event of the log."""
        match event.kind:
            case EventKind.JOINED if event.node is not None:
                self._nodes.add(event.node)
            case EventKind.DETECTED | EventKind.RELEASED if event.node is not None:
                self._nodes.discard(event.node)
            case EventKind.ACTIVE:
                self._generation, self._waiting = event.generation, ""
            case EventKind.WAITING if event.cause is not None:
                self._waiting = event.cause
            case _:
                pass
        if event.kind is EventKind.DETECTED:
            cause = event.cause.splitlines()[0] if event.cause else "members change"
            self.progress.console.print(f"generation {event.generation}: {cause}", markup=False)
        self._pending.append(event)
        if event.kind is EventKind.COMMITTED:
            loss = float("nan") if event.cursor is None else StepRecord.decode(event.cursor).metrics.loss
            self.progress.update(self._task, completed=event.step, loss=loss)
            for recovery in recoveries(self._pending):
                self._last = f"last recovery {format_seconds(recovery.total_s)}"
                self.progress.console.print(f"generation {recovery.generation} goes on: {self._last}", markup=False)
            self._pending.clear()
        self.progress.update(self._task, beside=self._members)

    @property
    def _members(self) -> str:
        count = f"{len(self._nodes)} node{'s' * (len(self._nodes) != 1)}"
        words = [self._waiting] if self._waiting else [count, f"generation {self._generation}", self._last]
        return ", ".join(filter(None, words))
