"""`auto`: never slower than arrival order, near the optimum, keeps order where little is to be won and says why."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import largest, optimum, phased, random_costs

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.bucket_bounds import bottleneck, pipelined
from mmcompile.batching.balance.buckets import Joint
from mmcompile.batching.balance.hierarchical import Hierarchical
from mmcompile.batching.balance.integer_program import Limits, better_buckets
from mmcompile.batching.balance.lpt import lpt
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.errors import ConfigError

QUICK = Auto(candidates=(PostBalance(), Joint(limits=Limits(variables=0)), Hierarchical()))
"""Heuristics alone, as for steps that are too large for the integer program."""


def random_grid(seed: int, components: int) -> Grid:
    rng = np.random.default_rng(seed)
    replicas = rng.integers(1, 4, components) if rng.random() < 0.5 else np.full(components, rng.integers(1, 4))
    return Grid(num_replicas=tuple(replicas.tolist()), num_microbatches=int(rng.integers(1, 6)))


def check_never_worse(seed: int) -> None:
    costs = random_costs(seed)
    grid = random_grid(seed, len(costs.components))
    for step_time in (pipelined, phased):
        choice = Auto(candidates=QUICK.candidates, step_time=step_time).choose(costs, grid)
        choice.assignment.check(costs)
        assert choice.step_s <= step_time(Arrival().assign(costs, grid), costs) == choice.arrival_s
        assert choice.step_s == step_time(choice.assignment, costs)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_never_worse_than_arrival_order(first: int) -> None:
    for seed in range(first, first + 50):
        check_never_worse(seed)


@pytest.mark.slow
def test_never_worse_than_arrival_order_on_a_thousand_steps() -> None:
    for seed in range(1000, 2000):
        check_never_worse(seed)


def over_optimum(auto: Auto, seed: int) -> float:
    """Over the best of all assignments: with one microbatch, components can be balanced apart."""
    costs = random_costs(seed, num_samples=8, num_components=2)
    found = auto.assign(costs, Grid(num_replicas=(3, 3)))
    ratio = bottleneck(found, costs) / max(optimum(row, 3) for row in costs.costs)
    assert ratio >= 1 - 1e-9
    return ratio


def test_within_two_percent_of_the_optimum_on_average() -> None:
    ratios = [over_optimum(Auto(step_time=bottleneck, keep_below=0.0), seed) for seed in range(50)]
    assert np.mean(ratios) <= 1.01


def test_heuristics_alone_are_within_two_percent_on_average() -> None:
    auto = Auto(step_time=bottleneck, keep_below=0.0, candidates=QUICK.candidates)
    assert np.mean([over_optimum(auto, seed) for seed in range(200)]) <= 1.02


def integer_optimum(weights: np.ndarray) -> float:
    """Least largest of 3 bins, by the integer program."""
    shares = weights[:, None] / (weights.sum() or 1.0)
    above = largest(shares.T, lpt(shares[:, 0], 3), 3) * 1.01 + 1e-9
    bucket, proved = better_buckets(shares, 3, above, Limits(time_s=60.0, nodes=10**6))
    assert proved and bucket is not None
    return largest(weights, bucket, 3)


@pytest.mark.slow
def test_within_two_percent_of_two_hundred_optima_of_the_integer_program() -> None:
    ratios = []
    for seed in range(200):
        costs = random_costs(seed, num_samples=11, num_components=2)
        best = max(integer_optimum(row) for row in costs.costs)
        found = Auto(step_time=bottleneck, keep_below=0.0, candidates=QUICK.candidates).assign(
            costs, Grid(num_replicas=(3, 3))
        )
        ratios.append(bottleneck(found, costs) / best)
    assert np.mean(ratios) <= 1.02


def test_keeps_an_even_step_as_it_is() -> None:
    costs = SampleCosts(components=("vision", "lm"), costs=np.ones((2, 24)))
    choice = Auto().choose(costs, Grid(num_replicas=(2, 2), num_microbatches=3))
    assert choice.name == "arrival" and choice.reason == "imbalance 0.0% is below 5%: arrival order is kept"
    assert len(choice.trials) == 1 and choice.assignment == Arrival().assign(
        costs, Grid(num_replicas=(2, 2), num_microbatches=3)
    )


def test_leaves_a_step_that_one_sample_dominates() -> None:
    costs = SampleCosts(components=("lm",), costs=np.array([[100.0, 1, 1, 1, 1, 1]]))
    assert Auto().choose(costs, Grid(num_replicas=(2,))).reason.startswith("imbalance 2.0% is below")


def test_says_what_was_won() -> None:
    costs = SampleCosts(components=("lm",), costs=np.array([[4.0, 4, 1, 1]]))
    choice = Auto(candidates=(PostBalance(),)).choose(costs, Grid(num_replicas=(2,)))
    assert choice.name == "post-balance" and (choice.arrival_s, choice.step_s) == (8, 5)
    assert choice.reason == "imbalance 60.0%; post-balance takes 37.5% less than arrival order"
    assert [trial.name for trial in choice.trials] == ["arrival", "post-balance"]


def test_says_when_nothing_is_faster() -> None:
    costs = SampleCosts(components=("lm",), costs=np.array([[4.0, 4, 1, 1]]))
    always: Auto = Auto(candidates=(DistTrain(),), step_time=lambda assignment, costs: 1.0)
    choice = always.choose(costs, Grid(num_replicas=(2,)))
    assert choice.name == "arrival" and choice.reason.endswith("none of disttrain is faster: arrival order is kept")


def test_the_callers_clock_decides() -> None:
    """A clock for which the hierarchical order alone is fast."""
    costs = random_costs(11, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(2, 2), num_microbatches=4)
    wanted = Hierarchical().assign(costs, grid)

    def clock(assignment: Assignment, costs: SampleCosts) -> float:
        return 1.0 if assignment == wanted else 2.0

    choice = Auto(candidates=(PostBalance(), Hierarchical()), step_time=clock).choose(costs, grid)
    assert choice.name == "hierarchical" and choice.assignment == wanted and choice.step_s == 1.0


def test_looks_at_whole_replicas_too() -> None:
    """Microbatches of one sample each cannot be evened out; replicas can."""
    costs = SampleCosts(components=("lm",), costs=np.array([[4.0, 4, 4, 1, 1, 1]]))
    grid = Grid(num_replicas=(2,), num_microbatches=3)
    choice = Auto(step_time=phased).choose(costs, grid)
    assert choice.reason == "imbalance 50.0%; post-balance takes 25.0% less than arrival order"
    sums = choice.assignment.loads(costs)["lm"].sum(axis=1)
    assert sorted(sums.tolist()) == [6, 9]


def test_balancers_see_the_slowest_stage_of_each_component() -> None:
    """With four stages of the language model, encoders decide; without, it does."""
    costs = SampleCosts(components=("vision", "lm"), costs=np.array([[4.0, 4, 1, 1], [1, 8, 8, 1]]))
    grid = Grid(num_replicas=(1, 1), num_microbatches=2)

    def spread(auto: Auto) -> list[float]:
        return [float(np.ptp(loads)) for loads in auto.assign(costs, grid).loads(costs).values()]

    candidates = (Joint(),)
    assert spread(Auto(candidates=candidates))[1] == 0
    found = Auto(candidates=candidates, shares={"lm": 0.25}).assign(costs, grid)
    assert float(np.ptp(found.loads(costs)["vision"])) == 0


def test_a_share_of_an_unknown_component_is_refused() -> None:
    costs = SampleCosts(components=("lm",), costs=np.ones((1, 4)))
    with pytest.raises(ConfigError, match="shares of audio; the step has costs of lm"):
        Auto(shares={"audio": 0.5}).assign(costs, Grid(num_replicas=(2,)))
