"""Exact mapping of layers to stages and devices: the slowest stage is enumerated, in intervals, by branch and bound.

Every time that some stage can have is a guess at the slowest. Intervals of guesses are bounded by one sweep for all node
counts; those that cannot hold a better pipeline are dropped, the others are cut in smaller ones, down to single guesses,
whose bound is their optimum. Memory is first looked at stage by stage only; where the best pipeline then has too many
microbatches in flight, it is searched again with the stages counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mmcompile.plan.templates.line import INFINITE, Line, Piece
from mmcompile.plan.templates.sweep import Costs, Shape, Slowest, Sweep

_WAYS = 4
"""Intervals that one is cut into."""
_GUESSES = 16
"""Intervals bounded in one sweep, if the tables stay below `_CELLS`."""
_CELLS = 3 * 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """The best pipeline found for a node count."""

    pieces: tuple[Piece, ...]
    total: int
    """T in picoseconds."""
    bound: int
    """No pipeline is faster; equal to `total` for an optimum."""


def mapped(line: Line, node_counts: Sequence[int], weights: Sequence[int] | None = None) -> dict[int, Mapped]:
    """The best pipeline for each node count that has one, with all of its devices in use.

    Args:
        weights: of each chain's path to the loss, for lower bounds of chains that branch; None for a chain.
    """
    families = _families(line, weights)
    search = _Search.of(line, families, node_counts, num_stages=None)
    search.run()
    tight = [count for count, found in search.found.items() if not line.fits(found)]
    results = {count: search.result(count) for count in search.found if count not in tight}
    if tight:
        counted = _Search.of(line, families, tight, num_stages=_most_stages(line, max(tight)))
        counted.run()
        for count in counted.found:
            result, bound = counted.result(count), search.result(count).bound
            # Stages beside the path to the loss count as if behind: no bound, then, but a pipeline that fits.
            bound = result.bound if line.is_chain else min(result.total, bound)
            results[count] = Mapped(pieces=result.pieces, total=result.total, bound=bound)
    return dict(sorted(results.items()))


def _families(line: Line, weights: Sequence[int] | None) -> list[Costs]:
    last = len(line.names) - 1
    if line.is_chain:
        return [Costs(line=line, path=0, first=0, last=last, weights=(1, *(0,) * last))]
    assert weights is not None
    return [Costs(line=line, path=path, first=path, last=path, weights=tuple(weights)) for path in range(last + 1)]


def _most_stages(line: Line, num_nodes: int) -> int:
    by_memory = int(line.deepest.max()) + 1
    return min(line.num_layers, num_nodes * line.devices_per_node, by_memory)


@dataclass(frozen=True, kw_only=True)
class _Interval:
    first: int
    """Into the sorted guesses."""
    last: int
    """Included."""
    lower: NDArray[np.int64]
    """[nodes + 1]: bound of T."""


@dataclass(kw_only=True)
class _Search:
    line: Line
    families: Sequence[Costs]
    counts: NDArray[np.int64]
    """Node counts with a pipeline, rising."""
    guesses: NDArray[np.int64]
    """Rising picoseconds."""
    num_stages: int | None
    upper: NDArray[np.int64]
    """[nodes + 1]: T of the best pipeline."""
    unresolved: NDArray[np.int64]
    """[nodes + 1]: least bound of single guesses that no pipeline reached."""
    found: dict[int, tuple[Piece, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, line: Line, families: Sequence[Costs], node_counts: Sequence[int], num_stages: int | None
    ) -> _Search:
        most = max(node_counts)
        least = Slowest.of(Shape(line=line, num_nodes=most, num_stages=num_stages)).times
        counts = np.array(sorted(count for count in node_counts if least[count] < INFINITE), dtype=np.int64)
        search = cls(
            line=line,
            families=families,
            counts=counts,
            guesses=np.unique(line.times[line.times < INFINITE]),
            num_stages=num_stages,
            upper=np.full(most + 1, INFINITE),
            unresolved=np.full(most + 1, INFINITE),
        )
        # A first pipeline for each count: one that balances best.
        for start in range(0, len(counts), _GUESSES):
            chunk = counts[start : start + _GUESSES]
            at = np.searchsorted(search.guesses, least[chunk])
            search._bound([_Interval(first=int(i), last=int(i), lower=search._simple(int(i))) for i in at])
        search.guesses = search.guesses[search.guesses >= (least[counts].min() if len(counts) else 0)]
        return search

    def run(self) -> None:
        intervals = self._cut(_Interval(first=0, last=len(self.guesses) - 1, lower=self._simple(0)), _GUESSES)
        while intervals:
            children: list[_Interval] = []
            size = self._chunk()
            for start in range(0, len(intervals), size):
                alive = [each for each in intervals[start : start + size] if self._alive(each).any()]
                for interval in self._bound(alive) if alive else ():
                    children += self._cut(interval, _WAYS)
            intervals = [child for child in children if self._alive(child).any()]

    def result(self, count: int) -> Mapped:
        bound = min(int(self.upper[count]), int(self.unresolved[count]))
        return Mapped(pieces=self.found[count], total=int(self.upper[count]), bound=bound)

    def _alive(self, interval: _Interval) -> NDArray[np.bool_]:
        """[counts]: whether a better pipeline may be in it."""
        return interval.lower[self.counts] < self.upper[self.counts]

    def _chunk(self) -> int:
        stages = 1 if self.num_stages is None else self.num_stages + 1
        cells = (self.line.num_layers + 1) * stages * len(self.upper) * self.line.devices_per_node
        return max(1, min(_GUESSES, _CELLS // cells))

    def _cut(self, interval: _Interval, ways: int) -> list[_Interval]:
        """Parts of it that may hold a better pipeline; none of a single guess, which is settled."""
        if interval.first == interval.last:
            if len(self.guesses) > 1 or interval.lower.min() < INFINITE:
                np.minimum(self.unresolved, np.where(interval.lower < self.upper, interval.lower, INFINITE), self.unresolved)
            return []
        bounds = np.linspace(interval.first, interval.last + 1, min(ways, interval.last - interval.first + 1) + 1)
        ends = np.unique(np.rint(bounds).astype(int)).tolist()
        parts = [
            _Interval(first=a, last=b - 1, lower=np.maximum(interval.lower, self._simple(a)))
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        return [part for part in parts if self._alive(part).any()]

    def _simple(self, guess: int) -> NDArray[np.int64]:
        """[nodes + 1]: T is at least the layers of a path, and 3 times the slowest for each of its stages."""
        nodes = np.arange(len(self.upper))
        chains = 1 if self.line.is_chain else len(self.line.names)
        layers = max(int(self.line.least[begin <= np.arange(self.line.num_layers)].sum()) for begin in [0]) if chains == 1 else 0
        return layers + 3 * np.maximum(1, -(-nodes // chains)) * self.guesses[guess]

    def _bound(self, intervals: Sequence[_Interval]) -> list[_Interval]:
        """The intervals with sharper bounds; pipelines met on the way are kept."""
        alive = [self.counts[self._alive(each)] for each in intervals]
        most = int(max(counts.max() for counts in alive if len(counts)))
        low = self.guesses[[each.first for each in intervals]]
        high = self.guesses[[each.last for each in intervals]]
        shape = Shape(line=self.line, num_nodes=most, num_stages=self.num_stages)
        sweeps = [Sweep.of(shape, family, low, high) for family in self.families]
        bounds = np.array([sweep.bounds for sweep in sweeps])  # [families, intervals, nodes + 1]
        least = bounds.min(axis=0)
        for count in self.counts[self.counts <= most].tolist():
            guess = int(least[:, count].argmin())
            if least[guess, count] < self.upper[count]:
                self._keep(count, sweeps[int(bounds[:, guess, count].argmin())].pieces(guess, count))
        sharper: list[_Interval] = []
        for index, interval in enumerate(intervals):
            lower = interval.lower.copy()
            np.maximum(lower[: most + 1], least[index], out=lower[: most + 1])
            sharper.append(_Interval(first=interval.first, last=interval.last, lower=lower))
        return sharper

    def _keep(self, count: int, pieces: Sequence[Piece]) -> None:
        total = self.line.timing(pieces).total
        if total < self.upper[count]:
            self.upper[count] = total
            self.found[count] = tuple(pieces)


def gaps(results: Mapping[int, Mapped]) -> dict[int, float]:
    """Node count -> by which part of its T a pipeline may be slower than the fastest."""
    return {count: 1 - result.bound / result.total for count, result in results.items()}
