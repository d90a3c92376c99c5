"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mmcompile.errors import ConfigError


class Projector(StrEnum):
    """Where a projector goes; `search` lets the planner choose."""

    SEARCH = "search"
    WITH_ENCODER = "with_encoder"
    ALONE = "alone"
    WITH_LANGUAGE_MODEL = "with_language_model"


class Dtype(StrEnum):
    """Of the parameters."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ReductionChoice(StrEnum):
    """How gradients of microbatches are added up."""

    FAST = "fast"
    FP64 = "fp64"
    FIXED = "fixed"


class AttentionChoice(StrEnum):
    """How the language model attends."""

    MODEL = "model"
    BITFIELD = "bitfield"


_ALL_COMPONENTS = "all"
SEARCH = "search"


class Strategy(StrEnum):
    """Who decides a plan: our search, a published one, or a baseline."""

    AUTO = "auto"
    LOOSELY_COUPLED = "loosely-coupled"
    DFLOP = "dflop"
    ENTRAIN = "entrain"
    FROZEN_UNAWARE = "frozen-unaware"
    MEGATRON = "megatron"
    REPLICATED = "replicated"
    EQUAL_LAYERS = "equal-layers"
    PINNED = "pinned"
    FSDP = "fsdp"


class ScheduleChoice(StrEnum):
    """Order in which ranks run forwards and backwards."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER = "eager-1f1b"
    ZERO_BUBBLE = "zb-h1"
    SEARCH = SEARCH


