"""`StepPlan`: everything all ranks must agree on for one optimizer step, broadcast once by rank 0.

There is no other handshake in a step: every shape on every link is in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmcompile.plan.simulator.schedule import Flow

PROTOCOL_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueShape:
    """A tensor that crosses between ranks: its name, static shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchPlan:
    """One microbatch: its samples, its pattern, and the static shape of every tensor that moves for it."""

    index: int
    samples: tuple[int, ...]
    """Positions in the step's list of samples."""
    pattern: str
    sizes: dict[str, int]
    """Port name -> value, for ports of kind "size"."""
    flow: Flow
    """Stages that take part; the others do nothing for this microbatch and nobody waits for them."""
    roots: tuple[ValueShape, ...]
    """Root and host inputs, sent by rank 0 to the ranks whose stages read them."""
    links: tuple[ValueShape, ...]
    """Link values, by name."""
    loss_weight: float = 1.0
    """Factor of what the loss stage returns: 1 / the step's valid tokens, or samples / the step's samples for a mean.
    0 if the microbatch has no token to learn from; nothing is differentiated then and gradients are zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimizer step."""

    step: int
    num_samples: int
    microbatches: tuple[MicrobatchPlan, ...]
    num_tokens: int = 0
    """Valid tokens of all microbatches; the loss stages must count as many (0: not counted)."""
    version: int = PROTOCOL_VERSION
