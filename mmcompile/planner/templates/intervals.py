"""`Search`: the fastest pipeline of each node count, by branch and bound over the time of the slowest stage.

Every time that some stage can have is a guess at the slowest stage's time. One sweep gives several intervals of guesses a
lower bound of step time each, for all node counts. Intervals that cannot hold a better pipeline are dropped, the others
are cut into smaller ones, down to single guesses. For a chain the bound of a single guess is its optimum.
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
"""Number of parts into which the search cuts an interval (range of times of the slowest stage)."""
_GUESSES = 16
"""Largest number of ranges of the slowest stage's time that one sweep bounds; fewer if tables would exceed `_CELLS` numbers."""
_CELLS = 3 * 10**6


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Range of possible times of the slowest stage: `Search.guesses[first]` to `Search.guesses[last]`, both included."""

    first: int
    last: int
    """Index of the range's largest time in `Search.guesses`, the ascending times that a slowest stage may have."""
    lower: NDArray[np.int64]
    """Entry n: lower bound in ps of the step time on n nodes if the slowest stage's time is in this range, [nodes + 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPipeline:
    """Best pipeline known for a node count, with a lower bound of every pipeline's time."""

    pieces: tuple[LineStage, ...]
    total: int
    """Step time T of the pipeline in picoseconds."""
    bound: int
    """Lower bound of the step time T over all pipelines in picoseconds; equal to `total` for an optimum."""

    @property
    def gap(self) -> float:
        """Largest share of the time by which another pipeline could be faster, 0..1; 0 for an optimum."""
        return 1 - self.bound / self.total if self.total else 0.0


@dataclass(kw_only=True)
class Search:
    """Search for the best pipeline of each node count, with lower bounds, by branch and bound over the slowest stage's time."""

    line: Line
    families: Sequence[Costs]
    """Calculators of stage costs, one for each chain (or range of chains) that may hold the slowest stage."""
    counts: NDArray[np.int64]
    """Node counts that may have a pipeline, ascending."""
    guesses: NDArray[np.int64]
    """Times that the slowest stage may have, in picoseconds, ascending: those of all possible stages."""
    num_stages: int | None
    """Largest number of stages; each stage's memory must hold one microbatch more than there are stages behind it.

    None: stages are not counted, and each stage's memory is checked as if it were the last.
    """
    found: dict[int, tuple[LineStage, ...]]
    """Node count -> stages of the best pipeline known."""
    upper: NDArray[np.int64]
    """Entry n: step time T in ps of the best pipeline known on n nodes, [nodes + 1]."""
    fitting: bool
    """True to keep only pipelines that fit the memory."""
    settled: list[Interval] = field(default_factory=list)
    """Ranges of the slowest stage's time that `run` did not cut further (one time, or `max_intervals` reached), with bounds."""

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
        """Return a new search that has, for each node count, a first pipeline: one whose slowest stage is as fast as possible."""
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
        """Store a pipeline in `found` if it beats the best on `count` nodes and, if `fitting` is set, fits the memory."""
        total = self.line.timing(pieces).total
        if total < self.upper[count] and (not self.fitting or self.line.fits(pieces)):
            self.upper[count] = total
            self.found[count] = tuple(pieces)

    def run(self, max_intervals: int | None = None) -> None:
        """Cut ranges of the slowest stage's time and bound step time in each, until none can have a better pipeline.

        The search also ends when about `max_intervals` ranges have been bounded.
        """
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
        """Return bool [counts]: True for node counts where a slowest stage's time in `interval` may give a faster pipeline."""
        return interval.lower[self.counts] < self.upper[self.counts]

    def bound(self, count: int) -> int:
        """Return a lower bound of the step time T in ps for a node count, valid after `run`."""
        return min(int(self.upper[count]), *(int(each.lower[count]) for each in self.settled), INFINITE)

    def result(self, count: int) -> FoundPipeline:
        """Return the best pipeline known for a node count, and its bound."""
        return FoundPipeline(pieces=self.found[count], total=int(self.upper[count]), bound=self.bound(count))

    def sweeps(self, intervals: Sequence[Interval], num_nodes: int) -> list[Sweep]:
        """Return, for each entry of `families`, least costs on up to `num_nodes` nodes by range of the slowest stage's time."""
        low = self.guesses[[each.first for each in intervals]]
        high = self.guesses[[each.last for each in intervals]]
        shape = Shape(line=self.line, num_nodes=num_nodes, num_stages=self._most_stages(intervals))
        return [Sweep.of(shape, family, low, high) for family in self.families]

    def _most_stages(self, intervals: Sequence[Interval]) -> int | None:
        if self.num_stages is None or not self.line.is_chain:
            return self.num_stages
        upper = max(int(self.upper[self.counts[self.alive(each)]].max(initial=0)) for each in intervals)
        slowest = max(1, int(self.guesses[min(each.first for each in intervals)]))
        # Each stage adds at least 3 times the slowest one to the step time.
        return max(1, min(self.num_stages, (upper - self.line.least_path) // (3 * slowest)))

    def _chunk(self) -> int:
        stages = 1 if self.num_stages is None else self.num_stages + 1
        cells = (self.line.num_layers + 1) * stages * len(self.upper) * self.line.devices_per_node
        return max(1, min(_GUESSES, _CELLS // cells))

    def _cut(self, interval: Interval, ways: int) -> list[Interval]:
        size = interval.last + 1 - interval.first
        ends = np.linspace(interval.first, interval.last + 1, min(ways, size) + 1).astype(int).tolist()
        parts = [
            Interval(first=begin, last=end - 1, lower=np.maximum(interval.lower, self._simple(begin)))
            for begin, end in pairwise(ends)
        ]
        return [part for part in parts if self.alive(part).any()]

    def _simple(self, guess: int) -> NDArray[np.int64]:
        chains = 1 if self.line.is_chain else len(self.line.names)
        stages = np.maximum(1, -(-np.arange(len(self.upper)) // chains))
        # A lower bound: the longest path's layers, plus 3 times the slowest stage for each stage of that path.
        return self.line.least_path + 3 * stages * self.guesses[guess]

    def _bound(self, intervals: Sequence[Interval]) -> list[Interval]:
        """Return ranges of the slowest stage's time with better lower bounds of step time; store faster pipelines in `found`."""
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
