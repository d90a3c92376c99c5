"""Post-balancing that leaves samples on the node where they arrived: only what a node has too much of moves to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.balancer import Balancer, check_grid, equal_runs
from mmcompile.batching.balance.bucket_bounds import lower_bound
from mmcompile.batching.balance.lpt import lpt, place_in_order
from mmcompile.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLocal(Balancer):
    """Balancer that equalizes node loads by moving few samples, then balances the ranks of each node by LPT, per component.

    Two kinds of components are balanced by LPT over all replicas instead, as in `PostBalance`: those whose largest load would
    exceed the lower bound by more than the tolerance, and those whose number of replicas is not that of the last component.

    Goes further than OrchMLLM's node-wise rearrangement (§5.2.2), which makes batches first and then chooses their ranks.
    """

    name: ClassVar[str] = "node-local"

    ranks_per_node: int = 8
    """Number of consecutive replicas of the last component on one node. Samples arrive in equal runs at these replicas."""
    tolerance: float = 0.02
    """Largest accepted relative excess of the largest load over its lower bound."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign the samples of a step with one microbatch.

        Raises:
            ConfigError: the grid has more than one microbatch.
        """
        check_grid(costs, grid)
        if grid.num_microbatches > 1:
            raise ConfigError(
                f"{self.name} balances steps of one microbatch, not of {grid.num_microbatches}; use post-balance or joint"
            )
        num_ranks = grid.num_replicas[-1]
        home = equal_runs(costs.num_samples, num_ranks) // self.ranks_per_node
        whole = num_ranks % self.ranks_per_node == 0 and num_ranks > self.ranks_per_node
        replicas = [
            self._component(row, home, count) if whole and count == num_ranks else lpt(row, count)
            for row, count in zip(costs.costs, grid.num_replicas, strict=True)
        ]
        return assignment_of(costs, grid, replicas, np.zeros(costs.num_samples, dtype=np.int64))

    def _component(self, weights: np.ndarray, home: np.ndarray, num_ranks: int) -> np.ndarray:
        node = _even_nodes(weights, home, num_ranks // self.ranks_per_node)
        rank = node * self.ranks_per_node + _within_nodes(weights, node, self.ranks_per_node)
        largest = np.bincount(rank, weights=weights).max(initial=0.0)
        return rank if largest <= (1 + self.tolerance) * lower_bound(weights, num_ranks) else lpt(weights, num_ranks)


def _even_nodes(weights: np.ndarray, home: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the node of each sample, int64 [samples]: its `home`, the node where it arrived, unless that has too much load.

    A node with more than the mean load gives away the excess, heaviest samples first; they go to the lightest nodes.
    """
    node = home.astype(np.int64)
    excess = np.bincount(home, weights=weights, minlength=num_nodes) - weights.sum() / num_nodes
    leaving = [
        _fitting(weights, np.flatnonzero(home == index), float(excess[index])) for index in np.flatnonzero(excess > 0)
    ]
    if not leaving:
        return node
    moved = np.concatenate(leaving)
    staying = np.ones(len(weights), dtype=bool)
    staying[moved] = False
    start = np.bincount(home[staying], weights=weights[staying], minlength=num_nodes)
    node[moved] = place_in_order(weights, moved[np.argsort(-weights[moved], kind="stable")], num_nodes, start)[moved]
    return node


def _within_nodes(weights: np.ndarray, node: np.ndarray, ranks_per_node: int) -> np.ndarray:
    """Return each sample's rank in its node, int64 [samples]: the heaviest sample left goes to the node's least loaded rank."""
    order = np.lexsort((-weights, node))
    counts = np.bincount(node)
    position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((counts.max(initial=0), len(counts)))
    table[position, node[order]] = weights[order]
    loads = np.zeros((len(counts), ranks_per_node))
    chosen = np.empty(table.shape, dtype=np.int64)
    nodes = np.arange(len(counts))
    for index, row in enumerate(table):
        chosen[index] = loads.argmin(axis=1)
        loads[nodes, chosen[index]] += row
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = chosen[position, node[order]]
    return rank


def _fitting(weights: np.ndarray, members: np.ndarray, excess: float) -> np.ndarray:
    """Return samples of `members` with a total weight of at most `excess`: from the heaviest on, each that still fits."""
    members = members[(weights[members] > 0) & (weights[members] <= excess)]
    members = members[np.argsort(-weights[members], kind="stable")]
    ascending = -weights[members]
    taken: list[int] = []
    index = 0
    while index < len(members):
        taken.append(int(members[index]))
        excess -= float(weights[members[index]])
        index = max(index + 1, int(np.searchsorted(ascending, -excess)))
    return np.array(taken, dtype=np.int64)
