"""LoopSites over images or clips that compute: the calls of all turns become one call on packed rows.

A site is a place in a model's Python from which one function or module is called a number of times that differs between
batches. If its calls treat rows alike, they are replaced by moves that pack the rows, one call, and moves that take its result
apart again; a resize of images becomes a weighted sum of rows. Then batches with other numbers of images call the same.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mmcompile.errors import CaptureError
from mmcompile.ir.replay import functions
from mmcompile.ir.replay.script_template import same_plain
from mmcompile.ir.replay.values import Call, ModuleCall, Value, ValueKind, calls_in, flatten, rebuild

Entry: TypeAlias = Call | ModuleCall
Site: TypeAlias = tuple[str, str, str]
"""Path of the module whose Python calls; name of what it calls; its line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSites:
    """Sites of a model, and the modules whose calls can be packed."""

    sites: frozenset[Site] = frozenset()
    row_modules: frozenset[str] = frozenset()
    """Paths of modules that are one step each and treat all rows of their argument alike."""

    @property
    def packed_modules(self) -> set[str]:
        """Paths of the modules whose calls at a site are packed, if all else allows it."""
        return {name for _, name, _ in self.sites} & self.row_modules


def num_calls(entries: Sequence[Entry], wholes: frozenset[str]) -> dict[Site, int]:
    """Return site -> the largest number of its calls in one call of the module around it."""
    found: dict[Site, int] = {}
    for path, inside in _levels(entries, wholes):
        for site, count in Counter(_site(path, entry) for entry in inside).items():
            found[site] = max(count, found.get(site, 0))
    return found


def varying_sites(counts: Sequence[Mapping[Site, int]]) -> frozenset[Site]:
    """Return the sites that call a number of times that differs between batches, given that of each batch (`num_calls`)."""
    sites = {site for count in counts for site in count}
    return frozenset(site for site in sites if len({count[site] for count in counts if site in count}) > 1)


def row_modules(entries: Sequence[Entry], wholes: frozenset[str]) -> set[str]:
    """Return the paths of modules, of those that are one step each, that treat all rows of their argument alike."""
    found: set[str] = set()
    for _, inside in _levels(entries, wholes):
        for entry in inside:
            if isinstance(entry, ModuleCall) and entry.path in wholes:
                calls = [call for call in calls_in(entry.entries) if call.role != "host"]
                if calls and all(call.role == "step" and _treats_rows_alike(call) for call in calls):
                    found.add(entry.path)
    return found


def packed(entries: Sequence[Entry], loops: LoopSites, wholes: frozenset[str], path: str = "") -> Sequence[Entry]:
    """Return the entries of a script with the calls of each site as one, where they treat rows alike; others as they are."""
    if not loops.sites:
        return entries
    inner = [
        replace(entry, entries=packed(entry.entries, loops, wholes, entry.path))
        if isinstance(entry, ModuleCall) and entry.path not in wholes
        else entry
        for entry in entries
    ]
    groups: dict[Site, list[int]] = defaultdict(list)
    for index, entry in enumerate(inner):
        if (site := _site(path, entry)) in loops.sites:
            groups[site].append(index)
    can = [members for members in groups.values() if _can_pack([inner[index] for index in members], loops)]
    order = _order(inner, can) if can else None
    if order is None:
        return inner
    by_first = {members[0]: members for members in can}
    result: list[Entry] = []
    for index in order:
        members = by_first.get(index)
        result += [inner[index]] if members is None else _Packing([inner[i] for i in members]).run()
    return result


def _levels(entries: Sequence[Entry], wholes: frozenset[str], path: str = "") -> Iterator[tuple[str, Sequence[Entry]]]:
    """Yield (path of a module, entries of one of its calls), but for modules that are one step each."""
    yield path, entries
    for entry in entries:
        if isinstance(entry, ModuleCall) and entry.path not in wholes:
            yield from _levels(entry.entries, wholes, entry.path)


def _head(entry: Entry) -> Call:
    return entry.call if isinstance(entry, ModuleCall) else entry


