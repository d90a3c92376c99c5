"""The event log, and what it says about recoveries."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmcompile.runtime.control.effects import Emit, EventKind
from mmcompile.runtime.control.log import Committed

_CAUSE_LENGTH = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line."""

    kind: EventKind
    generation: int
    monotonic_s: float
    """Of the coordinator's machine; differences are exact, also over restarts of the coordinator."""
    wall_s: float
    """Seconds since 1970."""
    node: str | None = None
    step: int | None = None
    cause: str | None = None
    microbatches: tuple[int, ...] | None = None
    cursor: str | None = None
    """Of a committed step."""


class EventLog:
    """Appends events to a file of JSON lines, which can be read while it grows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        # A crash can have cut off the last line.
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def complete(self, last: Committed | None) -> None:
        """Add the last committed step if the coordinator died before it did."""
        steps = [event.step for event in read_events(self._path) if event.kind is EventKind.COMMITTED]
        if last is not None and steps[-1:] != [last.step]:
            self.add(
                Emit(
                    kind=EventKind.COMMITTED,
                    generation=last.generation,
                    step=last.step,
                    microbatches=last.microbatches,
                    cursor=last.cursor,
                )
            )

    def add(self, emit: Emit) -> None:
        """Write an event with the time now."""
        event = Event(
            kind=emit.kind,
            generation=emit.generation,
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
            node=emit.node,
            step=emit.step,
            cause=emit.cause[:_CAUSE_LENGTH] if emit.cause is not None else None,
            microbatches=emit.microbatches,
            cursor=emit.cursor,
        )
        present = {name: value for name in Event.__slots__ if (value := getattr(event, name)) is not None}
        self._file.write(msgspec.json.encode(present) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> tuple[Event, ...]:
    """All whole lines of an event log."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return tuple(msgspec.json.decode(line, type=Event) for line in lines if line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How long the way took from a failure, or another change of members, to the next committed step. Seconds."""

    generation: int
    """That became active."""
    cause: str
    """The first, if more failures came on the way."""
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
        return self.plan_s + self.leave_s + self.connect_s + self.copy_s + self.replay_s


def recoveries(events: Iterable[Event]) -> tuple[Recovery, ...]:
    """The recoveries in an event log that came to their end, in order."""
    found: list[Recovery] = []
    open_: list[Event] = []
    for event in events:
        if open_ or event.kind is EventKind.DETECTED:
            open_.append(event)
        if open_ and event.kind is EventKind.COMMITTED:
            found.append(_recovery(open_))
            open_ = []
    return tuple(found)


def _recovery(events: list[Event]) -> Recovery:
    """From the events DETECTED to COMMITTED; of phases that were begun again, the last counts."""
    last = {event.kind: event.monotonic_s for event in events}
    moments = [last[kind] for kind in (EventKind.PREPARE, EventKind.PREPARED, EventKind.RENDEZVOUS, EventKind.ACTIVE)]
    return Recovery(
        generation=events[-1].generation,
        cause=events[0].cause or "",
        num_attempts=sum(event.kind is EventKind.PREPARE for event in events),
        plan_s=moments[0] - events[0].monotonic_s,
        leave_s=moments[1] - moments[0],
        connect_s=moments[2] - moments[1],
        copy_s=moments[3] - moments[2],
        replay_s=last[EventKind.COMMITTED] - moments[3],
    )
