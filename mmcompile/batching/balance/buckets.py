"""Joint buckets: samples into (replica, microbatch) buckets so that the slowest component of the slowest bucket is fastest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.arrival_order import hiding_order
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer, check_grid, together
from mmcompile.batching.balance.bucket_bounds import scaled, step_bound
from mmcompile.batching.balance.integer_program import Limits, better_buckets
from mmcompile.batching.balance.lpt import lpt
from mmcompile.batching.balance.refine import Buckets, Effort


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Joint(Balancer):
    """Balancer of DFLOP's online scheduler: all components compute a sample in the same bucket, all balanced at once.

    LPT places samples by their largest cost / lower bound; local search exchanges samples between buckets; then HiGHS improves
    small instances that are not near their lower bound. Buckets are dealt out so that replicas have similar loads. Each replica
    runs its buckets in the order of `hiding_order`, which hides remaining differences in the pipeline.

    Source: DFLOP §3.4, Eq. 6; exchanges, symmetry breaking and order are ours.
    """

    name: ClassVar[str] = "joint"

    effort: Effort = field(default_factory=Effort)
    limits: Limits = field(default_factory=Limits)

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign every sample to a bucket, the same in all components."""
        check_grid(costs, grid)
        bucket = self.buckets(costs, grid)
        replica, microbatch = _dealt(scaled(costs, grid), bucket, grid)
        return together(costs, grid, replica, microbatch)

    def buckets(self, costs: SampleCosts, grid: Grid) -> np.ndarray:
        """Return the bucket of each sample, int64 [samples]. Bucket numbers do not name replicas or microbatches yet."""
        times = scaled(costs, grid)
        bound = step_bound(costs, grid) or 1.0
        shares = (times / bound).T
        best = Buckets(shares, lpt(shares.max(axis=1, initial=0.0), grid.num_buckets), grid.num_buckets)
        best.refine(self.effort)
        if best.height > 1 + self.effort.tolerance:
            better, _ = better_buckets(shares, grid.num_buckets, best.height, self.limits)
            if better is not None:
                return better
        return best.bucket


def _dealt(times: np.ndarray, bucket: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Assign buckets to replicas, and order those of each; return (replica, microbatch) of each sample, int64 [samples].

    Buckets go by descending load to replicas 0 to n, then n to 0, and so on. The order in a replica hides encoder time.
    """
    total = np.bincount(bucket, weights=times.max(axis=0), minlength=grid.num_buckets)
    by_total = np.argsort(-total, kind="stable").reshape(grid.num_microbatches, grid.num_replicas[-1])
    by_total[1::2] = by_total[1::2, ::-1]
    loads = np.stack([np.bincount(bucket, weights=row, minlength=grid.num_buckets) for row in times])
    replica, microbatch = np.empty((2, grid.num_buckets), dtype=np.int64)
    for index, mine in enumerate(by_total.T):
        replica[mine] = index
        order = hiding_order(loads[:-1, mine].max(axis=0, initial=0.0), loads[-1, mine], num_last=1)
        microbatch[mine[order]] = np.arange(grid.num_microbatches)
    return replica[bucket], microbatch[bucket]
