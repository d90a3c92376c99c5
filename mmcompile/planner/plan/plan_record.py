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
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.costmodel.load import Polynomial
from mmcompile.ir.tensor_spec import TensorSpec
from mmcompile.planner.plan.geometry import Geometry
from mmcompile.planner.resilience.resilience import Resilience

PLAN_VERSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Model and library versions that a plan was made for; a plan is refused for a model with another fingerprint."""

    model: str
    """Class name of the model."""
    parameters: str
    """sha256 hex digest over (name, shape, dtype, trainable) of every parameter."""
    torch: str
    transformers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Contiguous layers of one component that are part of a stage: layers `first` to `last` (excluded)."""

    component: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrediction:
    """Predicted time [s] and memory [bytes] of one stage on one rank, per microbatch unless stated otherwise."""

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes of activations saved for the backward, of all microbatches in flight."""
    in_flight: int

    @property
    def times(self) -> LayerTimes:
        """Seconds of forward, input gradient and weight gradient."""
        return LayerTimes(forward_s=self.forward_s, input_grad_s=self.input_grad_s, weight_grad_s=self.weight_grad_s)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that one microbatch keeps for its backward."""
        return self.activation_bytes // self.in_flight if self.in_flight else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and activations."""
        return self.fixed_bytes + self.activation_bytes

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Use of memory -> bytes; the last entry is the total."""
        return {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "total": self.total_bytes,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Contiguous layers of a chain that the same ranks run."""

    name: str
    """Name of the stage, `<chain>.<index>`, for example `language_model.1`."""
    segments: tuple[Segment, ...]
    layer_names: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks that run the stage, dp * cp * tp of its chain: replica by replica, in each the shards of the tokens, in
    each the shards of the tensors. Colocated stages share ranks."""
    has_backward: bool
    """False if nothing in the stage trains and no gradient passes through; the stage then only runs forward."""
    depth: int
    """Number of stages behind this one on the longest path to the loss stage, which has 0. It sets the 1F1B warm-up."""
    prediction: StagePrediction
    recompute: tuple[Recompute | None, ...] = ()
    """Recomputation of each layer; None for a layer whose backward has no matrix products, where recomputation saves nothing.

    (): every layer keeps all activations.
    """

    @property
    def layers(self) -> list[tuple[str, int]]:
        """(component, layer index) of each layer, in order."""
        return [(own.component, layer) for own in self.segments for layer in range(own.first, own.last)]

    @property
    def modes(self) -> Mapping[tuple[str, int], Recompute]:
        """(component, layer index) -> recomputation mode, without layers where recomputation saves nothing."""
        modes = self.recompute or ("none" if self.has_backward else None,) * len(self.layers)
        return {layer: mode for layer, mode in zip(self.layers, modes, strict=True) if mode is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Components planned as one sequence of layers, cut into stages, with the degree of each parallel axis."""

    name: str
    components: tuple[str, ...]
    stages: tuple[Stage, ...]
    tp: int = 1
    """Tensor-parallel degree: ranks that share the tensors of a layer."""
    cp: int = 1
    """Context-parallel degree: ranks that share the tokens of a microbatch."""
    dp: int = 1
    """Data-parallel degree: number of replicas.

    Each replica of the last chain computes `num_microbatches` microbatches a step. The i-th microbatches of all replicas of a
    chain together hold the same samples in every chain, shared evenly by its replicas.
    """
    fsdp: bool = False
    """True if replicas share parameters, gradients and optimizer state (FSDP), and gather parameters when needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Directed edge between two stages, with the tensors that cross it."""

    source: str
    target: str
    tensors: tuple[TensorSpec, ...]
    gradient: tuple[str, ...]
    """Names of the tensors whose gradient flows back."""
    num_bytes: int
    """Forward bytes per microbatch at the captured sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedValue:
    """Gradient-free value that several stages need, with the decision whether to recompute it in each or to send it."""

    name: str
    stages: tuple[str, ...]
    choice: Literal["recompute", "send"]
    recompute_s: float
    send_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Prediction of a whole plan's step by the simulator."""

    iteration_s: float
    bubble: float
    """Share of device time that is idle, 0..1."""
    lower_bound_s: float
    gap: float
    """Relative gap between the predicted step and its lower bound, iteration_s / lower_bound_s - 1."""
    bubbles: tuple[BubbleShare, ...] = ()
    """Causes of idle time, one entry for each chain; () if unknown."""
    reduce_s: float = 0.0
    """Seconds of a step after the last backward: gradient reduction over replicas, and the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BubbleShare:
    """Idle share [0..1] of the time of a chain's ranks, by cause; the causes add up to the chain's bubble."""

    chain: str
    warm_up: float
    """Share of filling and draining the pipeline, which remains with equal stages and equal microbatches."""
    stages: float
    """Share of time that ranks wait for slower stages."""
    microbatches: float
    """Share of time that ranks wait because microbatches differ in size."""
    links: float
    """Share of time that ranks wait for messages in transit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Cut between two stages, with the reason why it is there."""

    stage: str
    """Name of the stage that ends at the cut."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """Alternative plan that lost, in words, with the reason."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRate:
    """Cost of samples in one component of a chain's replica: predicts any sample's seconds and bytes without the model.

    Polynomials are in rows and squared lengths of samples (from `geometry`). They are accurate near the loads that the plan was
    made for, and give its predictions there. Their fixed parts count once for a microbatch, not for each sample.
    """

    chain: str
    geometry: Geometry
    """Rule that turns the sizes of a sample (text, images, audio clips) into rows of the component."""
    seconds: Polynomial
    """Seconds of forward and backward, with recomputation, in rows and squared lengths: sum over stages of one rank's seconds."""
    activation_bytes: Polynomial
    """Bytes of activations saved for the backward, in rows and squared lengths: sum over stages of one rank's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Result of the check whether samples can be packed into one row without influencing each other."""

    isolates: bool
    """True if no value of a sample reaches another sample of its row, forward or backward."""
    reason: str
    """Explanation of how samples are kept apart, or where they mix."""

    def __str__(self) -> str:
        return (
            f"packing: documents are isolated ({self.reason})" if self.isolates else f"packing refused: {self.reason}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """Data of a plan: the assignment of every layer to ranks, options, and predicted cost."""

    fingerprint: Fingerprint
    cluster: Cluster
    chains: tuple[Chain, ...]
    links: tuple[Link, ...]
    num_microbatches: int
    shared_values: tuple[SharedValue, ...]
    predicted: Prediction
    rejected: tuple[Rejected, ...] = ()
    attention: Attention = "model"
    """Attention of the language model: its own, or one by mask words, an int64 a token (pass `bitfield-attention`)."""
    autocast: tuple[str, ...] = ()
    """Components that compute matrix products in bfloat16 from float32 parameters, as `torch.autocast` does."""
    head_stride: int = 0
    """Number of key/value heads that context-parallel ranks gather at a time; 0 for all heads."""
    schedule: ScheduleKind = "1f1b"
    strategy: str = "auto"
    """Strategy that made the plan: `auto`, a published search or a baseline (`mmcompile.planner.strategies`)."""
    microbatch_samples: float = 0.0
    """Mean number of samples in a microbatch of one replica of the last chain; 0 where only the captured batch is known."""
    data: str = ""
    """Dataset that the predictions average over, with its number of samples; "" for the captured batch."""
    costs: str = "analytic"
    """Source of the predicted seconds: `analytic`, or the calibration with its device, dtype, and measured layer kinds."""
    cuts: tuple[Cut, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for the reader: assumptions, limits of the search, constraints that cost time."""
    sample_rates: tuple[SampleRate, ...] = ()
    """Cost of samples for each component, chain by chain; () for a plan without such costs."""
    packing: Packing | None = None
    """Result of the check whether samples can be packed; None if it was not requested."""
    resilience: Resilience | None = None
    """Templates of pipelines for other numbers of nodes; None without fault tolerance."""
    version: int = PLAN_VERSION

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of all chains, chain by chain."""
        return tuple(stage for chain in self.chains for stage in chain.stages)

    @property
    def chain_edges(self) -> list[tuple[str, str]]:
        """(chain name, name of another chain that reads its output), each pair once, in the order of the links."""
        owner = {stage.name: chain.name for chain in self.chains for stage in chain.stages}
        pairs = dict.fromkeys((owner[link.source], owner[link.target]) for link in self.links)
        return [(source, target) for source, target in pairs if source != target]

    def stage(self, name: str) -> Stage:
        """Return the stage with a name. An unknown name raises KeyError, which lists the valid names."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; stages are {', '.join(s.name for s in self.stages)}")

    @property
    def recompute(self) -> Recompute | Literal["mixed"]:
        """Recomputation mode of all layers if it is the same for all, else "mixed"."""
        return uniform_mode(self.stages)

    @property
    def modes(self) -> Mapping[tuple[str, int], Recompute]:
        """(component, layer index) -> recomputation mode, without layers where recomputation saves nothing."""
        return {place: mode for stage in self.stages for place, mode in stage.modes.items()}

    @property
    def context_parallel(self) -> int:
        """Number of ranks that share the tokens of each stage of the language model."""
        return self.chains[-1].cp

    @property
    def global_batch(self) -> int:
        """Number of samples in a step; 0 where only the captured batch is known."""
        return round(self.microbatch_samples * self.num_microbatches * self.chains[-1].dp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the plan uses."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)


def uniform_mode(stages: Iterable[Stage]) -> Recompute | Literal["mixed"]:
    """Return the recomputation mode if all layers where it saves memory share it, else "mixed"; "none" without such layers."""
    modes: set[Recompute] = {mode for stage in stages for mode in stage.modes.values()}
    if len(modes) > 1:
        return "mixed"
    return modes.pop() if modes else "none"
