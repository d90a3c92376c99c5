"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
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


class AttentionChoice(StrEnum):
    """How the language model attends."""

    MODEL = "model"
    BITFIELD = "bitfield"


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
MicrobatchesOption = Annotated[int, typer.Option("--microbatches", min=1, help="Microbatches of a step.")]
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
ContextParallelOption = Annotated[
    int, typer.Option(min=1, help="Ranks that share the tokens of each stage of the language model.")
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Samples of a microbatch, for the example batch.")]
TextTokensOption = Annotated[int, typer.Option(min=1, help="Text tokens of a sample, its image tokens not counted.")]
ImagesOption = Annotated[int, typer.Option(min=0, help="Images of a sample, where the model takes any.")]
ImageSizeOption = Annotated[int, typer.Option(min=1, help="Pixels a side, where the model takes any size.")]
AudiosOption = Annotated[int, typer.Option(min=0, help="Sounds of a sample, where the model takes any.")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Of the parameters.", show_default="the config's")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def parse_stages(texts: Sequence[str] | None) -> dict[str, int] | None:
    """`["vision_tower=1,language_model=2"]` -> `{"vision_tower": 1, "language_model": 2}`; None if nothing was given.

    Raises:
        ConfigError: a part has another form, or a name comes twice.
    """
    if not texts:
        return None
    stages: dict[str, int] = {}
    for part in (part for text in texts for part in text.split(",")):
        match = re.fullmatch(r"\s*([^=\s]+)=(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"--stages {part!r} is not NAME=N with N at least 1, for example language_model=2")
        if match[1] in stages:
            raise ConfigError(f"--stages names {match[1]!r} twice: {stages[match[1]]} and {match[2]}")
        stages[match[1]] = int(match[2])
    return stages
