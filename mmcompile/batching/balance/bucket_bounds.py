"""Lower bounds on any assignment of samples to equal buckets, and the distance of a given one to them."""

from __future__ import annotations

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts

_UNIT_DIVISORS = 8
"""Largest n tried in the search for a common unit of all weights, which is (smallest weight above 0) / n."""


def lower_bound(weights: np.ndarray, num_bins: int) -> float:
    """Return a lower bound on the weight of the heaviest bin in any partition of samples into `num_bins` bins.

    It is the largest of three bounds: the mean bin; the heaviest sample; the sum of the two lightest among the num_bins + 1
    heaviest samples, since two of these must share a bin. If all weights are multiples of one unit (images of one size), the mean
    is rounded up to a multiple.

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
    """Return a lower bound, over all assignments, of the largest load of any component in any microbatch."""
    counts = [count * grid.num_microbatches for count in grid.num_replicas]
    return max(lower_bound(row, count) for row, count in zip(costs.costs, counts, strict=True))


def scaled(costs: SampleCosts, grid: Grid) -> np.ndarray:
    """Return the cost that each sample adds to its bucket in each component, float64 [components, samples].

    A bucket is one microbatch of one replica of the last component. A component with another number of replicas divides the
    samples of microbatch k of all replicas among its own, so costs are multiplied by the ratio of replica counts.
    """
    return costs.costs * (grid.num_replicas[-1] / np.array(grid.num_replicas))[:, None]


def bottleneck(assignment: Assignment, costs: SampleCosts) -> float:
    """Return the largest load of any component in any microbatch of any replica, in the unit of the costs."""
    return max((float(loads.max()) for loads in assignment.loads(costs).values()), default=0.0)


def imbalance(assignment: Assignment, costs: SampleCosts) -> float:
    """Return the relative excess over its lower bound, of the slowest microbatch or of the slowest replica (all microbatches).

    Returns:
        The larger of the two excesses as a fraction: 0.25 is 25%. The lower bound cannot always be reached, so 0 is not always
        possible.
    """
    grid = assignment.grid
    microbatch = bottleneck(assignment, costs) / (step_bound(costs, grid) or 1.0)
    slowest = max((float(loads.sum(axis=1).max()) for loads in assignment.loads(costs).values()), default=0.0)
    alone = max(lower_bound(row, count) for row, count in zip(costs.costs, grid.num_replicas, strict=True))
    return max(microbatch, slowest / (alone or 1.0)) - 1


def pipelined(assignment: Assignment, costs: SampleCosts) -> float:
    """Return the time of a pipeline of components in which every microbatch is as slow as the slowest one: Entrain Eq. 4.2.

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
