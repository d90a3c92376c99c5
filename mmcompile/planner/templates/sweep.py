"""One pass over a line from the loss backwards, for many guesses of the slowest stage at once.

With t the time of a stage, w that of the slowest stage k*, the step time T (see `line`) of a chain is a sum over its stages:

    T = sum before k* of (t + 4 w)  +  4 w  +  sum behind k* of (2 t + 3 w),    t <= w before, t < w behind

so for a given w the best pipeline is a shortest path over (first layer, devices left), and one pass from the end gives it
for every number of nodes. A guess is an interval [low, high] around w: with max(low, t) for w the pass gives a lower
bound for all w inside, and the optimum if low = high.

Chains that branch: the longest path is at least a mean over all paths with any weights (summing up to 1). A stage counts with W,
the sum of weights of the paths it is on; those behind k* count once more if they are on the path of k*:

    stage W (t + 4 w) [+ t - w],    k* itself 5 W w - w

Where memory limits the microbatches in flight, a third coordinate counts the stages that remain to be placed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mmcompile.planner.templates.line import INFINITE, MICROBATCHES_A_STAGE, Line, LineStage


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Calculator of the ps that a stage adds to step time, times `scale`, if the slowest stage is in chains `first` to `last`."""

    line: Line
    path: int
    """Path that runs through the slowest stage: index of the chain where it begins."""
    first: int
    last: int
    weights: tuple[int, ...]
    """Weight of the path from each chain to the loss, in the mean of all paths' times; integers, one a chain."""

    @property
    def scale(self) -> int:
        """Sum of `weights`. Costs are multiplied by it instead of dividing each weight by it, so that they are integers."""
        return sum(self.weights)

    @cached_property
    def _weight(self) -> NDArray[np.int64]:
        # Entry [c, j]: sum of weights of the paths through a stage of chain c that ends before layer j.
        ends = np.arange(self.line.num_layers + 1)
        on = ends[None, None, :] > self.line.begins[:, :, None]
        return (on * np.array(self.weights)[:, None, None]).sum(axis=0)

    @cached_property
    def _behind(self) -> NDArray[np.int64]:
        # Entry [c, j]: `scale` if a stage of chain c that ends before layer j is on path `path`, else 0.
        ends = np.arange(self.line.num_layers + 1)
        return (ends[None, :] > self.line.begins[self.path][:, None]) * self.scale

    def of(
        self, first: int, times: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return what each of n stages adds to the time of a step, in picoseconds times `scale`: three arrays [n, guesses].

        The first array is for stages in front of the pipeline's slowest stage, the second for stages that are the slowest, the
        third for stages behind it. Entry [k, g] is of the stage of layers `first` to `first + k` (included), if the time of
        the slowest stage is in range g.

        Args:
            first: first layer of all n stages.
            times: picoseconds of the n stages, [n].
            low, high: ends of each range of the slowest stage's time in picoseconds, [guesses].
        """
        chain = int(self.line.chain_of[first])
        ends = slice(first + 1, first + 1 + len(times))
        weight, behind = self._weight[chain, ends, None], self._behind[chain, ends, None]
        time = times[:, None]
        at_least = np.maximum(low, time)
        before = weight * (time + MICROBATCHES_A_STAGE * at_least)
        share = MICROBATCHES_A_STAGE * weight - behind
        after = weight * time + behind * time + share * np.where(share >= 0, at_least, high)
        itself = ((MICROBATCHES_A_STAGE + 1) * weight - self.scale) * time
        return (
            np.where((time <= high) & (chain <= self.last), before, INFINITE),
            np.where((time <= high) & (time >= low) & (self.first <= chain <= self.last), itself, INFINITE),
            np.where((time < high) & (chain >= self.first), after, INFINITE),
        )


def steps(line: Line, first: int, limit: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield, for each number of devices, the times of the stages that begin with layer `first`, up to the last within `limit` ps.

    Yields (index into `line.widths`, times); entry k of the times is for layers `first` to `first + k` (included), in ps.
    """
    for width in range(len(line.widths)):
        times = line.times[width, first, first + 1 :]
        fast = np.flatnonzero(times <= limit)
        if len(fast):
            yield width, times[: fast[-1] + 1]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of the cost tables of a dynamic program over layers, and the slices of them that a stage reads and writes.

    Entry [i, g, s, n, d]: least cost (ps, for `Sweep` times `Costs.scale`) of layers i to the last in s stages on n nodes and d
    more devices, if the slowest stage's time is in range g of several ranges ("guesses") that are computed at once.
    """

    line: Line
    num_nodes: int
    num_stages: int | None = None
    """Largest number of stages if the tables count stages; None if they do not (the axis of stages left then has length 1)."""

    def table(self, guesses: int) -> NDArray[np.int64]:
        """Return a cost table with the axes of `Shape` for `guesses` ranges of the slowest stage's time, all `INFINITE`."""
        stages = 1 if self.num_stages is None else self.num_stages + 1
        shape = (self.line.num_layers + 1, guesses, stages, self.num_nodes + 1, self.line.devices_per_node)
        return np.full(shape, INFINITE)

    def rest(self, table: NDArray[np.int64], first: int, count: int, width: int) -> NDArray[np.int64]:
        """Return a view of `table`: entry k has the least costs of all layers after a stage of layers `first` to `first + k`.

        Axes: [count, ranges of the slowest stage's time, stages left, nodes, devices]. A stage has `line.widths[width]` devices.
        """
        stages = slice(None) if self.num_stages is None else slice(0, -1)
        free = self.line.devices_per_node - self.line.widths[width] + 1
        return table[first + 1 : first + 1 + count, :, stages, :-1, :free]

    def put(self, row: NDArray[np.int64], found: NDArray[np.int64], width: int) -> None:
        """Lower the costs `row` of the layers from one layer on to `found`, where `found` is smaller.

        `found` are the costs if the first stage has `line.widths[width]` devices. Axes of both: [ranges of the slowest stage's
        time, stages left, nodes, devices], in `found` those of nodes and devices that are left after the first stage.
        """
        target = row if self.num_stages is None else row[:, 1:]
        devices = self.line.widths[width]
        if devices < self.line.devices_per_node:
            inside = target[:, :, :-1, devices:]
            np.minimum(inside, found[..., :-1], out=inside)
        full = target[:, :, 1:, 0]
        np.minimum(full, found[..., -1], out=full)

    def depths(self, first: int, count: int, width: int) -> NDArray[np.int64]:
        """Return entry [k, 0, s]: 0 if layers `first` to `first + k` as a stage have memory for s stages behind, else `INFINITE`.

        The stage has `line.widths[width]` devices; with s stages behind it, it holds s + 1 microbatches. All entries are 0 if
        `num_stages` is None.
        """
        if self.num_stages is None:
            return np.zeros((count, 1, 1), dtype=np.int64)
        deepest = self.line.deepest[width, first, first + 1 : first + 1 + count]
        return np.where(deepest[:, None, None] >= np.arange(self.num_stages), 0, INFINITE)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Two tables with the axes of `Shape`: least ps of step time, times `Costs.scale`, of the stages from each layer to the loss.

    `whole`: the pipeline's slowest stage is one of these stages. `behind`: the slowest stage comes before these stages.
    """

    shape: Shape
    costs: Costs
    low: NDArray[np.int64]
    """Entry g: least picoseconds of the slowest stage in range g of its possible times, [ranges]."""
    high: NDArray[np.int64]
    whole: NDArray[np.int64]
    behind: NDArray[np.int64]

    @classmethod
    def of(cls, shape: Shape, costs: Costs, low: NDArray[np.int64], high: NDArray[np.int64]) -> Sweep:
        """Return the tables filled from the last layer to the first; `low[g]` to `high[g]` ps is range g of the slowest time."""
        line = shape.line
        whole, behind = shape.table(len(low)), shape.table(len(low))
        behind[line.num_layers, :, 0, 0, 0] = 0
        limit = int(high.max())
        for first in reversed(range(line.num_layers)):
            chain = int(line.chain_of[first])
            for width, times in steps(line, first, limit):
                before, itself, after = costs.of(first, times, low, high)
                depths = shape.depths(first, len(times), width)
                rest_behind = shape.rest(behind, first, len(times), width)
                if chain >= costs.first:
                    shape.put(behind[first], _best(rest_behind, after, depths), width)
                if chain <= costs.last:
                    rest = shape.rest(whole, first, len(times), width)
                    shape.put(whole[first], _best(rest, before, depths), width)
                slowest = np.flatnonzero((itself < INFINITE).any(axis=1))
                if len(slowest):
                    shape.put(whole[first], _best(rest_behind[slowest], itself[slowest], depths[slowest]), width)
        return cls(shape=shape, costs=costs, low=low, high=high, whole=whole, behind=behind)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Entry [g, n]: lower bound in ps of step time on n nodes if the slowest stage's time is in range g, else `INFINITE`."""
        least = self.whole[0, :, :, :, 0].min(axis=1)
        return np.where(least < INFINITE, -(-least // self.costs.scale), INFINITE)

    def pieces(self, guess: int, num_nodes: int) -> list[LineStage]:
        """Return the stages that gave `bounds[guess, num_nodes]` (slowest stage in range `guess`); they may exceed the memory."""
        node, device, first, found = num_nodes, 0, 0, False
        left = int(self.whole[0, guess, :, num_nodes, 0].argmin())
        pieces: list[LineStage] = []
        while first < self.shape.line.num_layers:
            piece, found, left = self._step(guess, first, left, node, device, found)
            taken = node * self.shape.line.devices_per_node + device - self.shape.line.widths[piece.width]
            node, device = divmod(taken, self.shape.line.devices_per_node)
            pieces.append(piece)
            first = piece.last
        return pieces

    def _step(
        self, guess: int, first: int, left: int, node: int, device: int, found: bool
    ) -> tuple[LineStage, bool, int]:
        # Returned: the stage that gives the entry its cost, then `found` and `left` behind that stage.
        line, one = self.shape.line, slice(guess, guess + 1)
        table = self.behind if found else self.whole
        wanted = table[first, guess, left, node, device]
        rest_left = left if self.shape.num_stages is None else left - 1
        for width, times in steps(line, first, int(self.high[guess])):
            taken = node * line.devices_per_node + device - line.widths[width]
            if taken < 0 or (device or line.devices_per_node) < line.widths[width]:
                continue
            at = (slice(first + 1, first + 1 + len(times)), guess, rest_left, *divmod(taken, line.devices_per_node))
            before, itself, after = (cost[:, 0] for cost in self.costs.of(first, times, self.low[one], self.high[one]))
            room = self.shape.depths(first, len(times), width)[:, 0, rest_left if self.shape.num_stages else 0]
            ways = (
                ((after, self.behind, True),) if found else ((itself, self.behind, True), (before, self.whole, False))
            )
            for cost, source, then in ways:
                match = np.flatnonzero(source[at] + cost + room == wanted)
                if len(match):
                    return LineStage(first=first, last=first + 1 + int(match[0]), width=width), then, rest_left
        raise AssertionError("the tables have no stage that explains a bound")


def _best(rest: NDArray[np.int64], cost: NDArray[np.int64], depths: NDArray[np.int64]) -> NDArray[np.int64]:
    # Shapes: rest [stages, guesses, ...], cost [stages, guesses].
    added = cost[:, :, None] + depths
    return np.minimum((rest + added[..., None, None]).min(axis=0), INFINITE)


def least_slowest(shape: Shape) -> NDArray[np.int64]:
    """Return the least possible picoseconds of the slowest stage: entry n is for n nodes; `INFINITE` where no pipeline fits."""
    line, table = shape.line, shape.table(1)
    table[line.num_layers, :, 0, 0, 0] = 0
    for first in reversed(range(line.num_layers)):
        for width, times in steps(line, first, INFINITE - 1):
            stage = np.maximum(times[:, None, None], shape.depths(first, len(times), width))
            rest = shape.rest(table, first, len(times), width)
            shape.put(table[first], np.maximum(rest, stage[..., None, None]).min(axis=0), width)
    return table[0, 0, :, :, 0].min(axis=0)
