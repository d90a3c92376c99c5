"""Cursors: positions of a run in its dataset, as JSON text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from mmcompile.errors import DataError

_CURSOR_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MapCursor:
    """Position of a run in a dataset with indices."""

    kind: Literal["map"] = "map"
    version: int = _CURSOR_VERSION
    length: int
    batch_size: int
    seed: int
    shuffle: bool
    step: int
    """Number of steps read so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCursor:
    """Position of a run in a dataset that is read in its own order."""

    kind: Literal["iterable"] = "iterable"
    version: int = _CURSOR_VERSION
    batch_size: int
    epoch: int
    taken: int
    """Number of samples read so far in this epoch."""
    state: str | None = None
    """JSON text of the dataset's `state_dict`; None if the dataset has none, and at the beginning."""


CursorT = TypeVar("CursorT", MapCursor, StreamCursor)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    kind: str
    version: int


def encode(cursor: MapCursor | StreamCursor) -> str:
    """Return a cursor as JSON text."""
    return msgspec.json.encode(cursor).decode()


def decode(text: str, kind: type[CursorT], wanted: Literal["map", "iterable"]) -> CursorT:
    """Return the cursor, of class `kind`, that `encode` wrote as `text` for a dataset of kind `wanted`.

    Raises:
        DataError: the text is no cursor, or a cursor of another kind or version.
    """
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.version != _CURSOR_VERSION:
            raise DataError(
                f"the cursor {text} has version {head.version}; this mmcompile reads version {_CURSOR_VERSION}"
            )
        if head.kind != wanted:
            raise DataError(
                f"the cursor {text} is of a dataset of kind {head.kind!r}, this one is of kind {wanted!r}; give the dataset of "
                "the run that wrote it, or start from the beginning"
            )
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"{text!r} is not a cursor as mmcompile writes them: {error}") from error
