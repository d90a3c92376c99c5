"""The event log, and what it says about recoveries."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmcompile.runtime.control.effects import Emit, EventKind
from mmcompile.runtime.control.log import History

_CAUSE_LENGTH = 2000
_STEPS = (EventKind.COMMITTED, EventKind.ROLLED_BACK)
_PHASES = (EventKind.ACTIVE, EventKind.RENDEZVOUS, EventKind.PREPARED, EventKind.PREPARE)
"""Last one first."""


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

    def complete(self, history: History) -> None:
        """Add what a coordinator wrote to its log, and died before it said it: a step, that steps were lost, or the end."""
        events, last = read_events(self._path), history.last
        done = next((event.step for event in reversed(events) if event.kind in _STEPS), 0)
        if last is not None and last.step != done:
            self.add(
                Emit(
                    kind=EventKind.COMMITTED,
                    generation=last.generation,
                    step=last.step,
                    microbatches=last.microbatches,
                    cursor=last.cursor,
                )
            )
        elif history.committed != done:
            self.add(Emit(kind=EventKind.ROLLED_BACK, generation=history.generation, step=history.committed))
        if history.ended is not None and not any(event.kind is EventKind.ENDED for event in events):
            self.add(Emit(kind=EventKind.ENDED, generation=history.generation, cause=history.ended.reason))

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
    """From the events DETECTED to COMMITTED; of phases that were begun again, the last counts.

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
