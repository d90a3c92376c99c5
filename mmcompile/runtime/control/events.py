"""The event log of a run: its events, its writer, a reader that follows it, and the recoveries found in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from mmcompile.errors import EngineError
from mmcompile.runtime.control.log import Committed, History

_CAUSE_LENGTH = 2000
_POLL_S = 0.02


class EventKind(StrEnum):
    """Kinds of events in a run's event log: membership changes, phases of a generation, commits, and the end."""

    JOINED = "joined"
    """A node asked to become a member."""
    WAITING = "waiting"
    """Training waits for more nodes."""
    RESTARTED = "restarted"
    """The coordinator was started again."""
    RESUMED = "resumed"
    """All members of the active generation have reconnected; it continues."""
    DETECTED = "detected"
    """A reconfiguration starts, after a failure, or for a node that joins or is drained."""
    FAULT = "fault"
    """A worker reported a broken link."""
    DRAINING = "draining"
    """A node will be taken away, and is to leave after the current step."""
    PREPARE = "prepare"
    """A generation was planned, and the plan sent to its members."""
    PREPARED = "prepared"
    """All workers have left the previous generation."""
    RENDEZVOUS = "rendezvous"
    """All process groups of the generation are connected."""
    READY = "ready"
    """All workers have the parameters and optimizer state they need."""
    ACTIVE = "active"
    """The generation is active: steps run."""
    REPLAYED = "replayed"
    """The step that a failure interrupted is computed again, from its start."""
    COMMITTED = "committed"
    """A step was committed."""
    ROLLED_BACK = "rolled_back"
    """State was lost; training continues from a checkpoint."""
    RELEASED = "released"
    """A node was released: its workers end."""
    REFUSED = "refused"
    """The coordinator refused a connection (wrong secret or version, outdated state)."""
    ENDED = "ended"
    """Training has ended."""


_STEPS = (EventKind.COMMITTED, EventKind.ROLLED_BACK)
_PHASES = (EventKind.ACTIVE, EventKind.RENDEZVOUS, EventKind.PREPARED, EventKind.PREPARE)
"""Kinds of the events that separate the phases of a recovery, last one first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """One event of the event log. `EventLog` sets `monotonic_s` and `wall_s` when it writes the event."""

    kind: EventKind
    generation: int
    monotonic_s: float = 0.0
    """Seconds on the monotonic clock of the coordinator's machine; differences are exact, also over coordinator restarts."""
    wall_s: float = 0.0
    """Seconds since 1970 (Unix time)."""
    node: str | None = None
    step: int | None = None
    cause: str | None = None
    microbatches: tuple[int, ...] | None = None
    cursor: str | None = None
    """Data cursor of a committed step, as JSON text."""


def committed_event(record: Committed) -> RunEvent:
    """Return the event of a committed step."""
    return RunEvent(
        kind=EventKind.COMMITTED,
        generation=record.generation,
        step=record.step,
        microbatches=record.microbatches,
        cursor=record.cursor,
    )


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
        """Add events that a killed coordinator logged but did not write here: a committed step, a rollback, or the end."""
        events, last = EventReader(self._path).read(), history.last
        done = next((event.step for event in reversed(events) if event.kind in _STEPS), 0)
        if last is not None and last.step != done:
            self.add(committed_event(last))
        elif history.committed != done:
            self.add(RunEvent(kind=EventKind.ROLLED_BACK, generation=history.generation, step=history.committed))
        if history.ended is not None and not any(event.kind is EventKind.ENDED for event in events):
            self.add(RunEvent(kind=EventKind.ENDED, generation=history.generation, cause=history.ended.reason))

    def add(self, event: RunEvent) -> None:
        """Write an event with the current times."""
        cause = event.cause[:_CAUSE_LENGTH] if event.cause is not None else None
        event = replace(event, monotonic_s=time.monotonic(), wall_s=time.time(), cause=cause)
        present = {name: value for name in RunEvent.__slots__ if (value := getattr(event, name)) is not None}
        self._file.write(msgspec.json.encode(present) + b"\n")

    def close(self) -> None:
        """Close the event log's file."""
        self._file.close()


class EventReader:
    """Reads an event log while another process appends to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[RunEvent]:
        """Return the events of complete lines since the last call; an empty list while there is no file."""
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
            gone: returns whether the coordinator has ended and will not be restarted.

        Raises:
            EngineError: the coordinator ended, and the log has no end.
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
    """Seconds from a failure, or another membership change, to the next committed step, by phase."""

    generation: int
    """Number of the generation that became active."""
    cause: str
    """Cause of the reconfiguration; the first one if more failures followed."""
    num_attempts: int
    """Number of generations that were prepared in this recovery."""
    plan_s: float
    """Seconds from the detection to the last plan sent."""
    leave_s: float
    """Seconds from the plan until all workers had left the previous generation."""
    connect_s: float
    """Seconds from leaving the previous generation until all process groups were connected."""
    copy_s: float
    """Seconds from the connection of all groups until all workers had the parameters and optimizer state they need."""
    replay_s: float
    """Seconds from the time the new generation became active to the commit of its first step."""

    @property
    def total_s(self) -> float:
        """Seconds of all phases together."""
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
    """Return the durations of the phases between the DETECTED and COMMITTED events of a recovery.

    If a phase was begun several times, the last time counts. A phase without an end event, because the coordinator was
    killed, counts as 0 s, and the next one is longer.
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
