"""Every option of planning, training and elastic runs, declared once.

One frozen dataclass for each topic. The Python API builds them from its keyword arguments; the options of the command line,
their help, and the keys of a `--config` file are made from their fields (`mmcompile.cli.config_options`). The docstring under
a field is the help of its option; its first paragraph is what `--help` prints.

This is the lowest layer: it imports neither torch nor anything that is planned or trained. Fields therefore hold plain values:
text, numbers, and names of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, cast, get_args, get_origin, get_type_hints

from mmcompile.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
"""Activations that a layer's backward computes again, instead of keeping them from the forward.

'none': none. 'selective': all but results of matrix products, convolutions and attention. 'full': all but the layer's inputs.
"""
Recomputation = Recompute | Literal["auto"]
"""Recomputation of a plan: one mode for all layers; or 'auto', by which each layer has the mode that its rank's memory needs."""
ScheduleKind = Literal["gpipe", "1f1b", "eager-1f1b", "zb-h1"]
"""Order in which a pipeline rank runs forwards and backwards."""
ProjectorPlacement = Literal["with_encoder", "alone", "with_language_model"]
"""Chain that computes a projector: its encoder's, one of its own, or the language model's."""
EncoderPlacement = Literal["disjoint", "colocated"]
"""Placement of encoders: on ranks of their own; or on the language model's ranks, their layers in line before its layers."""
Attention = Literal["model", "bitfield"]
"""Attention of the language model: the model's own, or a kernel whose mask is one int64 a token (mask words)."""
Reduction = Literal["fast", "fp64", "fixed"]
"""Arithmetic that adds up gradients: 'fast' is torch's, in order of ranks; 'fp64' is float64; 'fixed' adds whole numbers. Their
sum is the same in any order, so for any split of microbatches over ranks (`mmcompile.runtime.optim.arithmetic`)."""
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
"""Data type of parameters."""
Strategy = Literal[
    "auto",
    "loosely-coupled",
    "dflop",
    "entrain",
    "frozen-unaware",
    "megatron",
    "replicated",
    "equal-layers",
    "pinned",
    "fsdp",
]
"""Names of strategies that come with mmcompile (`mmcompile.planner.strategies.search`)."""
Counts = Mapping[str, int]
"""Chain (or component) name -> count."""
Degrees = int | Mapping[str, int]
"""One count for all; or chain (or component) name -> count."""
Components = bool | Sequence[str]
"""All components (True), none (False), or those named."""

DEFAULT_MICROBATCHES = 4
SOLVER_SECONDS = 5.0
_SEARCHED: Final = "with global_batch"


