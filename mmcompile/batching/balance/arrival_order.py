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
    """Balancer that keeps arrival order.

    Each replica gets an equal run of samples, split into equal runs for its microbatches.
    """

    name: ClassVar[str] = "arrival"

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign to each microbatch of each replica equally many consecutive samples, in arrival order."""
        check_grid(costs, grid)
        bucket = equal_runs(costs.num_samples, grid.num_buckets)
        replica, microbatch = np.divmod(bucket, grid.num_microbatches)
        return together(costs, grid, replica, microbatch, share=lambda weights, count: equal_runs(len(weights), count))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SortedRoundRobin(Balancer):
    """Balancer that deals samples, by descending length, to (replica, microbatch) buckets in turn. Bucket 0 ends heaviest."""

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
    """Balancer of DistTrain: replicas by LPT on total work, microbatches in arrival order, then reordered to hide encoder time.

    The smallest microbatch is first, so that the language model starts early; the next smallest are kept for the end, where the
    pipeline drains. In between, each microbatch has the encoder time closest to the language-model time of the one before.

    Source: after DistTrain (SIGCOMM 2025), as Entrain's baseline (thesis §4.7). Its samples stay in their microbatches.
    """

    name: ClassVar[str] = "disttrain"

    num_last: int = 1
    """Number of small microbatches kept for the end: number of language-model stages minus 1."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign samples to replicas by total work, then order the microbatches of each replica."""
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
    """Return microbatches in run order, int64: the encoder time of each is near the language-model time of the one before.

    By total time, the shortest is first and the `num_last` next shortest are last. Arguments: seconds, float64 [microbatches].
    """
    by_size = np.argsort(encoder_s + language_s, kind="stable").tolist()
    order, last, left = by_size[:1], by_size[1 : 1 + num_last], by_size[1 + num_last :]
    while left:
        interval = language_s[order[-1]]
        best = min(left, key=lambda index: (abs(encoder_s[index] - interval), index))
        left.remove(best)
        order.append(best)
    return np.array(order + last[::-1], dtype=np.int64)
