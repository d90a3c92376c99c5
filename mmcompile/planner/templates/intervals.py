"""`Search`: the slowest stage enumerated in intervals, by branch and bound, for all node counts at once.

Every time that some stage can have is a guess at the slowest. Intervals of guesses are bounded by one sweep for all node
counts; those that cannot hold a better pipeline are dropped, the others are cut in smaller ones, down to single guesses.
For a chain the bound of a single guess is its optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mmcompile.planner.templates.line import INFINITE, Line, LineStage
from mmcompile.planner.templates.sweep import Costs, Shape, Sweep, least_slowest

_WAYS = 8
"""Intervals that one is cut into."""
_GUESSES = 16
"""Intervals bounded in one sweep, if its tables stay below `_CELLS` numbers."""
_CELLS = 3 * 10**6


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Guesses at the slowest stage, by their numbers."""

    first: int
    last: int
    """Included."""
    lower: NDArray[np.int64]
    """[nodes + 1]: T of any pipeline with its slowest stage in the interval is at least this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPipeline:
    """The best pipeline known for a node count."""

    pieces: tuple[LineStage, ...]
    total: int
    """T in picoseconds."""
    bound: int
    """No pipeline has a smaller T; equal to `total` for an optimum."""

    @property
    def gap(self) -> float:
        """No pipeline is faster by more than this part of the time; 0 for an optimum."""
        return 1 - self.bound / self.total if self.total else 0.0


@dataclass(kw_only=True)
class Search:
    """Finds pipelines for `counts` nodes, and bounds on all others."""

    line: Line
    families: Sequence[Costs]
    """Costs of stages, by the chain of the slowest."""
    counts: NDArray[np.int64]
    """Node counts that may have a pipeline, rising."""
    guesses: NDArray[np.int64]
    """Rising picoseconds."""
    num_stages: int | None
    """Most stages, if they are counted, so that each has the memory for as many microbatches as stages follow it, and one;
    None looks at each stage as if it were the last."""
    found: dict[int, tuple[LineStage, ...]]
    """Node count -> the best pipeline known."""
    upper: NDArray[np.int64]
    """[nodes + 1]: its T."""
    fitting: bool
    """Keep only pipelines that fit the memory."""
    settled: list[Interval] = field(default_factory=list)
    """Intervals that were not cut again, with their last bounds."""

    @classmethod
    def of(
        cls,
        line: Line,
        families: Sequence[Costs],
        node_counts: Sequence[int],
        *,
        num_stages: int | None = None,
        fitting: bool = False,
    ) -> Search:
        """Prepare a search; for each node count, a pipeline that balances best is found on the way."""
        most = max(node_counts)
        least = least_slowest(Shape(line=line, num_nodes=most, num_stages=num_stages))
        counts = np.array(sorted(count for count in node_counts if least[count] < INFINITE), dtype=np.int64)
        guesses = np.unique(line.times[line.times < INFINITE])
        search = cls(
            line=line,
            families=families,
            counts=counts,
            guesses=guesses[guesses >= (least[counts].min() if len(counts) else INFINITE)],
            num_stages=num_stages,
            found={},
            upper=np.full(most + 1, INFINITE),
            fitting=fitting,
        )
        size = search._chunk()
        for start in range(0, len(counts), size):
            at = np.searchsorted(search.guesses, least[counts[start : start + size]]).tolist()
            search._bound([Interval(first=guess, last=guess, lower=search._simple(guess)) for guess in at])
        return search

    def keep(self, count: int, pieces: Sequence[LineStage]) -> None:
        """Note a pipeline, if it is the best so far."""
        total = self.line.timing(pieces).total
        if total < self.upper[count] and (not self.fitting or self.line.fits(pieces)):
            self.upper[count] = total
            self.found[count] = tuple(pieces)

    def run(self, max_intervals: int | None = None) -> None:
        """Cut intervals until no better pipeline is left, or about so many were bounded."""
        if not len(self.counts):
            return
        bounded = 0
        whole = Interval(first=0, last=len(self.guesses) - 1, lower=self._simple(0))
        intervals = self._cut(whole, _GUESSES)
        while intervals:
            children: list[Interval] = []
            size = self._chunk()
            for start in range(0, len(intervals), size):
                alive = [each for each in intervals[start : start + size] if self.alive(each).any()]
                bounded += len(alive)
                for interval in self._bound(alive) if alive else ():
                    if interval.first == interval.last or (max_intervals is not None and bounded > max_intervals):
                        self.settled.append(interval)
                    else:
                        children += self._cut(interval, _WAYS)
            intervals = [child for child in children if self.alive(child).any()]

    def alive(self, interval: Interval) -> NDArray[np.bool_]:
        """[counts]: whether a better pipeline may be in it."""
        return interval.lower[self.counts] < self.upper[self.counts]

    def bound(self, count: int) -> int:
        """No pipeline of so many nodes has a smaller T; known once `run` has ended."""
        return min(int(self.upper[count]), *(int(each.lower[count]) for each in self.settled), INFINITE)

    def result(self, count: int) -> FoundPipeline:
        """Return the best pipeline known for a node count, and its bound."""
        return FoundPipeline(pieces=self.found[count], total=int(self.upper[count]), bound=self.bound(count))

    def sweeps(self, intervals: Sequence[Interval], num_nodes: int) -> list[Sweep]:
        """Tables of so many nodes, one for each family."""
        low = self.guesses[[each.first for each in intervals]]
        high = self.guesses[[each.last for each in intervals]]
        shape = Shape(line=self.line, num_nodes=num_nodes, num_stages=self._most_stages(intervals))
        return [Sweep.of(shape, family, low, high) for family in self.families]

    def _most_stages(self, intervals: Sequence[Interval]) -> int | None:
        """Stages that a better pipeline may have: 3 times the slowest for each is less than T (`_simple`)."""
        if self.num_stages is None or not self.line.is_chain:
            return self.num_stages
        upper = max(int(self.upper[self.counts[self.alive(each)]].max(initial=0)) for each in intervals)
        slowest = max(1, int(self.guesses[min(each.first for each in intervals)]))
        return max(1, min(self.num_stages, (upper - self.line.least_path) // (3 * slowest)))

    def _chunk(self) -> int:
        stages = 1 if self.num_stages is None else self.num_stages + 1
        cells = (self.line.num_layers + 1) * stages * len(self.upper) * self.line.devices_per_node
        return max(1, min(_GUESSES, _CELLS // cells))

    def _cut(self, interval: Interval, ways: int) -> list[Interval]:
        """Parts that may hold a better pipeline."""
        size = interval.last + 1 - interval.first
        ends = np.linspace(interval.first, interval.last + 1, min(ways, size) + 1).astype(int).tolist()
        parts = [
            Interval(first=begin, last=end - 1, lower=np.maximum(interval.lower, self._simple(begin)))
            for begin, end in pairwise(ends)
        ]
        return [part for part in parts if self.alive(part).any()]

    def _simple(self, guess: int) -> NDArray[np.int64]:
        """[nodes + 1]: T is at least the layers of a path, and 3 times the slowest for each stage of the longest."""
        chains = 1 if self.line.is_chain else len(self.line.names)
        stages = np.maximum(1, -(-np.arange(len(self.upper)) // chains))
        return self.line.least_path + 3 * stages * self.guesses[guess]

    def _bound(self, intervals: Sequence[Interval]) -> list[Interval]:
        """The intervals with sharper bounds; pipelines met on the way are kept."""
        most = max(int(self.counts[self.alive(each)].max()) for each in intervals)
        sweeps = self.sweeps(intervals, most)
        bounds = np.array([sweep.bounds for sweep in sweeps])  # [families, intervals, nodes + 1]
        least = bounds.min(axis=0)
        single = np.array([each.first == each.last for each in intervals])
        for count in self.counts[self.counts <= most].tolist():
            # The most promising interval; and of single guesses the best, which will not be looked at again.
            for bound in (least[:, count], np.where(single, least[:, count], INFINITE)):
                guess = int(bound.argmin())
                if bound[guess] < self.upper[count]:
                    self.keep(count, sweeps[int(bounds[:, guess, count].argmin())].pieces(guess, count))
        return [
            Interval(
                first=interval.first,
                last=interval.last,
                lower=np.maximum(interval.lower, np.pad(least[index], (0, len(self.upper) - most - 1))),
            )
            for index, interval in enumerate(intervals)
        ]
