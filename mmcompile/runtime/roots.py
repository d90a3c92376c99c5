"""Batch inputs on their way from rank 0: those of several microbatches packed into one message where they are small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.ir.graph import torch_dtype
from mmcompile.step.step_plan import StepPlan, ValueShape

_ALIGN_BYTES = 64
_PARCEL_BYTES = 256 * 1024
"""Above this, a further microbatch gets a message of its own: a rank holds only the next few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One message to one rank: batch inputs of consecutive microbatches."""

    items: tuple[tuple[int, ValueShape, int], ...]
    """(microbatch, input, offset in bytes)."""
    num_bytes: int

    def pack(self, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """CPU tensors, by microbatch and name, into one buffer of bytes."""
        buffer = self.empty()
        for microbatch, shape, start in self.items:
            raw = values[microbatch][shape.name].contiguous().flatten().view(torch.uint8)
            buffer[start : start + len(raw)] = raw
        return buffer

    def empty(self) -> Tensor:
        """A buffer of the size `pack` makes."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def unpack(self, buffer: Tensor) -> dict[int, dict[str, Tensor]]:
        """Views into a packed buffer, by microbatch and name."""
        found: dict[int, dict[str, Tensor]] = {}
        for microbatch, shape, start in self.items:
            raw = buffer[start : start + _num_bytes(shape)]
            found.setdefault(microbatch, {})[shape.name] = raw.view(torch_dtype(shape.dtype)).view(shape.shape)
        return found


def parcels(plan: StepPlan, names: Sequence[frozenset[str]]) -> list[Parcel]:
    """The messages one rank gets in a step, in order. Both sides work them out from the step plan.

    Args:
        names: per microbatch, the inputs its stages read.
    """
    found: list[Parcel] = []
    items: list[tuple[int, ValueShape, int]] = []
    end = 0
    for microbatch, wanted in zip(plan.microbatches, names, strict=True):
        shapes = [shape for shape in microbatch.roots if shape.name in wanted]
        if items and end + sum(map(_num_bytes, shapes)) > _PARCEL_BYTES:
            found.append(Parcel(items=tuple(items), num_bytes=end))
            items, end = [], 0
        for shape in shapes:
            items.append((microbatch.index, shape, end))
            end = math.ceil((end + _num_bytes(shape)) / _ALIGN_BYTES) * _ALIGN_BYTES
    return [*found, Parcel(items=tuple(items), num_bytes=end)] if items else found


def _num_bytes(shape: ValueShape) -> int:
    return math.prod(shape.shape) * torch_dtype(shape.dtype).itemsize
