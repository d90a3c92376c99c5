"""What `Generations` wants done, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from mmcompile.runtime.control.log import Record
from mmcompile.runtime.control.messages import Message


class EventKind(StrEnum):
    """Lines of the event log."""

    JOINED = "joined"
    """A node asked to take part."""
    WAITING = "waiting"
    RESTARTED = "restarted"
    """The coordinator."""
    RESUMED = "resumed"
    """All members of the active generation are back; it goes on."""
    DETECTED = "detected"
    """A failure, a node that joins or a node that must go: the start of a reconfiguration."""
    FAULT = "fault"
    """A worker saw a broken link."""
    DRAINING = "draining"
    PREPARE = "prepare"
    """A plan is made and sent."""
    PREPARED = "prepared"
    """All workers left the generation before."""
    RENDEZVOUS = "rendezvous"
    """All groups are connected."""
    READY = "ready"
    """All state is in place."""
    ACTIVE = "active"
    REPLAYED = "replayed"
    """The step that was interrupted starts again."""
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    RELEASED = "released"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Append a record to the log, on disk before anything after it is done."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """To the agent of a node. It may be gone; then nothing happens."""

    node: str
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """End the connection of a node after what was sent to it."""

    node: str


class Timer(StrEnum):
    ATTEMPT = "attempt"
    FAULT = "fault"
    RESUME = "resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Call `expired(timer, generation)` after a while."""

    timer: Timer
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """Add a line to the event log."""

    kind: EventKind
    generation: int
    node: str | None = None
    step: int | None = None
    cause: str | None = None
    microbatches: tuple[int, ...] | None = None
    cursor: str | None = None


Effect: TypeAlias = Write | Send | Close | Arm | Emit


class Effects:
    """Effects in the order they are wanted."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """All since the last time."""
        effects, self._effects = self._effects, []
        return effects

    def write(self, record: Record) -> None:
        self._effects.append(Write(record=record))

    def send(self, node: str, message: Message) -> None:
        self._effects.append(Send(node=node, message=message))

    def close(self, node: str) -> None:
        self._effects.append(Close(node=node))

    def arm(self, generation: int, timer: Timer) -> None:
        self._effects.append(Arm(timer=timer, generation=generation))

    def emit(
        self,
        generation: int,
        kind: EventKind,
        *,
        node: str | None = None,
        step: int | None = None,
        cause: str | None = None,
        microbatches: tuple[int, ...] | None = None,
        cursor: str | None = None,
    ) -> None:
        self._effects.append(
            Emit(
                kind=kind,
                generation=generation,
                node=node,
                step=step,
                cause=cause,
                microbatches=microbatches,
                cursor=cursor,
            )
        )
