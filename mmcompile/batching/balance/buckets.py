"""Joint buckets: samples into (replica, microbatch) buckets so that the slowest component of the slowest bucket is fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.arrival_order import hiding_order
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer, check_grid, together
from mmcompile.batching.balance.bucket_bounds import scaled, step_bound
from mmcompile.batching.balance.integer_program import Limits, better_buckets
from mmcompile.batching.balance.lpt import lpt
from mmcompile.batching.balance.refine import OVER, Buckets, Effort
from mmcompile.errors import ConfigError
from mmcompile.units import format_bytes


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Joint(Balancer):
    """Balancer of DFLOP's online scheduler: all components compute a sample in the same bucket, all balanced at once.

    LPT places samples by their largest cost / lower bound; local search exchanges samples between buckets; then HiGHS improves
    small instances that are not near their lower bound. Buckets are dealt out so that replicas have similar loads. Each replica
    runs its buckets in the order of `hiding_order`, which hides remaining differences in the pipeline.

    Source: DFLOP §3.4, Eq. 6; exchanges, symmetry breaking, memory limits and order are ours.
    """

    name: ClassVar[str] = "joint"

    memory_limits: Mapping[str, int] = field(default_factory=dict)
    """Component -> upper limit of the activation bytes of one bucket."""
    effort: Effort = field(default_factory=Effort)
    limits: Limits = field(default_factory=Limits)

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign every sample to a bucket, the same in all components.

        Raises:
            ConfigError: no partition was found in which every bucket is within its memory limit; the message names a bucket over
                it.
        """
        check_grid(costs, grid)
        bucket = self.buckets(costs, grid)
        replica, microbatch = _dealt(scaled(costs, grid), bucket, grid)
        return together(costs, grid, replica, microbatch)

    def buckets(self, costs: SampleCosts, grid: Grid) -> np.ndarray:
        """Return the bucket of each sample, int64 [samples]. Bucket numbers do not name replicas or microbatches yet."""
        times = scaled(costs, grid)
        bound = step_bound(costs, grid) or 1.0
        memories = self._memories(costs, grid)
        shares = np.concatenate([times / bound, *memories]).T
        best = _refined(shares, len(times), shares.max(axis=1, initial=0.0), grid.num_buckets, self.effort)
        if best.height >= OVER:
            packed = _refined(shares, len(times), np.concatenate(memories).max(axis=0), grid.num_buckets, self.effort)
            best = min(best, packed, key=lambda found: found.height)
        if best.height > 1 + self.effort.tolerance:
            better, _ = better_buckets(shares, len(times), grid.num_buckets, best.height, self.limits)
            if better is not None:
                return better
        self._check_memory(costs, grid, best.bucket)
        return best.bucket

    def _memories(self, costs: SampleCosts, grid: Grid) -> list[np.ndarray]:
        """Return each sample's memory as a fraction of a bucket's limit: float64 [1, samples] for each component with a limit."""
        rows = []
        for name, limit in self.memory_limits.items():
            if name not in costs.components or costs.memory_bytes is None:
                has = "no memory of samples" if costs.memory_bytes is None else f"only {', '.join(costs.components)}"
                raise ConfigError(f"a memory limit of {name}: the costs have {has}; give both or neither")
            row = costs.components.index(name)
            memory = costs.memory_bytes[row]
            if (memory > limit).any():
                sample = int(memory.argmax())
                raise ConfigError(
                    f"sample {sample} needs {format_bytes(int(memory[sample]))} in {name}, a bucket has {format_bytes(limit)}; "
                    "raise the limit, shard the component further, or leave the sample out"
                )
            rows.append(memory[None] * (grid.num_replicas[-1] / grid.num_replicas[row]) / limit)
        return rows

    def _check_memory(self, costs: SampleCosts, grid: Grid, bucket: np.ndarray) -> None:
        for name, limit in self.memory_limits.items():
            assert costs.memory_bytes is not None, "checked when shares were made"
            row = costs.components.index(name)
            factor = grid.num_replicas[-1] / grid.num_replicas[row]
            used = np.bincount(bucket, weights=costs.memory_bytes[row] * factor, minlength=grid.num_buckets)
            if used.max() > limit * (1 + 1e-9):
                total = costs.memory_bytes[row].sum() * factor
                raise ConfigError(
                    f"bucket {int(used.argmax())} needs {format_bytes(int(used.max()))} in {name}, it has {format_bytes(limit)} "
                    f"(all samples: {format_bytes(int(total))} in {grid.num_buckets} buckets of together "
                    f"{format_bytes(limit * grid.num_buckets)}); use more microbatches or fewer samples"
                )


def _refined(shares: np.ndarray, num_times: int, weights: np.ndarray, num_buckets: int, effort: Effort) -> Buckets:
    found = Buckets(shares, num_times, lpt(weights, num_buckets), num_buckets)
    found.refine(effort)
    return found


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
