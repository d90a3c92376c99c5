"""Entrain's assignment: replicas, effective microbatches, strata, deferral in order of running."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import largest, mixed_step, optimum, random_costs

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Grid, SampleCosts
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical, effective_microbatches, replicas_of, stratified

GRID = Grid(num_replicas=(4, 4), num_microbatches=16)


def test_replicas_by_hand() -> None:
    encoder, language = np.array([1.0, 4, 3, 2]), np.array([1.0, 5, 2, 2])
    # By encoder work: samples 1, 2, 3, 0 to the replica with least language-model work: 0 (5), 1 (2), 1 (4), 1.
    assert replicas_of(encoder, language, 2).tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("encoder", "most", "expected"),
    [
        ([3.0, 3, 3], 8, 3),
        ([9.0, 1, 1], 8, 1),
        ([1.0] * 10, 4, 4),
        ([0.0, 0], 6, 6),
        ([0.1] * 7, 9, 7),
        ([5.0, 2, 2], 3, 1),
    ],
)
def test_effective_microbatches(encoder: list[float], most: int, expected: int) -> None:
    assert effective_microbatches(np.array(encoder), most) == expected


@pytest.mark.parametrize("count", [2, 3])
def test_strata_keep_the_bound_of_list_scheduling(count: int) -> None:
    for seed in range(60):
        costs = random_costs(seed, num_samples=8, num_components=2).costs
        bins = stratified(costs[0], costs[1], count)
        assert largest(costs[0], bins, count) <= (2 - 1 / count) * optimum(costs[0], count) * (1 + 1e-12)


def test_every_microbatch_gets_small_samples() -> None:
    rng = np.random.default_rng(0)
    encoder, language = rng.lognormal(0, 0.3, 64), rng.lognormal(0, 1, 64)
    bins = stratified(encoder, language, 8)
    assert (np.bincount(bins[language <= np.median(language)], minlength=8) >= 1).all()


def test_samples_without_encoder_work_are_spread_by_language_model_work() -> None:
    bins = stratified(np.zeros(12), np.ones(12), 4)
    assert np.bincount(bins).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("defer", Defer)
@pytest.mark.parametrize("name", ["dflop-mix", "orchmllm-mix", "synthchartnet"])
def test_deferred_samples_run_one_microbatch_later(name: str, defer: Defer) -> None:
    costs = mixed_step(name, 512)
    found = Hierarchical(defer=defer).assign(costs, GRID)
    found.check(costs)
    late = found.deferred(0)
    assert np.array_equal(found.replica[0, late], found.replica[1, late])
    assert (found.microbatch[1, late] - found.microbatch[0, late] == 1).all()
    both = costs.takes_part.all(axis=0)
    assert np.array_equal(found.microbatch[0, both & ~late], found.microbatch[1, both & ~late])
    assert late.any() == (defer is not Defer.NONE)


@pytest.mark.parametrize("name", ["llava-150k", "synthchartnet", "chartqa", "cocoqa"])
def test_both_components_are_evener_than_in_arrival_order(name: str) -> None:
    costs = mixed_step(name, 512)
    before = Arrival().assign(costs, GRID).loads(costs)
    after = Hierarchical(defer=Defer.ALL).assign(costs, GRID).loads(costs)
    for component in costs.components:
        assert after[component].std() < before[component].std() / 1.3


def test_fewer_microbatches_are_used_where_one_sample_is_heavier_than_a_share() -> None:
    costs = SampleCosts(components=("vision", "lm"), costs=np.array([[6.0, 2, 2, 2, 1], [1, 1, 1, 1, 1]]))
    grid = Grid(num_replicas=(1, 1), num_microbatches=5)
    assert Hierarchical().assign(costs, grid).microbatch[0].max() == 1


@pytest.mark.parametrize("num_replicas", [(1, 3), (3, 1), (2, 2, 3)])
def test_other_numbers_of_replicas(num_replicas: tuple[int, ...]) -> None:
    costs = random_costs(3, num_samples=60, num_components=len(num_replicas))
    Hierarchical().assign(costs, Grid(num_replicas=num_replicas, num_microbatches=4)).check(costs)