def _site(path: str, entry: Entry) -> Site:
    call = _head(entry)
    return path, call.name if call.role in ("step", "module") else "", call.where


def _order(entries: Sequence[Entry], groups: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the order of entries in which each group is at one place, that of its first; None if there is none.

    Args:
        entries: entries of one call of a module.
        groups: indices of the entries of each group; only its first is in the order.
    """
    calls = [[_head(entry), *calls_in([entry])] for entry in entries]
    loop = calls[min(map(min, groups)) : max(map(max, groups)) + 1]
    if any(call.role == "step" and functions.writes_in_place(call.name, {}) for own in loop for call in own):
        return None
    place = list(range(len(entries)))
    last = dict(zip(place, place, strict=True))
    for members in groups:
        last[members[0]] = members[-1]
        for index in members:
            place[index] = members[0]
    entry_of = {id(call): index for index, own in enumerate(calls) for call in own}
    needs: dict[int, set[int]] = {node: set() for node in place}
    for index, own in enumerate(calls):
        for leaf in (leaf for call in own for leaf in call.leaves if isinstance(leaf, Value)):
            source = next((entry_of[id(origin)] for origin, _ in leaf.origins if id(origin) in entry_of), index)
            if source != index and place[source] == place[index]:
                return None  # a turn of the loop needs the result of another
            needs[place[index]].add(place[source])
    return _sorted({node: needed - {node} for node, needed in needs.items()}, last)


def _sorted(needs: Mapping[int, set[int]], rank: Mapping[int, int]) -> list[int] | None:
    """Return nodes such that each follows those it needs, otherwise by rank; None if some need each other."""
    users: dict[int, list[int]] = defaultdict(list)
    waiting = {node: len(needed) for node, needed in needs.items()}
    for node, needed in needs.items():
        for other in needed:
            users[other].append(node)
    ready = [(rank[node], node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for user in users[order[-1]]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (rank[user], user))
    return order if len(order) == len(needs) else None


def _treats_rows_alike(call: Call) -> bool:
    """Return True for a call whose result has a row for each row of its arguments, computed from it and parameters alone."""
    moving, fixed = _operands(call)
    shapes = {leaf.tensor.shape for leaf in moving}
    if len(shapes) != 1 or len(call.results) != 1 or any(isinstance(leaf, Value) and leaf.host for leaf in fixed):
        return False
    shape, result = shapes.pop(), call.results[0].tensor.shape
    if len(shape) < 2 or shape[-1] < 2 or shape[:-1] != result[:-1]:
        return False
    if call.name == "linear":
        return len(moving) == 1
    if call.name in ("layer_norm", "rms_norm"):
        args, kwargs = rebuild(call.structure, iter(call.leaves))
        return len(moving) == 1 and len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) == 1
    return call.name.strip("_") in functions.ELEMENTWISE and all(
        leaf.tensor.dim() < 2 for leaf in fixed if isinstance(leaf, Value)
    )


def _operands(call: Call) -> tuple[list[Value], list[Any]]:
    """Return the leaves that carry activations or float inputs, and the others: parameters, buffers and plain values."""
    moving = [leaf for leaf in call.leaves if _carries(leaf)]
    return moving, [leaf for leaf in call.leaves if not _carries(leaf)]


def _carries(leaf: object) -> bool:
    return isinstance(leaf, Value) and not leaf.host and leaf.kind not in (ValueKind.PARAMETER, ValueKind.BUFFER)


def _can_pack(members: Sequence[Entry], loops: LoopSites) -> bool:
    heads = [_head(member) for member in members]
    first = heads[0]
    if any((call.key, call.structure, call.grad) != (first.key, first.structure, first.grad) for call in heads):
        return False
    if first.name == "interpolate":
        return all(_resizes(call) for call in heads)
    if first.role == "module":
        ok = first.name in loops.row_modules and all(
            len(_operands(call)[0]) == 1 and len(call.results) == 1 and call.results[0].tensor.dim() > 1
            for call in heads
        )
    else:
        ok = first.role == "step" and all(map(_treats_rows_alike, heads))
    pairs = ((a, b) for call in heads[1:] for a, b in zip(first.leaves, call.leaves, strict=True))
    return ok and all(
        a.tensor.shape[-1] == b.tensor.shape[-1] if _carries(a) and _carries(b) else a is b or same_plain(a, b)
        for a, b in pairs
    )


def _resizes(call: Call) -> bool:
    """Return True for a call that resizes images [images, channels, height, width]."""
    source = call.leaves[0]
    return _carries(source) and source.tensor.dim() == 4 and source.tensor.shape[1] > 1


_RESIZE = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


def _resize_options(call: Call) -> dict[str, Any]:
    args, kwargs = rebuild(call.structure, iter(call.leaves))
    given = {**dict(zip(_RESIZE, args[1:], strict=False)), **kwargs}
    return {"size": None, "scale_factor": None, **{name: value for name, value in given.items() if name != "input"}}


class _Packing:
    """Replaces the calls of a site by one.

    Args:
        members: its calls, one a turn of the loop.
    """

    def __init__(self, members: Sequence[Entry]) -> None:
        self._members = members
        self._heads = [_head(member) for member in members]
        self._entries: list[Entry] = []

    def run(self) -> list[Entry]:
        """Return the entries that replace the members."""
        if self._heads[0].name == "interpolate":
            self._resize()
        else:
            self._call_once()
        return self._entries

    def _call_once(self) -> None:
        first, kept = self._heads[0], self._members[0]
        leaves = list(first.leaves)
        for place in (place for place, leaf in enumerate(leaves) if _carries(leaf)):
            size = first.leaves[place].tensor.shape[-1]
            rows = [self._move(torch.Tensor.reshape, call.leaves[place], (-1, size)) for call in self._heads]
            leaves[place] = self._move(torch.cat, rows)
        counts = [call.results[0].tensor.numel() // call.results[0].tensor.shape[-1] for call in self._heads]
        out = first.results[0].tensor
        call = replace(first, leaves=leaves, results=[])
        value = self._result(call, out.new_empty((sum(counts), out.shape[-1])))
        self._entries.append(
            replace(kept, call=call, outputs=(None, (value,))) if isinstance(kept, ModuleCall) else call
        )
        self._take_apart(value, [call.results[0].tensor.shape for call in self._heads], counts)

    def _take_apart(self, value: Value, shapes: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """Make the result of each member from its rows of the packed result."""
        for head, shape, count, end in zip(self._heads, shapes, counts, itertools.accumulate(counts), strict=True):
            rows = self._move(torch.Tensor.narrow, value, 0, end - count, count)
            own = self._move(torch.Tensor.reshape, rows, tuple(shape))
            if head.name == "interpolate":
                own = self._move(torch.Tensor.permute, own, (0, 3, 1, 2))
            last = own.origins[0][0]
            member = head.results[0]
            member.origins[:], last.results[:] = [(last, 0)], [member]

    def _resize(self) -> None:
        first = self._heads[0]
        taps = [_taps_of(call) for call in self._heads]
        most = max(2, *(index.shape[1] for index, _ in taps))  # a size of 1 would mean something else
        pad = [(0, most - index.shape[1]) for index, _ in taps]
        read: list[Value] = []
        for call, (index, _), width in zip(self._heads, taps, pad, strict=True):
            channels = self._move(torch.Tensor.permute, call.leaves[0], (0, 2, 3, 1))
            rows = self._move(torch.Tensor.reshape, channels, (-1, channels.tensor.shape[-1]))
            index = torch.nn.functional.pad(index, width)
            read.append(self._move(torch.Tensor.__getitem__, rows, _given(index)))
        weights = torch.cat(
            [torch.nn.functional.pad(weight, width) for (_, weight), width in zip(taps, pad, strict=True)]
        )
        together = self._move(torch.cat, read)
        dtype = together.tensor.dtype
        weighted = self._step(torch.Tensor.mul, first, together, _given(weights.to(dtype).unsqueeze(-1)))
        out = self._step(torch.Tensor.sum, first, weighted, 1)
        images = [call.results[0].tensor.permute(0, 2, 3, 1).shape for call in self._heads]
        self._take_apart(out, images, [index.shape[0] for index, _ in taps])

    def _move(self, function: Callable[..., Any], *args: Any) -> Value:
        return self._make("move", function, self._heads[0], args)

    def _step(self, function: Callable[..., Any], like: Call, *args: Any) -> Value:
        return self._make("step", function, like, args)

    def _make(self, role: Any, function: Callable[..., Any], like: Call, args: tuple[Any, ...]) -> Value:
        leaves: list[Any] = []
        structure = flatten((args, {}), leaves)
        call = Call(role, function, function.__name__, structure, leaves, like.grad, like.where)
        self._entries.append(call)
        with torch.no_grad():
            given, _ = rebuild(structure, (leaf.tensor if isinstance(leaf, Value) else leaf for leaf in leaves))
            return self._result(call, function(*given))

    def _result(self, call: Call, tensor: Tensor) -> Value:
        value = Value(ValueKind.RESULT, tensor, False, origins=[(call, 0)])
        call.results.append(value)
        return value


def _given(tensor: Tensor) -> Value:
    """Return a host tensor that no call of the script made: the graph takes it as an input."""
    return Value(ValueKind.RESULT, tensor, True, written=True)


def _taps_of(call: Call) -> tuple[Tensor, Tensor]:
    """Return (index, weight) of a resize, both [images * new height * new width, n]: each new pixel is the weighted sum of n.

    A pixel's number is that of its row in [images * height * width, channels].
    """
    images, _, height, width = call.leaves[0].tensor.shape
    (rows, by_row), (columns, by_column) = (_axis_taps(call, axis) for axis in (0, 1))
    index = rows[:, None, :, None] * width + columns[None, :, None, :]
    weight = by_row[:, None, :, None] * by_column[None, :, None, :]
    index, weight = (part.reshape(rows.shape[0] * columns.shape[0], -1) for part in (index, weight))
    first = torch.arange(images).view(-1, 1, 1) * height * width
    return (first + index).flatten(0, 1), weight.repeat(images, 1)


def _axis_taps(call: Call, axis: int) -> tuple[Tensor, Tensor]:
    """Return (index, weight) of a resize along height (0) or width (1) alone, [new, n]."""
    options = _resize_options(call)
    for name, kept in (("size", _WIDTH), ("scale_factor", 1.0)):
        if isinstance(options[name], (tuple, list)):
            options[name] = (options[name][axis], kept)
        elif options[name] is not None:
            options[name] = (options[name], kept)
    return _taps_along(call.leaves[0].tensor.shape[2 + axis], tuple(sorted(options.items())))


_WIDTH = 2
"""Width of the images that show what a resize does to their height; torch's antialiasing errs where it is 1."""


@functools.lru_cache(maxsize=1024)
def _taps_along(old: int, options: tuple[tuple[str, Any], ...]) -> tuple[Tensor, Tensor]:
    columns = torch.eye(old, dtype=torch.float64).view(1, old, old, 1).expand(1, old, old, _WIDTH).contiguous()
    matrix = torch.nn.functional.interpolate(columns, **dict(options))[0, :, :, 0].T
    other = torch.arange(old, dtype=torch.float64).sin().view(1, 1, old, 1).expand(1, 1, old, _WIDTH).contiguous()
    resized = torch.nn.functional.interpolate(other, **dict(options))[0, 0, :, 0]
    if not torch.allclose(matrix @ other[0, 0, :, 0], resized, rtol=1e-9, atol=1e-12):
        raise CaptureError(f"a resize of {old} rows with {dict(options)} is no weighted sum of rows; please report it")
    index = matrix.abs().topk(int((matrix != 0).sum(1).max()), dim=1).indices
    return index, matrix.gather(1, index)
