"""Readers of sample shapes: a JSONL of shapes, a folder of images, a synthetic dataset."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from mmcompile.data.images import SUFFIXES, PatchRule, image_size
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats, Progress
from mmcompile.data.synthetic import synthetic
from mmcompile.errors import ConfigError

__all__ = ["ReadOptions", "read_stats", "shapes_of_folder", "shapes_of_jsonl"]

_SYNTHETIC = "synthetic:"
_CAPTIONS = ("metadata.jsonl", "captions.jsonl")
"""Names of caption files in a folder of images. Each line is a JSON object with `file_name` and `text`."""
_CHARACTERS_PER_TOKEN = 4.0
"""Characters per token of English text. [Empirical]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options for reading files as sample shapes."""

    rule: PatchRule = PatchRule()
    """Patch rule of the encoder's processor, for images."""
    prompt_tokens: int = 0
    """Number of text tokens that every sample has beside its caption."""
    max_samples: int | None = None
    """Largest number of samples read; None reads all."""


def read_stats(
    source: str | os.PathLike[str], options: ReadOptions | None = None, *, progress: Progress | None = None
) -> DatasetStats:
    """Read the statistics of a dataset from any of its forms.

    Args:
        source: a folder of images, a `.jsonl` of shapes, a `.json` of saved statistics, or
            `synthetic:NAME[:COUNT[:SEED]]`.
        options: for folders: rule of patches, tokens of the prompt; `max_samples` for all but saved statistics.
        progress: called with the samples read so far.

    Raises:
        ConfigError: there is no such source, or a part of it cannot be read, which the message names.
    """
    options = options or ReadOptions()
    name = os.fspath(source)
    if name.startswith(_SYNTHETIC):
        shapes = _named(name)
    elif (path := Path(name)).is_dir():
        shapes = shapes_of_folder(path, options)
    elif path.suffix == ".jsonl":
        shapes = shapes_of_jsonl(path)
    elif path.suffix == ".json":
        return DatasetStats.load(path)
    else:
        raise ConfigError(
            f"cannot read a dataset from {name}: wanted a folder of images, a .jsonl of shapes, a .json of saved "
            f"statistics, or {_SYNTHETIC}NAME[:COUNT[:SEED]]"
        )
    return DatasetStats.of(itertools.islice(shapes, options.max_samples), name=name, progress=progress)


def _named(source: str) -> Iterator[SampleShape]:
    name, *numbers = source.removeprefix(_SYNTHETIC).split(":")
    if len(numbers) > 2 or not all(number.isdigit() for number in numbers):
        raise ConfigError(f"{source}: wanted {_SYNTHETIC}NAME[:COUNT[:SEED]] with whole numbers")
    count, seed = [*map(int, numbers), *(None, None)][:2]
    return synthetic(name, count, 0 if seed is None else seed)


def shapes_of_jsonl(path: str | os.PathLike[str]) -> Iterator[SampleShape]:
    """Yield sample shapes from lines like `{"text_tokens": 40, "images": [576], "audios": [], "name": "cat.jpg"}`.

    The default `name` is the line number. `images` and `audios` may be left out if there are none.

    Raises:
        ConfigError: a line has another form; the message has its number.
    """
    known = ", ".join(field.name for field in fields(SampleShape))
    for number, line in _lines(Path(path)):
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            if unknown := set(values) - {field.name for field in fields(SampleShape)}:
                raise msgspec.ValidationError(f"unknown field {min(unknown)!r}")
            shape = msgspec.convert({"name": f"line {number}", **values}, SampleShape)
            if min(shape.text_tokens, *shape.images, *shape.audios, 0) < 0:
                raise msgspec.ValidationError("a length below zero")
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path}, line {number}: {error}; a line is one object with the fields {known}"
            ) from error
        yield shape


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def shapes_of_folder(folder: str | os.PathLike[str], options: ReadOptions | None = None) -> Iterator[SampleShape]:
    """Yield one shape for each image under a folder, at any depth, in the order of paths; only headers are read.

    The caption is in a file of the same name that ends in `.txt`, or in a `metadata.jsonl` or `captions.jsonl` of the
    folder, whose lines have `file_name` and `text`. Without one, a sample has `options.prompt_tokens` of text.

    Raises:
        ConfigError: the folder has no images, an image cannot be read, or captions cannot be read.
    """
    options = options or ReadOptions()
    root = Path(folder)
    captions = _captions(root)
    images = [path for path in sorted(root.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not images:
        raise ConfigError(f"no images under {root}; looked for {', '.join(sorted(SUFFIXES))}")
    for path in images:
        name = path.relative_to(root).as_posix()
        text = captions.get(name)
        if text is None and (sidecar := path.with_suffix(".txt")).is_file():
            text = "".join(line for _, line in _lines(sidecar)).strip()
        tokens = 0 if text is None else math.ceil(len(text) / _CHARACTERS_PER_TOKEN)
        yield SampleShape(
            name=name, text_tokens=tokens + options.prompt_tokens, images=(options.rule.patches(*image_size(path)),)
        )


def _captions(root: Path) -> dict[str, str]:
    """Return file name -> caption, from the caption files of a folder."""
    found: dict[str, str] = {}
    for path in (root / name for name in _CAPTIONS):
        if not path.is_file():
            continue
        for number, line in _lines(path):
            try:
                caption = msgspec.json.decode(line, type=_Caption)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: {error}; a line has file_name and text") from error
            found[caption.file_name] = caption.text
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Caption:
    file_name: str
    text: str
