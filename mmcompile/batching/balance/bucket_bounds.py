"""Lower bounds on any assignment of samples to equal buckets, and the distance of a given one to them."""

from __future__ import annotations

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts

_UNIT_DIVISORS = 8
"""Costs may be multiples of the smallest one's eighth."""


def lower_bound(weights: np.ndarray, num_bins: int) -> float:
    """No partition into bins has a smaller largest bin.

    The largest of: the mean bin, the heaviest sample, the two lightest of the bins + 1 heaviest samples (two of which share a
    bin). If all weights are multiples of one unit (images of one size), the mean is rounded up to a multiple.

    Args:
        weights: float64 [samples], none negative.
    """
    if not len(weights):
        return 0.0
    bound = max(float(weights.max()), _whole_units(weights, float(weights.sum()) / num_bins))
    if len(weights) > num_bins:
        heaviest = np.partition(weights, len(weights) - num_bins - 1)[-num_bins - 1 :]
        bound = max(bound, float(np.partition(heaviest, 1)[:2].sum()))
    return bound


def step_bound(costs: SampleCosts, grid: Grid) -> float:
    """No assignment has a smaller largest load of any component in any microbatch."""
    counts = [count * grid.num_microbatches for count in grid.num_replicas]
    return max(lower_bound(row, count) for row, count in zip(costs.costs, counts, strict=True))


def scaled(costs: SampleCosts, grid: Grid) -> np.ndarray:
    """Costs as seconds of a bucket, float64 [components, samples].

    A bucket is one microbatch of one replica of the last component. Replicas of a component that has other numbers of them share
    the samples of all those microbatches of one number, so a bucket is charged its share.
    """
    return costs.costs * (grid.num_replicas[-1] / np.array(grid.num_replicas))[:, None]


def bottleneck(assignment: Assignment, costs: SampleCosts) -> float:
    """The largest load of any component in any microbatch of any replica."""
    return max((float(loads.max()) for loads in assignment.loads(costs).values()), default=0.0)


def imbalance(assignment: Assignment, costs: SampleCosts) -> float:
    """Return the relative excess of the slowest microbatch, or of the slowest replica in all microbatches, over the lower bound.

    Returns:
        0.25 for a quarter; of the two the larger. 0 is not always possible: no bound is always reached.
    """
    grid = assignment.grid
    microbatch = bottleneck(assignment, costs) / (step_bound(costs, grid) or 1.0)
    slowest = max((float(loads.sum(axis=1).max()) for loads in assignment.loads(costs).values()), default=0.0)
    alone = max(lower_bound(row, count) for row, count in zip(costs.costs, grid.num_replicas, strict=True))
    return max(microbatch, slowest / (alone or 1.0)) - 1


def pipelined(assignment: Assignment, costs: SampleCosts) -> float:
    """Time of a pipeline of the components in which every microbatch is as slow as the slowest: Entrain Eq. 4.2.

    sum over components of their slowest microbatch + (microbatches - 1) * the slowest of all
    """
    slowest = [float(loads.max()) for loads in assignment.loads(costs).values()]
    return sum(slowest) + (assignment.grid.num_microbatches - 1) * max(slowest)


def _whole_units(weights: np.ndarray, mean: float) -> float:
    smallest = float(weights[weights > 0].min(initial=np.inf))
    if not np.isfinite(smallest):
        return 0.0
    for divisor in range(1, _UNIT_DIVISORS + 1):
        units = weights * (divisor / smallest)
        if np.abs(units - np.rint(units)).max() <= 1e-9 * divisor:
            unit = smallest / divisor
            return unit * float(np.ceil(mean / unit - 1e-9))
    return mean
