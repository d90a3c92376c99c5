"""Batch inputs of a microbatch for one rank, packed into one message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mmcompile.ir.graph import torch_dtype
from mmcompile.step.step_plan import ValueShape

_ALIGN_BYTES = 64


def pack(values: Mapping[str, Tensor], shapes: Sequence[ValueShape]) -> Tensor:
    """CPU tensors into one buffer of bytes, each at a multiple of 64."""
    buffer = empty(shapes)
    for (start, stop), shape in zip(_spans(shapes), shapes, strict=True):
        if stop > start:
            buffer[start:stop] = values[shape.name].contiguous().flatten().view(torch.uint8)
    return buffer


def empty(shapes: Sequence[ValueShape]) -> Tensor:
    """A buffer of the size `pack` makes."""
    return torch.empty(max((stop for _, stop in _spans(shapes)), default=0), dtype=torch.uint8)


def unpack(buffer: Tensor, shapes: Sequence[ValueShape]) -> dict[str, Tensor]:
    """Views into a packed buffer, by name."""
    return {
        shape.name: buffer[start:stop].view(torch_dtype(shape.dtype)).view(shape.shape)
        for (start, stop), shape in zip(_spans(shapes), shapes, strict=True)
    }


def _spans(shapes: Iterable[ValueShape]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    start = 0
    for shape in shapes:
        stop = start + math.prod(shape.shape) * torch_dtype(shape.dtype).itemsize
        spans.append((start, stop))
        start = math.ceil(stop / _ALIGN_BYTES) * _ALIGN_BYTES
    return spans
