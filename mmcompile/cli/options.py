"""Arguments and options that several commands share and that are no fields of `mmcompile.config`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = (
    "A config.json, a folder with one, a Hugging Face id in the local cache, or package.module:function that returns a "
    "model or (model, batch)."
)
STATS_HELP = (
    "A dataset: a folder of images, a .jsonl of shapes, a .json that `mmcompile stats` wrote, or "
    "synthetic:NAME[:COUNT[:SEED]]."
)
STAGES_FIELDS = ("cluster", "num_microbatches", "stages", "projector", "attention", "context_parallel")
"""Fields of a `PlanRequest` that are options of `mmcompile stages`."""
OF_MODEL = ("train", "dtype", "batch_size", "text_tokens", "images", "image_size", "audios")
"""Command parameters that determine the captured model and its example batch."""

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
PlanOption = Annotated[Path, typer.Option("--plan", metavar="PLAN", help="A plan file.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def default_cache() -> Path:
    """Return the user's own folder of captures."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmcompile"
