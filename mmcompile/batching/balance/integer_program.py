"""Samples into buckets by an integer program: the least time h of the slowest bucket, proved, where the solver HiGHS can finish.

    minimise h   subject to   sum_j x_ij = 1,   sum_i w_ci x_ij <= h for all components c

x_ij is 1 if sample i is in bucket j, else 0; w_ci is its time in component c.

Source: DFLOP Eq. 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, hstack

_LEAST_GAIN = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the solver. An instance that reaches one keeps the heuristic's result.

    The node limit is reached at the same point on every machine. The time limit is a safeguard: if it is reached before the node
    limit, the result depends on the speed of the machine.
    """

    variables: int = 96
    """Largest number of variables (samples times buckets) of an instance that is solved; 0 to solve no instance."""
    nodes: int = 300
    """Largest number of nodes of the search tree."""
    time_s: float = 10.0


def better_buckets(
    shares: np.ndarray, num_buckets: int, height: float, limits: Limits
) -> tuple[np.ndarray | None, bool]:
    """Search a partition of samples into buckets in which the largest time of a bucket is below `height`.

    Args:
        shares: float64 [samples, components]: times / a lower bound on the largest time of a bucket.
        height: largest time of any bucket in a known partition / the same lower bound.

    Returns:
        The bucket of each sample, int64 [samples], or None if no partition is lower or a limit was reached; and True if it is
        proved that no partition is lower than the best known one.
    """
    count = len(shares)
    if count * num_buckets > limits.variables:
        return None, False
    heaviest = np.argsort(-shares.max(axis=1), kind="stable")
    upper = np.ones(count * num_buckets + 1)
    # Buckets are alike: the i-th sample may only use the first i + 1.
    upper[:-1].reshape(count, num_buckets)[:] = np.tri(count, num_buckets)
    upper[-1] = height * (1 - _LEAST_GAIN)
    result = milp(
        c=np.append(np.zeros(count * num_buckets), 1.0),
        integrality=np.append(np.ones(count * num_buckets), 0.0),
        bounds=Bounds(np.zeros_like(upper), upper),  # pyright: ignore[reportArgumentType]  (guessed from its defaults)
        constraints=_constraints(shares[heaviest], num_buckets),
        options={"time_limit": limits.time_s, "node_limit": limits.nodes, "mip_rel_gap": 0.0},
    )
    if result.status == 2:  # infeasible: nothing is lower
        return None, True
    if result.status != 0:
        return None, False
    bucket = np.empty(count, dtype=np.int64)
    bucket[heaviest] = result.x[:-1].reshape(count, num_buckets).argmax(axis=1)
    return bucket, True


def _constraints(shares: np.ndarray, num_buckets: int) -> list[LinearConstraint]:
    count, columns = shares.shape
    sample, bucket = np.divmod(np.arange(count * num_buckets), num_buckets)
    ones = np.ones(count * num_buckets)
    once = coo_array((ones, (sample, np.arange(len(sample)))), shape=(count, len(sample) + 1))
    rows = [bucket + column * num_buckets for column in range(columns)]
    loads = coo_array(
        (shares[sample].T.ravel(), (np.concatenate(rows), np.tile(np.arange(len(sample)), columns))),
        shape=(columns * num_buckets, len(sample)),
    )
    below = hstack([loads, coo_array(-np.ones((columns * num_buckets, 1)))])
    return [
        LinearConstraint(csr_array(once), 1, 1),
        LinearConstraint(csr_array(below), -np.inf, 0),  # pyright: ignore[reportArgumentType]  (guessed from its defaults)
    ]
