"""Effects: what `Generations` returns for the coordinator to do, in order. A `RunEvent` is added to the event log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from mmcompile.runtime.control.events import RunEvent
from mmcompile.runtime.control.log import Record
from mmcompile.runtime.control.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Append a record to the log, on disk before anything after it is done."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to the agent of a node; nothing happens if the agent is gone."""

    node: str
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseLink:
    """End the connection of a node after what was sent to it."""

    node: str


class TimerKind(StrEnum):
    """Waits of a generation that the coordinator's clock ends."""

    ATTEMPT = "attempt"
    """Members that hold up a generation in preparation."""
    FAULT = "fault"
    """A broken link that no lost member explains."""
    RESUME = "resume"
    """Members that a restarted coordinator remembers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Call `expired(timer, generation)` after a while."""

    timer: TimerKind
    generation: int


Effect: TypeAlias = Write | Send | CloseLink | Arm | RunEvent
