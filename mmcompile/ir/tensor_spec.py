"""`TensorSpec`: name, shape and dtype of a tensor, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a tensor. A dim is an int, or text over size symbols (`"s0*16"`)."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
