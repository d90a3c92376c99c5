"""Effects that `Generations` returns for the coordinator to carry out in order. A `RunEvent` is added to the event log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from mmcompile.runtime.control.events import RunEvent
from mmcompile.runtime.control.log import Record
from mmcompile.runtime.control.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Append a record to the log, and wait until it is on the disk before the next effect."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Send a message to the agent of a node; dropped if the agent is not connected."""

    node: str
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseLink:
    """End the connection of a node once all messages sent to it are read."""

    node: str


class TimerKind(StrEnum):
    """Kinds of timers by which the coordinator limits its waiting in a generation."""

    ATTEMPT = "attempt"
    """Wait for members that have not completed a phase of a generation in preparation."""
    FAULT = "fault"
    """Wait for the loss of a member that explains a broken link."""
    RESUME = "resume"
    """Wait of a restarted coordinator for the members in its log to reconnect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Start a timer, at whose end the coordinator calls `Generations.expired(timer, generation)`."""

    timer: TimerKind
    generation: int


Effect: TypeAlias = Write | Send | CloseLink | Arm | RunEvent
