"""`mmcompile stats`: what a dataset is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mmcompile.cli.console import counting, print_result
from mmcompile.cli.options import STATS_HELP, JsonOption
from mmcompile.data.images import PatchRule
from mmcompile.data.readers import ReadOptions, read_stats
from mmcompile.errors import ConfigError


def stats(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=STATS_HELP, show_default=False)],
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many samples.", show_default="all")
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option(min=1, help="For folders: pixels of a patch's side.", show_default="14")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="For folders: pixels a side that every image is resized to.", show_default="its own"),
    ] = None,
    merge: Annotated[
        int | None, typer.Option(min=1, help="For folders: patches a side merged into one token.", show_default="1")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=0, help="For folders: text of a sample beside its caption.", show_default="0")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the statistics here, as JSON.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a dataset: how much of each modality its samples have, and which are the worst.

    Of images only headers are read.
    """
    given = (patch_size, image_size, merge, prompt_tokens)
    if any(value is not None for value in given) and not Path(source).is_dir():
        raise ConfigError(
            f"--patch-size, --image-size, --merge and --prompt-tokens have no effect on {source}: it is no folder of images"
        )
    if max_samples is not None and source.endswith(".json"):
        raise ConfigError(f"--max-samples has no effect on {source}: these statistics are made already")
    options = ReadOptions(
        rule=PatchRule(patch=patch_size or PatchRule().patch, side=image_size, merge=merge or PatchRule().merge),
        prompt_tokens=prompt_tokens or 0,
        max_samples=max_samples,
    )
    with counting(f"reading {source}") as progress:
        found = read_stats(source, options, progress=progress)
    if output is not None:
        found.save(output)
    # The shapes themselves are for files (-o): thousands of lines.
    figures = {name: value for name, value in msgspec.to_builtins(found).items() if name != "samples"}
    print_result(json, figures, str(found), output)
