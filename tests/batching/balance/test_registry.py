"""What every balancer keeps: conservation, the same bytes again, unevenness of any kind; and the baselines by hand."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from support.oracles.balance_oracle import random_costs
from support.paths import TESTS

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain, SortedRoundRobin, hiding_order
from mmcompile.batching.balance.assignment import Grid, SampleCosts
from mmcompile.batching.balance.post_balance import Algorithm, PostBalance
from mmcompile.batching.balance.registry import BALANCERS, balancer
from mmcompile.errors import ConfigError

LENGTHLESS = {name for name in BALANCERS if name.startswith("post-balance-")}


def grid_of(name: str, seed: int, components: int) -> Grid:
    microbatches = 1 if name == "node-local" else 1 + seed % 4
    replicas = [1 + seed % 3] * components if seed % 2 else [1 + (seed + row) % 3 for row in range(components)]
    return Grid(num_replicas=tuple(replicas), num_microbatches=microbatches)


@pytest.mark.parametrize("name", BALANCERS)
def test_every_sample_once_and_the_same_bytes_again(name: str) -> None:
    for seed in range(20):
        costs = random_costs(seed)
        grid = grid_of(name, seed, len(costs.components))
        found = balancer(name).assign(costs, grid)
        found.check(costs)
        copy = SampleCosts(components=costs.components, costs=costs.costs.copy(), lengths=costs.lengths)
        assert balancer(name).assign(copy, grid).to_bytes() == found.to_bytes()


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize(
    "costs", [np.zeros((2, 5)), np.empty((2, 0)), np.array([[0.0], [1.0]]), np.array([[0.0, 9, 0], [1, 1, 1]])]
)
def test_steps_with_little_in_them(name: str, costs: np.ndarray) -> None:
    step = SampleCosts(components=("vision", "lm"), costs=costs, lengths=np.ceil(costs).astype(np.int64))
    for replicas in (1, 2, 8):
        grid = Grid(num_replicas=(replicas, 2), num_microbatches=1 if name == "node-local" else 3)
        balancer(name).assign(step, grid).check(step)


@pytest.mark.parametrize("name", BALANCERS)
def test_a_grid_of_other_components_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="replicas of 1 components"):
        balancer(name).assign(random_costs(0, num_components=2), Grid(num_replicas=(2,)))


def digests() -> list[str]:
    """Of what every balancer does with one step."""
    costs = np.random.default_rng(1).lognormal(0, 1, (2, 300))
    step = SampleCosts(components=("v", "lm"), costs=costs, lengths=np.ceil(costs * 9).astype(np.int64))
    found = (entry.assign(step, Grid(num_replicas=(3, 3))) for entry in BALANCERS.values())
    return [hashlib.sha256(assignment.to_bytes()).hexdigest() for assignment in found]


def test_another_process_makes_the_same_bytes() -> None:
    """Nothing depends on the hash seed or on an address."""
    folder = str(TESTS)
    code = f"import sys, runpy; sys.path.append({folder!r}); print(runpy.run_path({__file__!r})['digests']())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(digests())


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match="no balancer 'lpt'; there are arrival, sorted-round-robin, disttrain, joint"):
        balancer("lpt")


@pytest.mark.parametrize("name", sorted(LENGTHLESS))
def test_algorithms_of_lengths_need_lengths(name: str) -> None:
    with pytest.raises(ConfigError, match="balances tokens and these costs have no lengths"):
        balancer(name).assign(SampleCosts(components=("lm",), costs=np.ones((1, 3))), Grid(num_replicas=(2,)))


def test_arrival_is_runs() -> None:
    costs = SampleCosts(components=("vision", "lm"), costs=np.array([[1.0] * 8, [1.0] * 8]))
    found = Arrival().assign(costs, Grid(num_replicas=(1, 2), num_microbatches=2))
    assert found.replica.tolist() == [[0] * 8, [0, 0, 0, 0, 1, 1, 1, 1]]
    assert found.microbatch.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1]] * 2


def test_sorted_round_robin_deals_longest_first() -> None:
    costs = SampleCosts(components=("lm",), costs=np.ones((1, 4)), lengths=np.array([[2, 9, 4, 7]]))
    found = SortedRoundRobin().assign(costs, Grid(num_replicas=(2,)))
    assert found.replica.tolist() == [[1, 0, 0, 1]]


def test_hiding_order_by_hand() -> None:
    # Smallest first (1), next smallest last (3); behind 1's language model of 2 hides 0's encoder of 2, then 2.
    assert hiding_order(np.array([2.0, 1, 5, 1]), np.array([5.0, 2, 5, 3]), 1).tolist() == [1, 0, 2, 3]


def test_disttrain_balances_replicas_and_keeps_microbatches_whole() -> None:
    costs = random_costs(4, num_samples=36, num_components=2)
    found = DistTrain().assign(costs, Grid(num_replicas=(3, 3), num_microbatches=4))
    total = costs.costs.sum(axis=0)
    by_replica = np.bincount(found.replica[1], weights=total)
    assert by_replica.max() <= by_replica.mean() + total.max()


def test_each_component_has_its_algorithm() -> None:
    costs = random_costs(6, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(3, 3))
    found = PostBalance(algorithms=(Algorithm.PADDED, Algorithm.QUADRATIC), tolerance=20.0).assign(costs, grid)
    alone = PostBalance(algorithms=(Algorithm.PADDED,)).assign(costs, grid)
    assert np.array_equal(found.replica[0], alone.replica[0])
    with pytest.raises(ConfigError, match="3 algorithms for 2 components"):
        PostBalance(algorithms=(Algorithm.PADDED,) * 3).assign(costs, grid)
    with pytest.raises(ConfigError, match="only quadratic reads it"):
        PostBalance(tolerance=1.0).assign(costs, grid)
