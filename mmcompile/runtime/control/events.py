"""The event log of a run: its lines, one writer, readers that follow it, and the recoveries found in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from mmcompile.errors import EngineError
from mmcompile.runtime.control.log import History

_CAUSE_LENGTH = 2000
_POLL_S = 0.02


class EventKind(StrEnum):
    """Kind of a line in the event log."""

    JOINED = "joined"
    """A node asked to become a member."""
    WAITING = "waiting"
    """More nodes are needed."""
    RESTARTED = "restarted"
    """The coordinator was started again."""
    RESUMED = "resumed"
    """All members of the active generation are back; it continues."""
    DETECTED = "detected"
    """A failure, a node that joins or a node that must go: the start of a reconfiguration."""
    FAULT = "fault"
    """A worker saw a broken link."""
    DRAINING = "draining"
    """A node will be taken away."""
    PREPARE = "prepare"
    """A plan is made and sent."""
    PREPARED = "prepared"
    """All workers left the generation before."""
    RENDEZVOUS = "rendezvous"
    """All groups are connected."""
    READY = "ready"
    """All state is in place."""
    ACTIVE = "active"
    """Steps run."""
    REPLAYED = "replayed"
    """The step that was interrupted starts again."""
    COMMITTED = "committed"
    """A step is done."""
    ROLLED_BACK = "rolled_back"
    """State was lost; training continues from a checkpoint."""
    RELEASED = "released"
    """A node was let go."""
    REFUSED = "refused"
    """A connection was turned away."""
    ENDED = "ended"
    """Training is over."""


_STEPS = (EventKind.COMMITTED, EventKind.ROLLED_BACK)
_PHASES = (EventKind.ACTIVE, EventKind.RENDEZVOUS, EventKind.PREPARED, EventKind.PREPARE)
"""Last one first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """One line of the event log. `EventLog` fills in the two times."""

    kind: EventKind
    generation: int
    monotonic_s: float = 0.0
    """Monotonic clock of the coordinator's machine; differences are exact, also over restarts of the coordinator."""
    wall_s: float = 0.0
    """Seconds since 1970."""
    node: str | None = None
    step: int | None = None
    cause: str | None = None
    microbatches: tuple[int, ...] | None = None
    cursor: str | None = None
    """Cursor of a committed step."""


class EventLog:
    """Appends events to a file of JSON lines, which can be read while it grows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        # A crash can have cut off the last line.
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def complete(self, history: History) -> None:
        """Add what a coordinator logged and died before it wrote here: a step, that steps were lost, or the end."""
        events, last = EventReader(self._path).read(), history.last
        done = next((event.step for event in reversed(events) if event.kind in _STEPS), 0)
        if last is not None and last.step != done:
            self.add(
                RunEvent(
                    kind=EventKind.COMMITTED,
                    generation=last.generation,
                    step=last.step,
                    microbatches=last.microbatches,
                    cursor=last.cursor,
                )
            )
        elif history.committed != done:
            self.add(RunEvent(kind=EventKind.ROLLED_BACK, generation=history.generation, step=history.committed))
        if history.ended is not None and not any(event.kind is EventKind.ENDED for event in events):
            self.add(RunEvent(kind=EventKind.ENDED, generation=history.generation, cause=history.ended.reason))

    def add(self, event: RunEvent) -> None:
        """Write an event with the time now."""
        cause = event.cause[:_CAUSE_LENGTH] if event.cause is not None else None
        event = replace(event, monotonic_s=time.monotonic(), wall_s=time.time(), cause=cause)
        present = {name: value for name in RunEvent.__slots__ if (value := getattr(event, name)) is not None}
        self._file.write(msgspec.json.encode(present) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventReader:
    """Reads an event log while another process appends to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[RunEvent]:
        """Return the whole lines since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        lines, end, _ = data.rpartition(b"\n")
        self._offset += len(lines) + len(end)
        return [msgspec.json.decode(line, type=RunEvent) for line in lines.split(b"\n") if line]

    def follow(self, gone: Callable[[], bool]) -> Iterator[RunEvent]:
        """Yield events up to the one that ends the run.

        Args:
            gone: returns whether the coordinator has ended for good.

        Raises:
            EngineError: the coordinator ended and its log has no end.
        """
        while True:
            ended = gone()
            for event in self.read():
                yield event
                if event.kind is EventKind.ENDED:
                    return
            if ended:
                raise EngineError("the coordinator ended without a word; its errors are above")
            time.sleep(_POLL_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Seconds from a failure, or another change of members, to the next committed step, by phase."""

    generation: int
    """Number of the generation that became active."""
    cause: str
    """The first cause, if more failures came on the way."""
    num_attempts: int
    """Generations that were begun."""
    plan_s: float
    """Detected to the last plan sent."""
    leave_s: float
    """Until all workers had left the generation before."""
    connect_s: float
    """Until all groups were connected."""
    copy_s: float
    """Until all state was in place."""
    replay_s: float
    """Until the next step was committed."""

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return self.plan_s + self.leave_s + self.connect_s + self.copy_s + self.replay_s


def recoveries(events: Iterable[RunEvent]) -> tuple[Recovery, ...]:
    """Return the complete recoveries in an event log, in order."""
    found: list[Recovery] = []
    open_: list[RunEvent] = []
    for event in events:
        if open_ or event.kind is EventKind.DETECTED:
            open_.append(event)
        if open_ and event.kind is EventKind.COMMITTED:
            found.append(_recovery(open_))
            open_ = []
    return tuple(found)


def _recovery(events: list[RunEvent]) -> Recovery:
    """Measure the phases between DETECTED and COMMITTED; of phases that were begun again, the last counts.

    A coordinator that was killed may have left out the end of a phase: then it took no time, and the next one longer.
    """
    begun = max(index for index, event in enumerate(events) if event.kind is EventKind.PREPARE)
    last = {event.kind: event.monotonic_s for event in events[begun:]}
    moments = [last[EventKind.COMMITTED]]
    for kind in _PHASES:
        moments.append(last.get(kind, moments[-1]))
    prepare_s, prepared_s, rendezvous_s, active_s, committed_s = reversed(moments)
    return Recovery(
        generation=events[-1].generation,
        cause=events[0].cause or "",
        num_attempts=sum(event.kind is EventKind.PREPARE for event in events),
        plan_s=prepare_s - events[0].monotonic_s,
        leave_s=prepared_s - prepare_s,
        connect_s=rendezvous_s - prepared_s,
        copy_s=active_s - rendezvous_s,
        replay_s=committed_s - active_s,
    )
