"""Chains of moves (crops, unpadding, packing) as one gather of rows, whose index the host computes.

Moves are run on numbers of elements in place of the elements. Where all elements along one dim move together, as rows, the
result is `cat(rows of all bases)[index]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.ir.compat import no_torch_functions
from mmcompile.ir.replay import functions
from mmcompile.ir.replay.values import Value, origin_in, rebuild, tensors_of

_PADDING = -1
"""Number of an element that pads: it is of no base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Layout of the rows of a gather in its bases and in its result."""

    dims: tuple[int, ...]
    """Dim of each base along which whole rows lie."""
    size: int
    """Number of elements in a row."""
    out: int
    """Dim of the result along which rows lie."""
    folded: bool = False
    """True if `out` is two dims in one: rows, and which of some rows (`unfold`)."""
    inside: bool = False
    """True if, of these two, the elements of a row are the outer dim."""
    padded: bool = False
    """True if one more row, of zeros, follows those of the bases."""


def bases_of(value: Value, wholes: frozenset[str]) -> list[Value]:
    """Return the tensors from which a moved tensor takes its elements, in order of first use."""
    found: list[Value] = []
    seen: set[int] = set()

    def visit(one: Value) -> None:
        call = origin_in(one, wholes)[0] if one.origins else None
        if call is None or call.role != "move":
            if all(one is not other for other in found):
                found.append(one)
        elif id(call) not in seen:
            seen.add(id(call))
            for leaf in call.leaves:
                if isinstance(leaf, Value) and not leaf.host:
                    visit(leaf)

    visit(value)
    return found


def _is_padded(value: Value, wholes: frozenset[str]) -> bool:
    call = origin_in(value, wholes)[0] if value.origins else None
    if call is None or call.role != "move":
        return False
    moved = (leaf for leaf in call.leaves if isinstance(leaf, Value) and not leaf.host)
    return call.name in functions.PADS or any(_is_padded(leaf, wholes) for leaf in moved)


def layouts(value: Value, wholes: frozenset[str]) -> Iterator[Layout]:
    """Yield all layouts in which a moved tensor is a gather of rows of its bases, long rows first."""
    moved, starts, shapes = _moved(value, wholes)
    padded = _is_padded(value, wholes)
    for out in reversed(range(moved.dim())):
        for size in sorted(set(shapes[0]), reverse=True):
            for inside in (False, True):
                rows = _unfolded(moved, out, size, inside=inside)
                found = None if rows is None else _rows(rows, starts, shapes, size)
                if found is not None:
                    folded = size < moved.shape[out]
                    yield Layout(dims=found[1], size=size, out=out, folded=folded, inside=inside, padded=padded)


def gather_index(value: Value, layout: Layout, wholes: frozenset[str]) -> Tensor | None:
    """Return the index of rows by which a moved tensor is gathered in a layout; None if it is not."""
    moved, starts, shapes = _moved(value, wholes)
    if layout.out >= moved.dim():
        return None
    rows = _unfolded(moved, layout.out, layout.size, inside=layout.inside)
    if rows is None or layout.folded != (layout.size < moved.shape[layout.out]):
        return None
    found = _rows(rows, starts, shapes, layout.size, layout.dims)
    return None if found is None else found[0]


def _unfolded(moved: Tensor, out: int, size: int, *, inside: bool) -> Tensor | None:
    """Return `moved` with rows of `size` elements last, which are dim `out` or, every so many elements, a part of it."""
    count = moved.shape[out]
    if size < 2 or not moved.numel() or count % size or (inside and count == size):
        return None
    if count == size:
        return moved.movedim(out, -1)
    parts = (size, count // size) if inside else (count // size, size)
    return moved.unflatten(out, parts).movedim(out if inside else out + 1, -1)


def _moved(value: Value, wholes: frozenset[str]) -> tuple[Tensor, list[int], list[tuple[int, ...]]]:
    """Return where each element of a moved tensor comes from, as a number; of each base, its first number and its shape."""
    bases = bases_of(value, wholes)
    numbers: dict[int, Tensor] = {}
    starts, shapes, first = list[int](), list[tuple[int, ...]](), 0
    for base in bases:
        shape = tuple(base.tensor.shape)
        numbers[id(base)] = torch.arange(first, first + math.prod(shape), dtype=torch.float64).view(shape)
        starts.append(first)
        shapes.append(shape)
        first += math.prod(shape)
    made: dict[int, list[Tensor]] = {}

    def run(one: Value) -> Tensor:
        if id(one) in numbers:
            return numbers[id(one)]
        call, place = one.origins[0]
        if id(call) not in made:
            leaves = (
                (leaf.tensor if leaf.host else run(leaf)) if isinstance(leaf, Value) else _as_number_type(leaf)
                for leaf in call.leaves
            )
            args, kwargs = rebuild(call.structure, leaves)
            if call.name in functions.PADS:
                args, kwargs = functions.padded_with(call.name, _PADDING, args, kwargs)
            made[id(call)] = tensors_of(call.function(*args, **kwargs))
        return made[id(call)][place]

    with no_torch_functions(), torch.no_grad():
        return run(value).long(), starts, shapes


def _as_number_type(leaf: Any) -> Any:
    return torch.float64 if isinstance(leaf, torch.dtype) else leaf


def _rows(
    moved: Tensor,
    starts: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    size: int,
    dims: Sequence[int] | None = None,
) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return (index of rows, dim of each base along which rows lie) if the last dim of `moved` holds whole rows, along `dims`."""
    heads = moved[..., 0].contiguous()
    which = torch.bucketize(heads, torch.tensor(starts), right=True) - 1
    if not torch.equal((moved == _PADDING).all(-1), (moved == _PADDING).any(-1)):
        return None
    index, found, before = torch.full_like(heads, sum(map(math.prod, shapes)) // size), list[int](), 0
    for number, shape in enumerate(shapes):
        own = moved[which == number]
        may = range(len(shape)) if dims is None else range(dims[number], dims[number] + 1)
        fits = (
            d for d in reversed(may) if d < len(shape) and shape[d] == size and _whole(own, starts[number], shape, d)
        )
        dim = next(fits, None)
        if dim is None:
            return None
        step = math.prod(shape[dim + 1 :])
        local = own[..., 0] - starts[number]
        index[which == number] = before + local // (step * size) * step + local % step
        found.append(dim)
        before += math.prod(shape) // size
    return index, tuple(found)


def _whole(rows: Tensor, start: int, shape: tuple[int, ...], dim: int) -> bool:
    step = math.prod(shape[dim + 1 :])
    heads = rows[..., 0]
    expected = heads[:, None] + step * torch.arange(shape[dim])
    return torch.equal(rows, expected) and bool((((heads - start) // step) % shape[dim] == 0).all())


def gathered(bases: Sequence[Tensor], layout: Layout, index: Tensor) -> Tensor:
    """Return the rows of all bases that `index` names, in the layout of the result."""
    flat = [base.movedim(dim, -1).reshape(-1, layout.size) for base, dim in zip(bases, layout.dims, strict=True)]
    together = torch.cat(flat) if len(flat) > 1 else flat[0]
    if layout.padded:
        together = torch.nn.functional.pad(together, (0, 0, 0, 1))
    rows = together[index]
    place = layout.out + (layout.folded and not layout.inside)
    rows = rows if place == rows.dim() - 1 else rows.movedim(-1, place)
    return rows.flatten(layout.out, layout.out + 1) if layout.folded else rows
