"""What the coordinator asks about a membership, and what it may be told. It knows nothing of models or templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A membership that needs a plan."""

    members: tuple[str, ...]
    """Nodes in the order of their ranks: those that stay as they were, then those that joined. Empty if none is left."""
    num_workers: tuple[int, ...]
    """Of each member."""
    lost: tuple[str, ...]
    """Members of the last active generation whose state is gone."""
    joined: tuple[str, ...]
    """Members that hold no state. A node whose workers were replaced is in both."""
    draining: tuple[str, ...]
    """Nodes to be taken away. One that is also in `members` is still needed for its state: give it no work."""
    previous: tuple[str, ...]
    """Members of the last active generation in order of their ranks."""
    previous_payload: str | None
    """Its plan: it says who holds what."""
    committed: int
    """Steps that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Go on."""

    payload: str
    """JSON text, given to all workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Not enough nodes: wait for more."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End training."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StateLost:
    """No member holds some of the state of the last committed step."""

    layers: tuple[str, ...]
    checkpoint_step: int | None
    """Step of the last checkpoint; None if there is none."""
    cursor: str | None
    """That was committed with it."""
    payload: str
    """Plan for these members once they have loaded the checkpoint; JSON text."""


Decision: TypeAlias = Planned | Wait | Stop | StateLost


class Planner(Protocol):
    """Chooses what each member does. It must answer in milliseconds: everybody waits for it.

    The answer may depend on the question only, since a coordinator that was restarted asks again. An MMCompileError ends
    training with its text.
    """

    def plan(self, change: Change) -> Decision: ...
