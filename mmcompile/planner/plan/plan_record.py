"""`PlanRecord`: the data of a plan, and what follows from it. `Plan` adds text and files to it.

A *chain* is one component, or several planned as one line (an encoder with its projector); its stages are contiguous
ranges of the concatenated layers. A stage lists its layers as segments, one per component it touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from mmcompile.config import Attention, Recompute, ScheduleKind
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.load import Polynomial
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.resilience.resilience import Resilience

PLAN_VERSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Model and versions that a plan was made for. A plan whose fingerprint differs from the model's is refused."""

    model: str
    """Class name of the model."""
    parameters: str
    """sha256 over (name, shape, dtype, trainable) of every parameter."""
    torch: str
    transformers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Layers `first` (included) to `last` (excluded) of one component."""

    component: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrediction:
    """Predicted time [s] and memory [bytes] of one stage, per microbatch unless stated."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes saved for backward, times microbatches in flight."""
    in_flight: int

    @property
    def backward_s(self) -> float:
        """Seconds of input and weight gradient."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and activations."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Contiguous layers on one device group."""

    name: str
    """`<chain>.<index>`, for example `language_model.1`."""
    segments: tuple[Segment, ...]
    layer_names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks that run the stage, dp * cp * tp of its chain: replica by replica, in each the shards of the tokens, in
    each the shards of the tensors. Colocated stages share ranks."""
    has_backward: bool
    """False if nothing in the stage trains and no gradient passes through; it only runs forward."""
    depth: int
    """Longest path, in stages, to the loss stage (0 there). Sets the 1F1B warm-up."""
    prediction: StagePrediction
    recompute: tuple[Recompute | None, ...] = ()
    """Recomputation of each layer; None for a layer without products in its backward, which has nothing to win.

    (): every layer keeps all activations.
    """

    @property
    def modes(self) -> Mapping[tuple[str, int], Recompute]:
        """Return (component, layer) -> recomputation, of the layers with something to win."""
        layers = [(own.component, layer) for own in self.segments for layer in range(own.first, own.last)]
        modes = self.recompute or ("none" if self.has_backward else None,) * len(layers)
        return {layer: mode for layer, mode in zip(layers, modes, strict=True) if mode is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """One or more components planned as a line, with the degrees of each parallel axis."""

    name: str
    components: tuple[str, ...]
    stages: tuple[Stage, ...]
    tp: int = 1
    """Ranks that share the tensors of a layer."""
    cp: int = 1
    """Ranks that share the tokens of a microbatch."""
    dp: int = 1
    """Replicas.

    The microbatches of a step are shared between those of the last chain; in each slot, the samples of all its replicas are
    shared evenly between the replicas of every other chain.
    """
    fsdp: bool = False
    """True if replicas share parameters, gradients and optimizer state (FSDP), and gather parameters when needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed edge between two stages."""

    source: str
    target: str
    tensors: tuple[TensorSpec, ...]
    gradient: tuple[str, ...]
    """Names of the tensors whose gradient flows back."""
    num_bytes: int
    """Forward bytes per microbatch at the captured sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedValue:
    """A gradient-free value that several stages need, with the decision to recompute or to send it."""

    name: str
    stages: tuple[str, ...]
    choice: Literal["recompute", "send"]
    recompute_s: float
    send_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Whole-plan prediction, from the simulator."""

    iteration_s: float
    bubble: float
    """Idle share of device time, 0..1."""
    lower_bound_s: float
    gap: float
    """Relative gap, iteration_s / lower_bound_s - 1."""
    bubbles: tuple[BubbleShare, ...] = ()
    """Causes of idle time, one entry for each chain."""
    reduce_s: float = 0.0
    """Seconds of the iteration for reducing gradients over replicas after the last backward, and the optimizer's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BubbleShare:
    """Idle share [0..1] of the time of a chain's ranks, by cause; the causes add up to the chain's bubble."""

    chain: str
    warm_up: float
    """Share of filling and draining the pipeline: there with equal stages and equal microbatches too."""
    stages: float
    """Share of waiting for slower stages."""
    microbatches: float
    """Share of waiting because microbatches differ."""
    links: float
    """Share of waiting for messages under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Reason why a stage ends where it does."""

    stage: str
    """The stage before the cut."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """An alternative that lost, with the reason."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRate:
    """Cost of samples in one component of a chain, in one replica: a price for any sample, without the model.

    Polynomials are in the load of samples (`geometry`). They hold near the loads that the plan was made for, where their
    values with the fixed parts are the plan's predictions. Fixed parts are paid once a microbatch, and are not a sample's.
    """

    chain: str
    geometry: Geometry
    """Rule that turns sizes of a sample into rows of the component."""
    seconds: Polynomial
    """Seconds of forward and backward through all stages, recomputation included; of one rank where several share the work."""
    activation_bytes: Polynomial
    """Bytes saved for backward, of one such rank in all stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Result of the check whether samples may be packed into one row of tokens."""

    isolates: bool
    """True if no value of a sample reaches another one of its row, forward or backward."""
    reason: str
    """Explanation of how samples are kept apart, or where they mix."""

    def __str__(self) -> str:
        return (
            f"packing: documents are isolated ({self.reason})" if self.isolates else f"packing refused: {self.reason}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """Fields of a plan: assignment of every layer, and its cost."""

    fingerprint: Fingerprint
    cluster: Cluster
    chains: tuple[Chain, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    shared_values: tuple[SharedValue, ...]
    predicted: Prediction
    rejected: tuple[Rejected, ...] = ()
    attention: Attention = "model"
    """Attention of the language model: the model's own, or words of one int64 a token (`bitfield-attention`)."""
    autocast: tuple[str, ...] = ()
    """Components whose products are computed in bfloat16, from float32 parameters, as under `torch.autocast`."""
    head_stride: int = 0
    """Key/value heads that context-parallel ranks exchange at a time; 0 for all."""
    schedule: ScheduleKind = "1f1b"
    strategy: str = "auto"
    """Strategy that made the plan: `auto`, a published search or a baseline (`mmcompile.planner.strategies`)."""
    microbatch_samples: float = 0.0
    """Samples of one microbatch of one replica of the last chain, on average; 0 where only the captured batch is known."""
    data: str = ""
    """Dataset that the predictions average over, with its number of samples; "" for the captured batch."""
    costs: str = "analytic"
    """Source of the durations: `analytic`, or the calibration with device, dtype, and layer kinds measured."""
    cuts: tuple[Cut, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for the reader: assumptions, limits of the search, constraints that bind."""
    sample_rates: tuple[SampleRate, ...] = ()
    """Rates for each component, chain by chain; () for a plan that prices no samples."""
    packing: Packing | None = None
    """Result of the packing check; None if it was not requested."""
    resilience: Resilience | None = None
    """Pipelines for other numbers of nodes; None without fault tolerance."""
    version: int = PLAN_VERSION

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, chain by chain."""
        return tuple(stage for chain in self.chains for stage in chain.stages)

    def stage(self, name: str) -> Stage:
        """Return the stage of a name. Raises KeyError, with the valid names, if there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; stages are {', '.join(s.name for s in self.stages)}")

    @property
    def recompute(self) -> Recompute | Literal["mixed"]:
        """Recomputation of all layers if it is the same, else "mixed"."""
        return uniform_mode(self.stages)

    @property
    def modes(self) -> Mapping[tuple[str, int], Recompute]:
        """(component, layer) -> recomputation, of the layers with something to win."""
        return {place: mode for stage in self.stages for place, mode in stage.modes.items()}

    @property
    def context_parallel(self) -> int:
        """Ranks that share the tokens of each stage of the language model."""
        return self.chains[-1].cp

    @property
    def global_batch(self) -> int:
        """Samples of a step; 0 where only the captured batch is known."""
        return round(self.microbatch_samples * self.num_microbatches * self.chains[-1].dp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)


def uniform_mode(stages: Iterable[Stage]) -> Recompute | Literal["mixed"]:
    """Return the mode of all layers that save something by recomputing; `"none"` if there are none."""
    modes: set[Recompute] = {mode for stage in stages for mode in stage.modes.values()}
    if len(modes) > 1:
        return "mixed"
    return modes.pop() if modes else "none"