def _option(
    default: Any,
    *,
    name: str | None = None,
    metavar: str | None = None,
    shown: str | None = None,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    search: Literal["always", "with global_batch"] | None = None,
) -> Any:
    """Return a dataclass field whose metadata describes the command-line option that is made from it.

    Args:
        default: value if the option is not given.
        name: option's name; by default the field's, with dashes.
        metavar: placeholder of the value in the help; by default the type's.
        shown: words for the default in the help, if the value does not explain itself.
        least: smallest number that is accepted.
        choices: texts that the command line accepts, if Python accepts others too.
        search: condition under which the command line accepts the word `search` (None in Python): the planner then chooses.
    """
    metadata = {"name": name, "metavar": metavar, "shown": shown, "least": least, "choices": choices, "search": search}
    return field(default=default, metadata=MappingProxyType(metadata))


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the texts that a type names by `Literal`; () if it names none."""
    return tuple(text for part in (hint, *get_args(hint)) if get_origin(part) is Literal for text in get_args(part))


class _Options:
    """Base class of groups of options. A number below its field's `least`, or a text that is no choice, raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for own in fields(cast(Any, self)):
            value, least, choices = getattr(self, own.name), own.metadata.get("least"), choices_of(hints[own.name])
            if least is not None and isinstance(value, int | float) and value < least:
                raise ConfigError(f"{own.name} is {value}; give {least:g} or more")
            if isinstance(value, str) and choices and value not in choices:
                raise ConfigError(f"{own.name} is {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_Options):
    """A model before it is planned: which parameters train, and their type."""

    train: Sequence[str] = _option((), shown="as the model is: all")
    """Parameters that train: 'all', a component or module name, or a pattern over parameter names; repeat for several."""
    dtype: Dtype | None = _option(None, shown="the config's")
    """Type of the parameters."""
    random_weights: bool = False
    """Start from random weights, not stored ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleConfig(_Options):
    """Shape of the example batch that a model is captured on where it brings none (`mmcompile.example_batch`)."""

    batch_size: int = _option(2, least=1)
    """Samples of a microbatch, for the example batch."""
    text_tokens: int = _option(1024, least=1)
    """Text tokens of a sample, its image tokens not counted."""
    images: int = _option(1, least=0)
    """Images of a sample, where the model takes any."""
    image_size: int = _option(448, least=1)
    """Pixels a side, where the model takes any size."""
    audios: int = _option(1, least=0)
    """Sounds of a sample, where the model takes any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest(_Options):
    """Request for a plan; None leaves a choice to the planner.

    Without `global_batch`, each replica of the language model computes `num_microbatches` times the captured batch in a step.
    With it, everything is searched that is not decided: tensor, context and data parallel degrees of every component,
    microbatches, schedule, recomputation, and where encoders run.

    Raises:
        ConfigError: options that conflict or have no effect.
    """

    cluster: str = "local"
    """[NODESx]DEVICESxNAME, for example 8x8xA100-80G; 'local' is this machine."""
    global_batch: int | None = _option(None, least=1, shown="the example batch is one microbatch")
    """Samples of a step. With it, replicas, tensor parallelism, microbatches, schedule and recomputation are searched."""
    stats: str | None = _option(None, metavar="SOURCE", shown="the example batch")
    """A dataset: a folder of images, a .jsonl of shapes, a .json that `mmcompile stats` wrote, or
    synthetic:NAME[:COUNT[:SEED]].

    The step is predicted for it; without it, all samples are like those of the captured batch.
    """
    strategy: str = _option("auto", choices=get_args(Strategy))
    """Strategy that decides: our search ('auto'), a published one, or a baseline."""
    num_microbatches: int | None = _option(None, name="microbatches", least=1, shown="4; searched with --global-batch")
    """Microbatches of a step, of each replica of the language model."""
    schedule: ScheduleKind | None = _option(None, shown="1f1b; search with --global-batch", search=_SEARCHED)
    """Order of forwards and backwards."""
    recompute: Recomputation | None = _option(None, shown="none; auto with --global-batch")
    """Recomputation in the backward; 'auto': of each layer as much as the memory needs.

    'selective' is all but products, convolutions and attention. 'auto' takes the least time, so nothing where everything fits;
    with fault tolerance it is one mode for all layers.
    """
    placement: EncoderPlacement | None = _option(None, shown="disjoint; search with --global-batch", search=_SEARCHED)
    """Encoders on devices of their own, beside each other, or before the language model on its devices."""
    tensor_parallel: Degrees | None = _option(
        None, metavar="N|NAME=N|search", shown="1; search with --global-batch", search=_SEARCHED
    )
    """Ranks that share the tensors of every layer, or of those of a chain by name; repeat or join with commas.

    Chains that are not named have 1. What so many ranks cannot share is computed by each of them; the plan's notes list these
    parts with reasons.
    """
    replicas: Degrees | None = _option(
        None, metavar="N|NAME=N|search", shown="1; search with --global-batch", search=_SEARCHED
    )
    """Replicas of the language model, or of a chain by name; repeat or join with commas.

    Numbers of chains (or components) that are named are kept. Without a global batch, other chains get as many as the language
    model, which has 1 if not named; with one, the search chooses. Chains that lead from one encoder to the language model have
    equally many.
    """
    fsdp: Components | None = _option(None, metavar="all|NAME", shown="none")
    """Chains or components whose replicas share parameters; repeat or join with commas.

    Replicas share gradients and optimizer state too, instead of each holding them. Layers gather parameters before they compute;
    with recompute 'full' or 'selective' they do so again in the backward and hold none in between, otherwise weights stay until
    the backward. Replicas of the language model must have samples in every microbatch; those of an encoder need none. Not with a
    global batch: there strategy 'fsdp' does it.
    """
    stages: Counts | None = _option(None, metavar="NAME=N", shown="the planner chooses")
    """Stages of a chain, where that is decided; repeat or join with commas."""
    projector: ProjectorPlacement | None = _option(None, shown="search", search="always")
    """Chain that computes the projector; the simulator chooses by default."""
    autocast: Components | None = _option(None, metavar="all|NAME", shown="none")
    """Components whose products are computed in bfloat16 from float32 parameters; repeat or join with commas.

    Products are those of `torch.autocast`.
    """
    attention: Attention | None = _option(None, shown="model; bitfield with --context-parallel")
    """Attention of the language model: its own, or 'bitfield' (masks as words of one int64 a token).

    With 'bitfield', empty parts of a mask cost nothing.
    """
    context_parallel: int | None = _option(
        None, least=1, shown="1; searched with --global-batch and bitfield attention"
    )
    """Ranks that share the tokens of each stage of the language model."""
    allow_unused: bool = False
    """Train although parameters that are set to train get no gradient: of layers that the loss does not use, or of encoders for
    which there is no data.

    Otherwise a plan has a note with their names, and training does not start.
    """
    constraints: Sequence[str] = _option((), name="constrain", metavar="TEXT", shown="none")
    """together:A,B, apart:A,B, on:A=STAGE, on:A=rankR, memory:SIZE[@WHERE], stages:CHAIN=LOW..HIGH or equal-tp; repeat for
    several."""
    calibration: str | None = _option(None, metavar="FILE", shown="analytic costs")
    """Measured costs, from `mmcompile profile`."""
    solver_seconds: float | None = _option(None, least=0.1, shown="5 with --constrain, else not asked")
    """Let an exact solver prove or beat the cuts, for so long at most."""
    fault_tolerance: int | None = _option(None, metavar="F", least=0, shown="no templates")
    """Nodes that may fail at once. The plan gets a pipeline template for every number of nodes that failures may leave.

    No layer is lost (`Plan.resilience`), and the plan has the numbers of nodes that can be used in full.
    """

    def __post_init__(self) -> None:
        self._check_counts()
        _Options.__post_init__(self)
        self._check_attention()
        if self.global_batch is None:
            self._check_without_search()
        elif self.fsdp:
            raise ConfigError(
                f"fsdp={self.fsdp} has no effect with a global batch, where the search decides it: take strategy 'fsdp', or give "
                "replicas and no global batch"
            )

    def _check_counts(self) -> None:
        for option_name, what, verb in (
            ("replicas", "the language model", "are"),
            ("tensor_parallel", "every chain", "is"),
        ):
            given = getattr(self, option_name)
            for name, number in given.items() if isinstance(given, Mapping) else ((what, given),):
                if isinstance(number, int) and number < 1:
                    raise ConfigError(f"{option_name} of {name} {verb} {number}; give 1 or more")
        if self.fault_tolerance is not None and self.fault_tolerance < 0:
            raise ConfigError(
                f"fault_tolerance is {self.fault_tolerance}; give the number of nodes that may fail at once, 0 or more"
            )

    def _check_attention(self) -> None:
        if self.attention == "model" and (self.context_parallel or 1) > 1:
            raise ConfigError(
                f"context_parallel {self.context_parallel} needs attention 'bitfield', got 'model': the model's own masks are "
                "for whole sequences"
            )

    def _check_without_search(self) -> None:
        # The CLI prints a backquoted option of the message as `--option`.
        if self.stats is not None:
            raise ConfigError(
                "`stats` has no effect without `global_batch`: every microbatch is the example batch then; say how many samples "
                "a step has"
            )
        if self.strategy != "auto":
            raise ConfigError(f"strategy {self.strategy!r} needs global_batch, the samples of a step")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(_Options):
    """Options of training that the Python API and `mmcompile train` share (`mmcompile.Engine`)."""

    balance: str | None = _option(None, metavar="NAME", shown="auto; arrival with templates")
    """Balancer, which decides who computes which sample: arrival, sorted-round-robin, disttrain, joint, hierarchical,
    hierarchical-all, post-balance, post-balance-packed, post-balance-padded, post-balance-quadratic, post-balance-convolution,
    node-local, auto.

    'auto' takes the balancer whose step is predicted to be shortest, and arrival order where that is as good.
    """
    correct: bool = False
    """Learn from measured times what samples cost; steps then depend on them."""
    clip_norm: float | None = _option(None, least=0.0, shown="no clipping")
    """Largest global gradient norm."""
    accumulate: int = _option(1, least=1)
    """Batches to an update."""
    master_weights: bool = False
    """Update half-precision parameters in float32."""
    shard_optimizer: bool = False
    """Keep optimizer state once among replicas (ZeRO stage 1)."""
    reduction: Reduction = _option("fast")
    """Arithmetic that adds up gradients; with 'fixed', lost nodes do not change a bit of the result."""
    compile: bool = False
    """Run stages through torch.compile."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}; wanted the number of calls to an update, 1 or more")
        _Options.__post_init__(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(_Options):
    """Length and data of a training run of the command line."""

    steps: int = _option(100, least=1)
    """Optimizer steps."""
    batch_size: int = _option(16, least=1)
    """Samples of a step."""
    lr: float = _option(1e-4, least=0.0)
    """Learning rate of AdamW."""
    seed: int = 0
    """Seed of the order of samples, and of random weights."""
    pack: bool = False
    """Pack the texts of a microbatch into one row instead of padding them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig(_Options):
    """Options of a run that continues when nodes die (`mmcompile.elastic`), beside those of training."""

    save_every: int | None = _option(None, least=1, shown="the end only")
    """Steps between checkpoints, in a run with templates."""
    recovery_deadline_s: float = _option(20.0, name="recovery-deadline", least=2.0)
    """Longest seconds from a failure to the next step, in a run with templates; all other waits follow from it."""
    max_restarts: int = _option(3, least=0)
    """Times that a node's workers are started anew, in a run with templates."""
