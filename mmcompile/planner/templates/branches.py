"""Pipelines of chains that branch: several chains that feed one, at its start or in the middle.

There is one path from each chain to the loss, and step time follows the longest, which is no sum over stages. A weighted
mean of all paths is such a sum, and never longer. So a search that minimises the mean for given path weights gives a lower
bound for every pipeline, and finds pipelines on the way. Weight then moves to the path that turned out longest, for the
next search. Where bound and best pipeline still differ, all pipelines whose bound is below the best known are listed: if
the list ends in time, the best is an optimum; otherwise the difference is stated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmcompile.planner.templates.intervals import FoundPipeline, Search
from mmcompile.planner.templates.line import INFINITE, MICROBATCHES_A_STAGE, Line, LineStage
from mmcompile.planner.templates.sweep import Costs, Sweep, steps

_SHARES = 12
"""Sum of the weights of all paths from a chain to the loss: a path of weight 3 counts 3/12 in the mean of path times."""
_ROUNDS = 6
"""Largest number of searches, one after another; each gives the paths from chains to the loss other weights in their mean."""
_FIRST_STEP = 4
"""Initial weight, of `_SHARES` in all, that moves to the longest path after a search; halved when another becomes longest."""
_INTERVALS = 64
"""Number of ranges of the slowest stage's time for which a search bounds step time; `_MORE_INTERVALS` more per node count."""
_MORE_INTERVALS = 8
_VISITS = 8_000
"""Largest number of stages that `_Listing` places in total while it lists the pipelines of one node count."""


def best_of_branches(line: Line, node_counts: Sequence[int]) -> dict[int, FoundPipeline]:
    """Return node count -> best pipeline found; a node count is absent if no pipeline was found that fits the memory."""
    searches = _searches(line, node_counts)
    results: dict[int, FoundPipeline] = {}
    for count in node_counts:
        tried = [search for search in searches if count in search.counts]
        if tried:
            sharpest = max(tried, key=lambda search: search.bound(count))
            for search in tried:
                if count in search.found:
                    sharpest.keep(count, search.found[count])
            found = _listed(sharpest, count)
            if found is not None:
                results[count] = found
    return results