class RecomputeChoice(StrEnum):
    """What the backward computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    AUTO = "auto"


class PlacementChoice(StrEnum):
    """Where encoders run."""

    DISJOINT = "disjoint"
    COLOCATED = "colocated"
    SEARCH = SEARCH


MODEL_HELP = (
    "A config.json, a folder with one, a Hugging Face id in the local cache, or package.module:function that returns a "
    "model or (model, batch)."
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
ClusterOption = Annotated[
    str, typer.Option(help="[NODESx]DEVICESxNAME, for example 8x8xA100-80G; 'local' is this machine.")
]
TrainOption = Annotated[
    list[str] | None,
    typer.Option(
        "--train",
        help="What trains: 'all', a component or module name, or a pattern over parameter names; repeat for several.",
        show_default="as the model is: all",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches", min=1, help="Microbatches of a step.", show_default="8; searched with --global-batch"
    ),
]
StagesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stages",
        metavar="NAME=N",
        help="Stages of a chain, where that is decided; repeat or join with commas.",
        show_default="the planner chooses",
    ),
]
ProjectorOption = Annotated[Projector, typer.Option(help="Where the projector goes.")]
AttentionOption = Annotated[
    AttentionChoice | None,
    typer.Option(
        help="Of the language model: its own, or 'bitfield' (masks as words of one int64 a token).",
        show_default="model; bitfield with --context-parallel",
    ),
]
AutocastOption = Annotated[
    list[str] | None,
    typer.Option(
        "--autocast",
        metavar="all|NAME",
        help="Components whose products are computed in bfloat16 from float32 parameters; repeat or join with commas.",
        show_default="none",
    ),
]
ContextParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ranks that share the tokens of each stage of the language model.",
        show_default="1; searched with --global-batch and bitfield attention",
    ),
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Samples of a microbatch, for the example batch.")]
TextTokensOption = Annotated[int, typer.Option(min=1, help="Text tokens of a sample, its image tokens not counted.")]
ImagesOption = Annotated[int, typer.Option(min=0, help="Images of a sample, where the model takes any.")]
ImageSizeOption = Annotated[int, typer.Option(min=1, help="Pixels a side, where the model takes any size.")]
AudiosOption = Annotated[int, typer.Option(min=0, help="Sounds of a sample, where the model takes any.")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Of the parameters.", show_default="the config's")]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples of a step. With it, replicas, tensor parallelism, microbatches, schedule and recomputation are searched.",
        show_default="the example batch is one microbatch",
    ),
]
STATS_HELP = (
    "A dataset: a folder of images, a .jsonl of shapes, a .json that `mmcompile stats` wrote, or "
    "synthetic:NAME[:COUNT[:SEED]]."
)
StatsOption = Annotated[str | None, typer.Option(metavar="SOURCE", help=STATS_HELP, show_default="the example batch")]
StrategyOption = Annotated[Strategy, typer.Option(help="Who decides: our search, a published one, or a baseline.")]
ScheduleOption = Annotated[
    ScheduleChoice | None,
    typer.Option(help="Order of forwards and backwards.", show_default="1f1b; search with --global-batch"),
]
RecomputeOption = Annotated[
    RecomputeChoice | None,
    typer.Option(
        help="What the backward computes again; 'auto': of each layer what the memory needs.",
        show_default="none; auto with --global-batch",
    ),
]
PlacementOption = Annotated[
    PlacementChoice | None,
    typer.Option(
        help="Encoders on devices of their own, beside each other, or before the language model on its devices.",
        show_default="disjoint; search with --global-batch",
    ),
]
TensorParallelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor-parallel",
        metavar="N|NAME=N|search",
        help="Ranks that share the tensors of every layer, or of those of a chain by name; repeat or join with commas.",
        show_default="1; search with --global-batch",
    ),
]
ReplicasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--replicas",
        metavar="N|NAME=N|search",
        help="Replicas of the language model, or of a chain by name; repeat or join with commas.",
        show_default="1; search with --global-batch",
    ),
]
FsdpOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fsdp",
        metavar="all|NAME",
        help="Chains or components whose replicas share parameters; repeat or join with commas.",
        show_default="none",
    ),
]
ConstrainOption = Annotated[
    list[str] | None,
    typer.Option(
        "--constrain",
        metavar="TEXT",
        help="together:A,B, apart:A,B, on:A=STAGE, on:A=rankR, memory:SIZE[@WHERE], stages:CHAIN=LOW..HIGH or equal-tp; repeat "
        "for several.",
        show_default="none",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="Measured costs, from `mmcompile profile`.", show_default="analytic costs"),
]
SolverSecondsOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Let an exact solver prove or beat the cuts, for so long at most.",
        show_default="5 with --constrain, else not asked",
    ),
]
FaultToleranceOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="F",
        help="Nodes that may fail at once. The plan gets a pipeline template for every number of nodes that failures may leave.",
        show_default="no templates",
    ),
]
PlanOption = Annotated[Path, typer.Option("--plan", metavar="PLAN", help="A plan file.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def parse_stages(texts: Sequence[str] | None) -> dict[str, int] | None:
    """`["vision_tower=1,language_model=2"]` -> `{"vision_tower": 1, "language_model": 2}`; None if nothing was given.

    Raises:
        ConfigError: a part has another form, or a name comes twice.
    """
    return _parse_counts("--stages", texts) if texts else None


def parse_components(texts: Sequence[str] | None) -> bool | tuple[str, ...] | None:
    """`["vision_tower,language_model"]` -> both names; True for `["all"]`; None if nothing was given.

    Raises:
        ConfigError: a name is empty, or `all` stands beside others.
    """
    if not texts:
        return None
    names = tuple(name.strip() for text in texts for name in text.split(","))
    if names == (_ALL_COMPONENTS,):
        return True
    if "" in names or _ALL_COMPONENTS in names:
        raise ConfigError(f"{', '.join(texts)!r} is neither names of components nor {_ALL_COMPONENTS!r} alone")
    return names


def parse_degrees(option: str, texts: Sequence[str] | None) -> int | dict[str, int] | None:
    """`["2"]` -> 2; `["language_model=2", "vision_tower=3"]` -> a dict; None for `["search"]` and where nothing was given.

    Raises:
        ConfigError: a part has another form, or a name comes twice.
    """
    if texts and not any("=" in text for text in texts):
        if len(texts) > 1:
            raise ConfigError(f"{option} is given {' and '.join(texts)}; give one number, or NAME=N for each chain")
        return _parse_degree(option, texts[0])
    return _parse_counts(option, texts) if texts else None


def _parse_counts(option: str, texts: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        match = re.fullmatch(r"\s*([^=\s]+)=(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"{option} {part!r} is not NAME=N with N at least 1, for example language_model=2")
        if match[1] in counts:
            raise ConfigError(f"{option} names {match[1]!r} twice: {counts[match[1]]} and {match[2]}")
        counts[match[1]] = int(match[2])
    return counts


def _parse_degree(option: str, text: str) -> int | None:
    if text == SEARCH:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} is {text!r}; give a number from 1 on, or {SEARCH}")
    return int(text)
