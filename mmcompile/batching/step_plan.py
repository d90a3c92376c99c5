"""`StepPlan`: everything all ranks must agree on for one optimizer step, broadcast once by rank 0.

There is no other handshake in a step: every shape on every link is in here.

A *tower* is a balance group, whose stages all compute the same samples: the language model, or the chains that lead from one
encoder to it. A microbatch belongs to one replica of one tower. Rows that a tower makes go to the microbatches of the language
model that hold their samples: a `RowExchange` each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmcompile.planner.schedule.schedule import Flow

PROTOCOL_VERSION = 5

Range = tuple[int, int]
"""Rows `first` (included) to `last` (excluded) of dim 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueShape:
    """A tensor that crosses between ranks: its name, static shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchPlan:
    """One microbatch of one replica of a tower: its samples, its pattern, and the static shape of every tensor that moves for it.

    Samples that the language model computes in a later slot are a microbatch of their own, with a backward of its own.
    """

    index: int
    """In `StepPlan.microbatches`."""
    samples: tuple[int, ...]
    """Positions in the step's list of samples."""
    pattern: str
    sizes: dict[str, int]
    """Port name -> value, for ports of kind "size"."""
    flow: Flow
    """Stages of the tower with work for this microbatch, as programs name them; the others exchange nothing for it."""
    inputs: tuple[ValueShape, ...]
    """Batch inputs that the tower's stages read, given or computed on the host; rank 0 sends them to `readers`."""
    links: tuple[ValueShape, ...]
    """Link values that the tower's stages make or read, by name."""
    loss_weight: float = 1.0
    """Factor of what the loss stage returns: 1 / the step's valid tokens, or samples / the step's samples for a mean; both times
    `StepPlan.total_weight`.
    0 if the microbatch has no token to learn from; nothing is differentiated then and gradients are zero."""
    tower: str = ""
    replica: int = 0
    slot: int = 0
    """Place of its forward among the microbatches of its replica."""
    lag: int = 0
    """Slots until its backward: the language model computes its samples in slot + lag."""
    number: int = 0
    """Number of the microbatch in actions: unique in its replica of its tower, and equal to `slot` where nothing lags."""
    readers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Names of the batch inputs that each rank reads, by rank; ranks that read none are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """Rows of one value that one microbatch makes and a microbatch of another tower reads; gradients take the same way back."""

    source: int
    """Index of the microbatch that makes them."""
    target: int
    """Index of the microbatch that reads them."""
    producer: str
    """Stage that makes the value, as programs name it."""
    consumer: str
    name: str
    """Name of the value in the producer's program."""
    target_name: str
    """Name of the value in the consumer's program."""
    rows: tuple[Range, ...]
    """Rows of the value made, in the order in which they travel."""
    into: tuple[Range, ...]
    """Rows of the value read, in the same order; the same number of rows in all."""
    samples: tuple[int, ...]
    """Sample of each range; its first sample where the rows of a whole microbatch travel as one."""
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimizer step."""

    step: int
    num_samples: int
    microbatches: tuple[MicrobatchPlan, ...]
    exchanges: tuple[RowExchange, ...] = ()
    """In the order of (source, producer, target, consumer); values of one such edge in the order of the producer's results."""
    num_tokens: int = 0
    """Valid tokens of all microbatches; the loss stages must count as many (0: not counted)."""
    update: bool = True
    """Parameters are updated after it. If not, gradients are added to those of the plans that follow, up to one that does."""
    total_weight: float = 1.0
    """Loss weights of all valid tokens (or of all samples) together; 1 where a step has one plan. Gradients are divided by the
    sum over the plans of a step."""
    actions: tuple[str, ...] = ()
    """Actions of each rank in order, as `Schedule` prints them; ranks after the last one with a stage have no entry."""
    first_sample: int = 0
    """Samples of the step in plans before it. Random numbers in a forward are as if it were one plan."""
    version: int = PROTOCOL_VERSION