def _searches(line: Line, node_counts: Sequence[int]) -> list[Search]:
    """Return finished searches with different path weights: how much each path from a chain to the loss counts in the bound.

    After each search, weight moves to the path that was longest. They end when the optimum of every node count is proven, or
    after `_ROUNDS`. A search leaves out the node counts whose optimum an earlier one proved.
    """
    weights, step, longest = _equal(line), _FIRST_STEP, -1
    # Pipelines that fit the memory even if all later chains' stages are between a stage and the loss.
    most_stages = line.most_stages(max(node_counts))
    best = Search.of(line, _families(line, weights), node_counts, num_stages=most_stages).found
    searches: dict[tuple[int, ...], Search] = {}
    left = list(node_counts)
    while left and weights not in searches and len(searches) < _ROUNDS:
        search = Search.of(line, _families(line, weights), left, fitting=True)
        for count in set(left) & set(best):
            search.keep(count, best[count])
        search.run(max_intervals=_INTERVALS + _MORE_INTERVALS * len(left))
        searches[weights] = search
        best |= search.found
        gaps = {count: search.result(count).gap for count in search.found}
        left = [count for count, gap in gaps.items() if gap > 0]
        if left:
            lengths = _lengths(line, _bounding(search, max(left, key=gaps.__getitem__)))
            before, longest = longest, lengths.index(max(lengths))
            step = step if before in (-1, longest) else max(1, step // 2)
            weights = _moved(weights, lengths, longest, step)
    return list(searches.values())


def _families(line: Line, weights: tuple[int, ...]) -> list[Costs]:
    return [Costs(line=line, path=path, first=path, last=path, weights=weights) for path in range(len(line.names))]


def _equal(line: Line) -> tuple[int, ...]:
    paths = range(len(line.names))
    # A path that is part of a longer one has weight 0.
    whole = [path for path in paths if all(line.begins[other, path] != line.starts[path] for other in range(path))]
    share, rest = divmod(_SHARES, len(whole))
    return tuple(share * (path in whole) + (path in whole[:rest]) for path in paths)


def _bounding(search: Search, count: int) -> Sequence[LineStage]:
    # The pipeline, feasible or not, whose weighted mean time is the search's lower bound.
    interval = min(search.settled, key=lambda each: int(each.lower[count]))
    sweep = min(search.sweeps([interval], count), key=lambda each: int(each.bounds[0, count]))
    return sweep.pieces(0, count)


def _lengths(line: Line, pieces: Sequence[LineStage]) -> list[int]:
    slowest = line.timing(pieces).slowest
    return [
        sum(line.time(piece) + MICROBATCHES_A_STAGE * slowest for piece in pieces if line.on_path(path, piece))
        for path in range(len(line.names))
    ]


def _moved(weights: Sequence[int], lengths: Sequence[int], longest: int, step: int) -> tuple[int, ...]:
    moved = list(weights)
    shortest = min((path for path in range(len(weights)) if weights[path]), key=lengths.__getitem__)
    taken = min(step, moved[shortest])
    moved[shortest] -= taken
    moved[longest] += taken
    return tuple(moved)


def _listed(search: Search, count: int) -> FoundPipeline | None:
    """Return the fastest pipeline on `count` nodes; None if none was found that fits the memory.

    Every pipeline whose lower bound of step time is below the time of the best one in `search.found` is listed and timed. If
    `_VISITS` ends the listing early, the result's lower bound holds for the pipelines that were not listed, too.
    """
    visits, bound = [_VISITS], INFINITE
    for interval in sorted(search.settled, key=lambda each: int(each.lower[count])):
        if interval.lower[count] >= search.upper[count]:
            break
        for sweep in search.sweeps([interval], count):
            for pieces in _Listing(sweep=sweep, search=search, count=count, visits=visits).pipelines():
                search.keep(count, pieces)
        if not visits[0]:
            bound = int(interval.lower[count])
            break
    if count not in search.found:
        return None
    total = int(search.upper[count])
    return FoundPipeline(pieces=search.found[count], total=total, bound=min(total, bound))


@dataclass(frozen=True, kw_only=True)
class _Listing:
    """Depth-first search, most promising first, through the pipelines of one node count that may beat the best found so far."""

    sweep: Sweep
    search: Search
    count: int
    visits: list[int]
    """Number of stages that may still be placed: a list of one int, so that several listings count down together."""

    def pipelines(self) -> Iterator[tuple[LineStage, ...]]:
        yield from self._from((), 0, self.count * self.sweep.shape.line.devices_per_node, 0, False)

    def _from(
        self, pieces: tuple[LineStage, ...], first: int, devices: int, spent: int, found: bool
    ) -> Iterator[tuple[LineStage, ...]]:
        """Yield the complete pipelines that begin with `pieces`; layer `first` is next, and `devices` devices are left.

        `spent`: ps that `pieces` add to the weighted mean time of all paths to the loss, times the sum of the weights. `found`:
        True if the slowest stage is among `pieces`.
        """
        line = self.sweep.shape.line
        if first == line.num_layers:
            yield pieces
            return
        for least, piece, cost, then in self._steps(first, devices, found):
            if least + spent >= int(self.search.upper[self.count]) * self.sweep.costs.scale:
                return
            if not self.visits[0]:
                return
            self.visits[0] -= 1
            left = devices - line.widths[piece.width]
            yield from self._from((*pieces, piece), piece.last, left, spent + cost, then)

    def _steps(self, first: int, devices: int, found: bool) -> list[tuple[int, LineStage, int, bool]]:
        line, sweep = self.sweep.shape.line, self.sweep
        # (least cost to the end, stage, its cost, slowest stage placed by then), cheapest first.
        ways: list[tuple[int, LineStage, int, bool]] = []
        device = devices % line.devices_per_node
        for width, times in steps(line, first, int(sweep.high[0])):
            taken = devices - line.widths[width]
            if taken < 0 or (device or line.devices_per_node) < line.widths[width]:
                continue
            at = (slice(first + 1, first + 1 + len(times)), 0, 0, *divmod(taken, line.devices_per_node))
            before, itself, after = (cost[:, 0] for cost in sweep.costs.of(first, times, sweep.low, sweep.high))
            options = [(after, sweep.behind[at], True)]
            if not found:
                options = [(itself, sweep.behind[at], True), (before, sweep.whole[at], False)]
            for cost, rest, then in options:
                for index in np.flatnonzero(cost + rest < INFINITE).tolist():
                    piece = LineStage(first=first, last=first + 1 + index, width=width)
                    ways.append((int(cost[index] + rest[index]), piece, int(cost[index]), then))
        return sorted(ways, key=lambda way: way[0])
