"""Joint buckets: optimal on small instances, near the bound on large ones."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import largest, mixed_step, optimum, random_costs

from mmcompile.batching.balance.assignment import Grid, SampleCosts
from mmcompile.batching.balance.bucket_bounds import bottleneck, step_bound
from mmcompile.batching.balance.buckets import Joint
from mmcompile.batching.balance.integer_program import Limits, better_buckets
from mmcompile.batching.balance.refine import Buckets, Effort

HEURISTIC = Joint(limits=Limits(variables=0))
EXACT = Effort(tolerance=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_exact_equals_trying_everything(seed: int) -> None:
    costs = random_costs(seed, num_samples=8, num_components=2)
    found = Joint(effort=EXACT).assign(costs, Grid(num_replicas=(3, 3)))
    assert bottleneck(found, costs) == pytest.approx(optimum(costs.costs, 3), rel=2e-6)


def test_exact_says_whether_it_is_proved() -> None:
    shares = np.array([[3.0], [3.0], [2.0], [2.0], [2.0]])
    bucket, proved = better_buckets(shares, 2, 7.0, Limits())
    assert proved and bucket is not None and largest(shares.T, bucket, 2) == 6
    assert better_buckets(shares, 2, 6.0, Limits()) == (None, True)
    assert better_buckets(shares, 2, 7.0, Limits(variables=9)) == (None, False)


@pytest.mark.parametrize("name", ["dflop-mix", "llava-150k", "synthchartnet", "orchmllm-mix"])
def test_large_steps_are_within_one_percent_of_the_bound(name: str) -> None:
    costs, grid = mixed_step(name, 2048), Grid(num_replicas=(16, 16), num_microbatches=16)
    found = HEURISTIC.assign(costs, grid)
    found.check(costs)
    assert bottleneck(found, costs) <= 1.01 * step_bound(costs, grid)


def test_refining_keeps_its_loads_and_never_raises_the_highest() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        shares, start = rng.lognormal(0, 1, (40, 2)), rng.integers(0, 6, 40)
        buckets = Buckets(shares, start, 6)
        before = buckets.height
        assert before == pytest.approx(largest(shares.T, start, 6)) and buckets.bucket.tolist() == start.tolist()
        buckets.refine(Effort(tolerance=0.0))
        assert buckets.height == pytest.approx(largest(shares.T, buckets.bucket, 6))
        assert buckets.height <= before


@pytest.mark.parametrize("num_replicas", [(1, 4), (4, 1), (3, 2), (2, 3)])
def test_other_numbers_of_replicas_share_what_runs_together(num_replicas: tuple[int, int]) -> None:
    costs = mixed_step("llava-150k", 300)
    grid = Grid(num_replicas=num_replicas, num_microbatches=4)
    found = HEURISTIC.assign(costs, grid)
    found.check(costs)
    assert np.array_equal(found.microbatch[0], found.microbatch[1])
    assert bottleneck(found, costs) <= 1.08 * step_bound(costs, grid)


def test_microbatches_hide_encoders_behind_the_language_model() -> None:
    """The smallest first, the next smallest last; in between the one whose encoder is nearest to the language model before it."""
    costs = SampleCosts(components=("vision", "lm"), costs=np.array([[8.0, 4, 2, 1], [8, 8, 4, 2]]))
    found = HEURISTIC.assign(costs, Grid(num_replicas=(1, 1), num_microbatches=4))
    assert found.microbatch[0].tolist() == [2, 1, 3, 0]
