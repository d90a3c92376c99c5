"""Assignments without a search: arrival order, sorted and dealt out, and the reordering of DistTrain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer, check_grid, equal_runs, together
from mmcompile.batching.balance.lpt import lpt


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival(Balancer):
    """Samples as they come: equal runs for replicas, and equal runs of those for microbatches."""

    name: ClassVar[str] = "arrival"

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign equal runs in arrival order."""
        check_grid(costs, grid)
        bucket = equal_runs(costs.num_samples, grid.num_buckets)
        replica, microbatch = np.divmod(bucket, grid.num_microbatches)
        return together(costs, grid, replica, microbatch, share=lambda weights, count: equal_runs(len(weights), count))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SortedRoundRobin(Balancer):
    """Longest first, dealt out in turn. The first bucket always gets the longest of a round, so it ends heaviest."""

    name: ClassVar[str] = "sorted-round-robin"

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Deal samples out by descending length."""
        check_grid(costs, grid)
        key = costs.costs.sum(axis=0) if costs.lengths is None else costs.lengths[-1]
        bucket = np.empty(costs.num_samples, dtype=np.int64)
        bucket[np.argsort(-key, kind="stable")] = np.arange(costs.num_samples) % grid.num_buckets
        microbatch, replica = np.divmod(bucket, grid.num_replicas[-1])
        return together(costs, grid, replica, microbatch)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DistTrain(Balancer):
    """Replicas by LPT on all work, microbatches as samples come, then microbatches reordered to hide encoders.

    The smallest microbatch is first, so that the language model starts early; the next smallest are kept for the end, where the
    pipeline drains; in between, the one is next whose encoder time is closest to the language-model time it can hide behind.

    Source: after DistTrain (SIGCOMM 2025), as Entrain's baseline (thesis §4.7). Its samples stay in their microbatches.
    """

    name: ClassVar[str] = "disttrain"

    num_last: int = 1
    """Small microbatches kept for the end: stages of the language model less one."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign by total work, then order the microbatches of each replica."""
        check_grid(costs, grid)
        encoder = costs.costs[:-1].sum(axis=0)
        replica = lpt(encoder + costs.costs[-1], grid.num_replicas[-1])
        microbatch = np.zeros(costs.num_samples, dtype=np.int64)
        for index in range(grid.num_replicas[-1]):
            mine = np.flatnonzero(replica == index)
            runs = equal_runs(len(mine), grid.num_microbatches)
            encoder_s = np.bincount(runs, weights=encoder[mine], minlength=grid.num_microbatches)
            language_s = np.bincount(runs, weights=costs.costs[-1, mine], minlength=grid.num_microbatches)
            position = np.argsort(hiding_order(encoder_s, language_s, self.num_last))
            microbatch[mine] = position[runs]
        return together(costs, grid, replica, microbatch)


def hiding_order(encoder_s: np.ndarray, language_s: np.ndarray, num_last: int) -> np.ndarray:
    """Order of microbatches [microbatches] in which each hides its encoder behind the language model of the one before."""
    by_size = np.argsort(encoder_s + language_s, kind="stable").tolist()
    order, last, left = by_size[:1], by_size[1 : 1 + num_last], by_size[1 + num_last :]
    while left:
        interval = language_s[order[-1]]
        best = min(left, key=lambda index: (abs(encoder_s[index] - interval), index))
        left.remove(best)
        order.append(best)
    return np.array(order + last[::-1], dtype=np.int64)
