"""`StepPlan`: everything all ranks must agree on for one optimizer step, broadcast once by rank 0.

There is no other handshake in a step: every shape on every link is in here.

A balance group (`tower` in the code) has stages that all compute the same samples: the language model, or the chains that lead
from one encoder to it. A microbatch belongs to one replica of one group. Rows that an encoder's group makes go to the
microbatches of the language model that hold their samples: a `RowExchange` each.
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
    """One microbatch of one replica of a balance group: its samples, and shape and dtype of every tensor that moves for it.

    A balance group is a set of stages that compute the same samples together; `pattern` names the captured graph that they run.
    Samples of an encoder that the language model computes in a later microbatch form a microbatch with a backward of their own.
    """

    index: int
    """Index of the microbatch in `StepPlan.microbatches`."""
    samples: tuple[int, ...]
    """Positions of its samples in the step's list of samples."""
    pattern: str
    sizes: dict[str, int]
    """Port name -> value, for ports of kind "size", which are integers instead of tensors."""
    flow: Flow
    """Stages that work on this microbatch, by program name; other stages of its replica exchange no tensors for it."""
    inputs: tuple[ValueShape, ...]
    """Batch inputs that the stages in `flow` read, given or computed on the host; rank 0 sends them to `readers`."""
    links: tuple[ValueShape, ...]
    """Tensors that the stages in `flow` send to other stages or receive from them."""
    loss_weight: float = 1.0
    """Factor on the loss that the loss stage returns: a sum over tokens, or a mean over samples.

    For a sum it is `StepPlan.total_weight` / the plan's valid tokens, for a mean `StepPlan.total_weight` * samples / the plan's
    samples. It is 0 if the microbatch has no token to learn from; then no backward runs and gradients are zero.
    """
    tower: str = ""
    replica: int = 0
    slot: int = 0
    """Position of the forward among the microbatches of its replica."""
    lag: int = 0
    """Slots by which the language model, and all backwards, compute the samples later than the encoders' forwards do."""
    number: int = 0
    """Number of the microbatch in a schedule's actions, unique in its replica: slot + lag * (microbatches of a replica)."""
    readers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Rank -> names of the batch inputs that it reads; ranks that read no inputs are absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """Rows of one value that move from an encoder's microbatch to one of the language model; gradients take the reverse way."""

    source: int
    """Index of the microbatch that makes the rows."""
    target: int
    """Index of the microbatch that reads the rows."""
    producer: str
    """Program name of the stage that makes the value."""
    consumer: str
    name: str
    """Name of the value in the producer's program."""
    target_name: str
    """Name of the value in the consumer's program."""
    rows: tuple[Range, ...]
    """Ranges of rows in the tensor of the source microbatch, in the order in which they are sent."""
    into: tuple[Range, ...]
    """Ranges of rows in the tensor of the target microbatch: one for each range in `rows`, of the same length."""
    samples: tuple[int, ...]
    """Sample of each range; the first sample if the rows of a whole microbatch are one range."""
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Plan of one optimizer step, or of one part of it under gradient accumulation."""

    step: int
    num_samples: int
    microbatches: tuple[MicrobatchPlan, ...]
    exchanges: tuple[RowExchange, ...] = ()
    """Rows that move from encoder to language-model microbatches, by encoder, then source, producer, target, consumer."""
    num_tokens: int = 0
    """Number of tokens with a label, over all microbatches; the loss stages check it. 0 if tokens are not counted."""
    update: bool = True
    """True if parameters are updated after this plan. If False, gradients accumulate up to a later plan that updates."""
    total_weight: float = 1.0
    """Sum of the loss weights of all valid tokens (or of all samples); 1 if a step has one plan.

    Gradients are divided by the sum of `total_weight` over the plans of a step.
    """
    actions: tuple[str, ...] = ()
    """Actions of each rank in order, as `Schedule` prints them; ranks above the last rank with a stage have no entry."""
    first_sample: int = 0
    """Number of samples in earlier plans of the same step.

    Random seeds (dropout) count samples from here, so that a divided step draws the random numbers of an undivided one.
    """
    version: int = PROTOCOL_VERSION
