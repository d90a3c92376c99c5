"""Exact split of a chain of layers into contiguous stages that minimises the slowest stage.

With layers `i..N-1` still to place, `k` stages left, and a cost for a stage made of layers `i..j-1`:

    E(i, 1) = cost(i, N, 1)
    E(i, k) = min over i < j <= N-k+1 of max(cost(i, j, k), E(j, k-1))

    cost(i, j, k) = sum of forward+backward seconds of layers i..j-1
                    + the gradient sent back over the cut at i + the output sent over the cut at j,
                    infinite if the stage needs more memory than a device has.

The recurrence runs from the loss backwards because a stage's memory depends on its distance from the loss. Under 1F1B, the k-th
stage from the chain's end holds activations of `min(tail + k, microbatches)` microbatches, with `tail` stages between that end
and the loss. So one table answers every stage count. Whole picoseconds make sums exact, and ties the same on every machine.

Source: dissertation of Oobleck / Cornstarch / Entrain, Eq. 3.5 and 4.1 (there without cuts and memory, prefix first).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mmcompile.errors import PlanError

PER_SECOND = 10**12
"""Picoseconds per second. The partition computes in whole picoseconds, so that sums are exact."""
INFINITE = int(np.iinfo(np.int64).max)
"""Picoseconds that stand for a forbidden stage."""
Table = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionLayer:
    """Costs of one layer for one microbatch, as the partition reads them."""

    seconds: float
    """Seconds of the layer's forward and backward."""
    fixed_bytes: int = 0
    """Bytes of parameters, gradients and optimizer state."""
    saved_bytes: int = 0
    """Bytes of activations kept for the backward of one microbatch."""
    begin_fixed_bytes: int = 0
    """Bytes that a stage which begins with this layer adds once, not for each microbatch in flight."""
    begin_saved_bytes: int = 0
    """Additional bytes for each microbatch in flight in a stage that begins with this layer.

    They hold results of earlier layers that layers of the stage read too, such as masks.
    """
    working_bytes: int = 0
    """Bytes held only while this layer runs; a stage needs the largest value of its layers."""
    send_s: float = 0.0
    """Seconds to send the layer's output; counted for the stage that ends with this layer."""
    return_s: float = 0.0
    """Seconds to return the gradient of the layer's output; counted for the stage that begins right after this layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Stages of a chain: stage k is layers `boundaries[k]` (included) to `boundaries[k+1]` (excluded)."""

    boundaries: tuple[int, ...]
    bottleneck_ps: int = field(default=0, compare=False)
    """Picoseconds of the slowest stage, its sends included; 0 if not computed."""

    @property
    def bottleneck_s(self) -> float:
        """Seconds of the slowest stage, sends included."""
        return self.bottleneck_ps / PER_SECOND

    @property
    def num_stages(self) -> int:
        """Number of stages of the split."""
        return len(self.boundaries) - 1

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first, end) layer of each stage; the end is excluded."""
        return tuple(pairwise(self.boundaries))


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Time and memory of every stage that a chain's layers could make, as arrays; N is the number of layers."""

    layers: tuple[PartitionLayer, ...]

    @cached_property
    def begins(self) -> Table:
        """Entry i: picoseconds that a stage which begins with layer i subtracts from `ends`, [N+1].

        A stage of layers i..j-1 takes `ends[j] - begins[i]` picoseconds, its sends included.
        """
        return self._total - np.array([0, *(_picoseconds(layer.return_s) for layer in self.layers)])

    @cached_property
    def ends(self) -> Table:
        """Entry i: picoseconds of the first i layers plus the send of the last one's output, [N+1]."""
        return self._total + np.array([0, *(_picoseconds(layer.send_s) for layer in self.layers)])

    @cached_property
    def times(self) -> Table:
        """Entry [i, j]: picoseconds of the stage of layers i..j-1, sends included, [N+1, N+1]; infinite unless i < j."""
        table = self.ends[None, :] - self.begins[:, None]
        table[np.tri(len(table), dtype=np.bool_)] = INFINITE
        return table

    @cached_property
    def working_bytes(self) -> tuple[int, ...]:
        """Bytes that each layer alone holds while it runs."""
        return tuple(layer.working_bytes for layer in self.layers)

    def held(self, in_flight: int) -> Table:
        """Return entry i: bytes of parameters, gradients, optimizer state and saved activations of the first i layers, [N+1]."""
        return self._fixed + in_flight * self._saved

    def held_before(self, in_flight: int) -> Table:
        """Return entry i: bytes to subtract from `held(in_flight)` for a stage that begins with layer i, [N+1].

        A stage of layers i..j-1 holds `held(in_flight)[j] - held_before(in_flight)[i]` bytes, besides working bytes.
        """
        return self.held(in_flight) - self._begin_fixed - in_flight * self._begin_saved

    def needs(self, in_flight: int) -> Table:
        """Return the peak bytes of every stage for a number of microbatches in flight, [N+1, N+1].

        Entry [i, j] is for the stage of layers i..j-1; 0 unless i < j.
        """
        table = self.held(in_flight)[None, :] - self.held_before(in_flight)[:, None] + self._most_working
        table[np.tri(len(table), dtype=np.bool_)] = 0
        return table

    def within(self, in_flight: int, memory_bytes: int) -> Table:
        """Return a copy of `times`, [N+1, N+1], with infinite time for each stage that needs more than the memory."""
        if any(self.working_bytes):
            return np.where(self.needs(in_flight) <= memory_bytes, self.times, INFINITE)
        # Memory grows with j, so each row has one last j that fits.
        held, before = self.held(in_flight), self.held_before(in_flight)
        last = np.searchsorted(held, before + memory_bytes, side="right") - 1
        return np.where(np.arange(len(held))[None, :] <= last[:, None], self.times, INFINITE)

    @cached_property
    def _total(self) -> Table:
        return _prefix([_picoseconds(layer.seconds) for layer in self.layers])

    @cached_property
    def _fixed(self) -> Table:
        return _prefix([layer.fixed_bytes for layer in self.layers])

    @cached_property
    def _saved(self) -> Table:
        return _prefix([layer.saved_bytes for layer in self.layers])

    @cached_property
    def _begin_fixed(self) -> Table:
        return np.array([*(layer.begin_fixed_bytes for layer in self.layers), 0], dtype=np.int64)

    @cached_property
    def _begin_saved(self) -> Table:
        return np.array([*(layer.begin_saved_bytes for layer in self.layers), 0], dtype=np.int64)

    @cached_property
    def _most_working(self) -> Table:
        """Entry [i, j]: most bytes that one of the layers i..j-1 needs only while it runs, [N+1, N+1]; 0 unless i < j."""
        size = len(self.layers) + 1
        table = np.zeros((size, size), dtype=np.int64)
        table[:, 1:] = self.working_bytes
        return np.maximum.accumulate(np.triu(table, k=1), axis=1)


