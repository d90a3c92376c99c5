"""Lower bounds are below every optimum; times of steps by hand."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import optimum, phased

from mmcompile.batching.balance.assignment import Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.bucket_bounds import (
    bottleneck,
    imbalance,
    lower_bound,
    pipelined,
    scaled,
    step_bound,
)


@pytest.mark.parametrize("num_bins", [2, 3, 4])
def test_no_partition_beats_the_bound(num_bins: int) -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        weights = rng.lognormal(0, 1, 8) if seed % 2 else rng.integers(0, 6, 8) * 0.37
        assert lower_bound(weights, num_bins) <= optimum(weights, num_bins) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("weights", "num_bins", "bound"),
    [
        ([1.0, 1, 1, 1], 2, 2.0),
        ([9.0, 1, 1, 1], 2, 9.0),
        ([5.0, 4, 3], 2, 7.0),
        ([0.3] * 10, 4, 0.9),
        ([0.3, 0.45, 0.45, 0.3, 0.3], 2, 0.9),
        ([0.0, 0.0], 2, 0.0),
        ([], 2, 0.0),
    ],
)
def test_bound_by_hand(weights: list[float], num_bins: int, bound: float) -> None:
    assert lower_bound(np.array(weights), num_bins) == pytest.approx(bound)


def test_times_of_a_step_by_hand() -> None:
    costs = SampleCosts(components=("vision", "language_model"), costs=np.array([[1.0, 2, 0, 4], [10, 20, 30, 40]]))
    grid = Grid(num_replicas=(2, 1), num_microbatches=2)
    found = assignment_of(costs, grid, [[0, 1, 0, 0], [0, 0, 0, 0]], [0, 0, 1, 1])
    assert bottleneck(found, costs) == 70
    assert pipelined(found, costs) == 4 + 70 + 70
    assert phased(found, costs) == (2 + 4) + (30 + 70)
    assert scaled(costs, grid).tolist() == [[0.5, 1, 0, 2], [10, 20, 30, 40]]
    assert step_bound(costs, grid) == 50


def test_imbalance_is_of_the_slowest_microbatch_or_replica() -> None:
    costs = SampleCosts(components=("lm",), costs=np.array([[3.0, 1, 2, 2]]))
    grid = Grid(num_replicas=(2,), num_microbatches=2)
    assert imbalance(assignment_of(costs, grid, [0, 0, 1, 1], [0, 1, 0, 1]), costs) == 0
    assert imbalance(assignment_of(costs, grid, [0, 0, 1, 1], [0, 0, 0, 1]), costs) == pytest.approx(4 / 3 - 1)
    assert imbalance(assignment_of(costs, grid, [0, 1, 0, 1], [0, 0, 1, 1]), costs) == pytest.approx(5 / 4 - 1)
    nothing = SampleCosts(components=("lm",), costs=np.zeros((1, 2)))
    assert imbalance(assignment_of(nothing, grid, [0, 0], [0, 0]), nothing) == -1
