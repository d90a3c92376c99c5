"""`composed.json`: the parts of a composed model and how they are joined, by values and names alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mmcompile.composition.encoder import FeatureLayout
from mmcompile.errors import CheckpointError, ConfigError

VERSION = 1
MANIFEST = "composed.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPart:
    """A transformers model in a sub-folder, by module and class name."""

    module: str
    """Python module of the model's class, inside transformers."""
    name: str
    adapter: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedEncoder:
    """Options of a saved encoder, the names of its inputs, and the layout of its features that a run on an example found."""

    part: SavedPart
    output: str
    layer: int | None
    drop_tokens: int
    layout: FeatureLayout
    input_names: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedProjector:
    """Kind and sizes from which a projector is rebuilt before its weights are loaded."""

    kind: str
    """`"linear"`, `"mlp"`, `"qformer"`, or the import path of a module's class; the caller then gives the module when loading."""
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """Contents of `composed.json`: parts, projectors, merge and callbacks of a composed model."""

    version: int
    encoders: dict[str, SavedEncoder]
    projectors: dict[str, SavedProjector]
    language_model: SavedPart
    merge: str
    """`"placeholder"`, `"prepend"`, or the import path of a function."""
    placeholders: dict[str, int]
    callbacks: dict[str, dict[str, str]]
    """Part -> name of the callback field -> import path of the function."""


def read(place: Path, folder: object) -> Composed:
    """Read `composed.json` in `place`; errors name `folder`. Raises CheckpointError if missing, damaged or of another version."""
    try:
        raw = msgspec.json.decode((place / MANIFEST).read_bytes())
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != VERSION:
            raise CheckpointError(f"{place / MANIFEST} has version {version!r}; this mmcompile reads version {VERSION}")
        return msgspec.convert(raw, Composed)
    except OSError as error:
        raise CheckpointError(
            f"no composed model at {folder}: wanted a folder with {MANIFEST}, as save_pretrained writes it"
        ) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{place / MANIFEST} is damaged: {error}; load an older one") from error


def path_of(what: str, value: object) -> str:
    """Return the import path, `package.module:name`, of a function, a class, or a module's class.

    Raises:
        ConfigError: the value has no importable name.
    """
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    if "<" in named.__qualname__:
        raise ConfigError(
            f"{what} is {named.__module__}.{named.__qualname__}, which has no name in a file; define it at the top of a module"
        )
    return f"{named.__module__}:{named.__qualname__}"