def partition(
    layers: Sequence[PartitionLayer],
    max_stages: int,
    *,
    memory_bytes: int | None = None,
    tail: int = 0,
    num_microbatches: int | None = None,
) -> tuple[Split | None, ...]:
    """Split a chain into 1, 2, ..., `max_stages` stages, so that the slowest stage is as fast as possible.

    Args:
        max_stages: at most `len(layers)`; a stage has at least one layer.
        memory_bytes: limit of one stage; None means no limit.
        tail: stages between the end of the chain and the loss, the loss stage included (0: the chain ends in the loss).
        num_microbatches: number of microbatches, which limits those in flight; None means many.

    Returns:
        One entry for each stage count; None where no split fits the memory. Of equal optima, the one whose first boundary is
        earliest, then the second, and so on (each with the rest of the chain split optimally).

    Raises:
        PlanError: fewer than one stage, or more stages than layers.
    """
    if not 1 <= max_stages <= len(layers):
        raise PlanError(f"cannot split {len(layers)} layers into {max_stages} stages; use 1 to {len(layers)} stages")
    tables = StageTables(layers=tuple(layers))

    def cost(stages_left: int) -> Table:
        in_flight = tail + stages_left
        if num_microbatches is not None:
            in_flight = min(in_flight, num_microbatches)
        return tables.times if memory_bytes is None else tables.within(in_flight, memory_bytes)

    return tuple(cheapest_splits(cost(stages_left) for stages_left in range(1, max_stages + 1)))


def cheapest_splits(costs: Iterable[Table]) -> Iterator[Split | None]:
    """Yield the splits of a chain into 1, 2, ... stages whose slowest stage is fastest; None where no split is possible.

    Args:
        costs: one table [N+1, N+1] for the 1st, 2nd, ... stage from the chain's end: entry [i, j] is the picoseconds of layers
            i..j-1, infinite where they must not be that stage.
    """
    best: Table | None = None
    cuts: list[Table] = []
    for cost in costs:
        if best is None:
            best = cost[:, -1]
        else:
            candidates = np.maximum(cost, best[None, :])
            cut = np.argmin(candidates, axis=1)
            best = candidates[np.arange(len(candidates)), cut]
            cuts.append(cut)
        yield _split(int(best[0]), cuts, len(cost) - 1)


def equal_ranges(first: int, last: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return layers `first` to `last` (excluded) in at most `count` ranges: sizes differ by one at most, longer ones first."""
    count = min(count, last - first)
    size, longer = divmod(last - first, count)
    ends = [first + index * size + min(index, longer) for index in range(count + 1)]
    return tuple(zip(ends, ends[1:], strict=False))


def _picoseconds(seconds: float) -> int:
    return round(seconds * PER_SECOND)


def _prefix(values: Sequence[int]) -> Table:
    return np.cumsum(np.array([0, *values], dtype=np.int64))


def _split(best_ps: int, cuts: Sequence[Table], num_layers: int) -> Split | None:
    if best_ps == INFINITE:
        return None
    boundaries = [0]
    for cut in reversed(cuts):
        boundaries.append(int(cut[boundaries[-1]]))
    return Split(boundaries=(*boundaries, num_layers), bottleneck_ps=best_ps)
