"""Node-wise rearrangement: a permutation, the volume it says, the optimum on small clusters."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from support.oracles.balance_oracle import random_costs, rearranged
from support.paths import BENCHMARKS

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Grid, exchanged
from mmcompile.batching.balance.integer_program import Limits
from mmcompile.batching.balance.node_local import NodeLocal
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.errors import ConfigError

sys.path.insert(0, str(BENCHMARKS))
rearrange: Any = import_module("rearrange").rearrange

GREEDY = Limits(variables=0)


def sent(volume: np.ndarray, rank: np.ndarray, ranks_per_node: int) -> int:
    """Largest volume a rank sends to other nodes, from the definition."""
    node = np.arange(len(volume)) // ranks_per_node
    return max(
        sum(int(volume[source, batch]) for batch in range(len(volume)) if node[rank[batch]] != node[source])
        for source in range(len(volume))
    )


def random_volume(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 40, (count, count)) * (rng.random((count, count)) < 0.5)


@pytest.mark.parametrize("limits", [Limits(), GREEDY])
@pytest.mark.parametrize(("count", "ranks_per_node"), [(1, 1), (6, 2), (8, 8), (16, 4)])
def test_permutes_and_reports_what_it_sends(count: int, ranks_per_node: int, limits: Limits) -> None:
    for seed in range(3):
        volume = random_volume(seed, count)
        found = rearrange(volume, ranks_per_node, limits)
        assert sorted(found.rank.tolist()) == list(range(count))
        assert found.sent == sent(volume, found.rank, ranks_per_node) <= found.sent_before
        assert found.sent_before == sent(volume, np.arange(count), ranks_per_node)
        assert rearrange(volume, ranks_per_node, limits).rank.tobytes() == found.rank.tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_exact_is_the_best_permutation(seed: int) -> None:
    volume = random_volume(seed, 6)
    found = rearrange(volume, 2)
    assert found.exact
    best = min(sent(volume, np.array(rank), 2) for rank in permutations(range(6)))
    assert best <= found.sent <= best * (1 + 1e-4)


def test_greedy_is_near_the_best_on_average() -> None:
    volumes = [random_volume(seed, 12) for seed in range(12)]
    ratios = [rearrange(volume, 4, GREEDY).sent / rearrange(volume, 4).sent for volume in volumes]
    assert np.mean(ratios) <= 1.1


def test_batches_of_an_assignment_move_together() -> None:
    costs = random_costs(1, num_samples=240, num_components=2)
    grid = Grid(num_replicas=(8, 8))
    arrival, found = Arrival().assign(costs, grid), PostBalance().assign(costs, grid)
    assert costs.lengths is not None
    before = exchanged(arrival, -1, found, 1, costs.lengths[1])
    best = rearrange(before, 2)
    moved = rearranged(found, 1, 0, best.rank)
    moved.check(costs)
    assert sorted(moved.loads(costs)["language_model"].ravel()) == sorted(found.loads(costs)["language_model"].ravel())
    after = exchanged(arrival, -1, moved, 1, costs.lengths[1])
    assert sent(after, np.arange(8), 2) == best.sent
    assert np.array_equal(moved.replica[0], found.replica[0])


def test_node_local_balancing_moves_less() -> None:
    costs = random_costs(2, num_samples=16 * 60, num_components=2)
    grid = Grid(num_replicas=(16, 16))
    arrival = Arrival().assign(costs, grid)
    assert costs.lengths is not None
    volumes, loads = [], []
    for balancer in (PostBalance(), NodeLocal(ranks_per_node=4)):
        found = balancer.assign(costs, grid)
        found.check(costs)
        volume = exchanged(arrival, -1, found, 1, costs.lengths[1])
        volumes.append(rearrange(volume, 4, GREEDY).sent)
        loads.append(found.loads(costs)["language_model"].max())
    assert volumes[1] < volumes[0] / 3 and loads[1] <= 1.02 * loads[0]


def test_node_local_falls_back_where_nodes_cannot_be_even() -> None:
    for seed in range(40):
        costs = random_costs(seed)
        grid = Grid(num_replicas=(8,) * len(costs.components))
        local, plain = (balancer.assign(costs, grid) for balancer in (NodeLocal(ranks_per_node=2), PostBalance()))
        local.check(costs)
        for row, loads in local.loads(costs).items():
            assert loads.max() <= 1.02 * plain.loads(costs)[row].max() * (1 + 1e-12)


@pytest.mark.parametrize(("shape", "ranks_per_node"), [((4, 3), 2), ((4, 4), 3), ((0, 0), 1)])
def test_refuses_what_is_no_cluster(shape: tuple[int, int], ranks_per_node: int) -> None:
    with pytest.raises(ConfigError, match="whole nodes"):
        rearrange(np.zeros(shape, dtype=np.int64), ranks_per_node)


def test_node_local_refuses_more_microbatches() -> None:
    with pytest.raises(ConfigError, match="one microbatch"):
        NodeLocal().assign(
            random_costs(0), Grid(num_replicas=(2,) * len(random_costs(0).components), num_microbatches=2)
        )
