"""Adaptive correction: wrong predictions are learned and balance improves; noise does no harm; it stops where it does not pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.bucket_bounds import pipelined
from mmcompile.batching.balance.correction import Correction, CorrectionReport, Corrector
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.errors import ConfigError

COMPONENTS = ("vision", "language_model")
GRID = Grid(num_replicas=(2, 2), num_microbatches=4)
SCALES = np.array([[300.0], [1000.0]])
"""True seconds of a predicted one, by component: encoders are cheaper than thought, against the language model."""


def predicted(seed: int, num_samples: int = 48) -> SampleCosts:
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(-4, 0.8, (2, num_samples))
    costs[0, rng.random(num_samples) < 0.3] = 0
    return SampleCosts(components=COMPONENTS, costs=costs)


def true(costs: SampleCosts) -> SampleCosts:
    """Small samples take a third longer than predicted and those of one range of shapes three times as long."""
    small, slow = costs.costs < 2**-6, (costs.costs >= 2**-5.5) & (costs.costs < 2**-4.5)
    return replace(costs, costs=costs.costs * np.where(small, 1.33, np.where(slow, 3.0, 1.0)) * SCALES)


def exact(costs: SampleCosts) -> SampleCosts:
    """What is true where predictions are right but for their unit."""
    return replace(costs, costs=costs.costs * 1000)


Truth = Callable[[SampleCosts], SampleCosts]


class Run:
    """Steps of training whose microbatches take what `truth` says, times noise."""

    def __init__(self, corrector: Corrector, balancer: Balancer, *, truth: Truth = true, noise: float = 0.0) -> None:
        self.corrector = corrector
        self._balancer = balancer
        self._truth = truth
        self._rng = np.random.default_rng(99)
        self._noise = noise

    def step(self, seed: int, spent_s: float = 0.0) -> tuple[float, float]:
        """True time of a step planned with what was learned, and of one planned without."""
        costs = predicted(seed)
        assignment = self._balancer.assign(self.corrector.corrected(costs), GRID)
        plain = self._balancer.assign(costs, GRID)
        real = self._truth(costs)
        measured = {name: self._noisy(loads) for name, loads in assignment.loads(real).items()}
        self.corrector.observe(assignment, costs, measured, spent_s)
        return pipelined(assignment, real), pipelined(plain, real)

    def _noisy(self, loads: np.ndarray) -> np.ndarray:
        """Log-normal noise, and one microbatch in twenty takes ten times as long."""
        if self._noise == 0:
            return loads
        slow = np.where(self._rng.random(loads.shape) < 0.05, 10.0, 1.0)
        return loads * np.exp(self._rng.normal(0, self._noise, loads.shape)) * slow


def error(corrector: Corrector, seeds: range) -> float:
    """Mean of |corrected / true - 1| after one common scale is taken out, over samples that take part."""
    errors: list[float] = []
    for seed in seeds:
        costs = predicted(seed)
        here = costs.takes_part
        ratio = corrector.corrected(costs).costs[here] / true(costs).costs[here]
        errors += np.abs(ratio / np.median(ratio) - 1).tolist()
    return float(np.mean(errors))


def test_wrong_predictions_are_learned_within_ten_steps_and_steps_are_faster() -> None:
    run = Run(Corrector(PostBalance()), PostBalance())
    before = error(run.corrector, range(100, 110))
    for seed in range(10):
        run.step(seed)
    assert before > 0.7 and error(run.corrector, range(100, 110)) < 0.15
    times = np.array([run.step(seed) for seed in range(200, 230)])
    assert times[:, 0].sum() < 0.85 * times[:, 1].sum()
    assert error(run.corrector, range(100, 110)) < 0.03
    report = run.corrector.report()
    assert report.on and report.benefit_s > 0
    edge = SampleCosts(components=COMPONENTS, costs=np.array([[2**-4.6, 2**-4.4]] * 2))
    slow, usual = run.corrector.corrected(edge).costs[1] / edge.costs[1]
    assert slow / usual == pytest.approx(3.0, rel=0.05)


def test_corrected_costs_are_measured_seconds() -> None:
    run = Run(Corrector(PostBalance()), PostBalance(), truth=exact)
    for seed in range(3):
        run.step(seed)
    costs = predicted(50)
    np.testing.assert_allclose(run.corrector.corrected(costs).costs, costs.costs * 1000, rtol=1e-6)


def test_nothing_is_corrected_before_something_was_measured() -> None:
    corrector, costs = Corrector(PostBalance()), predicted(0)
    assert corrector.corrected(costs) is costs
    assert corrector.report().summary == "correction on: no step was measured yet"


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_noise_does_no_harm(noise: float) -> None:
    """Where predictions are right, nothing is gained and it ends; where they are wrong, most of the gain remains."""
    right = Run(Corrector(PostBalance()), PostBalance(), truth=exact, noise=noise)
    wrong = Run(Corrector(PostBalance()), PostBalance(), noise=noise)
    early = np.array([[run.step(seed) for seed in range(20)] for run in (right, wrong)])
    assert not right.corrector.on and right.corrector.report().benefit_s < 0
    assert early[0, :, 0].sum() <= 1.2 * early[0, :, 1].sum()
    assert early[1, :, 0].sum() <= 0.95 * early[1, :, 1].sum()
    if noise < 0.1:
        assert wrong.corrector.on
        late = np.array([wrong.step(seed) for seed in range(300, 319)])
        assert late[:, 0].sum() <= 0.9 * late[:, 1].sum()


def test_an_interrupted_microbatch_is_forgotten() -> None:
    run = Run(Corrector(PostBalance(), Correction(memory=0.5)), PostBalance(), truth=exact)
    for seed in range(5):
        run.step(seed)
    costs = predicted(5)
    assignment = PostBalance().assign(costs, GRID)
    measured = assignment.loads(exact(costs))
    measured["vision"][0, 0] *= 1e6
    run.corrector.observe(assignment, costs, measured, 0.0)
    ratio = run.corrector.corrected(costs).costs[0] / exact(costs).costs[0].clip(1e-30)
    assert ratio.max() < 3
    for seed in range(6, 16):
        run.step(seed)
    for seed in range(16):
        costs = predicted(seed)
        np.testing.assert_allclose(run.corrector.corrected(costs).costs, exact(costs).costs, rtol=0.05)


def test_microbatches_that_were_not_measured_teach_nothing() -> None:
    corrector, costs = Corrector(PostBalance()), predicted(0)
    assignment = PostBalance().assign(costs, GRID)
    nothing = np.full((2, 4), np.nan)
    corrector.observe(assignment, costs, {"vision": nothing, "language_model": np.zeros((2, 4))}, 0.0)
    assert corrector.corrected(costs) is costs
    some = nothing.copy()
    some[1, 2] = 2 * assignment.loads(costs)["vision"][1, 2]
    corrector.observe(assignment, costs, {"vision": some}, 0.0)
    here = costs.costs[1] > 0
    np.testing.assert_allclose(corrector.corrected(costs).costs[1, here], 2 * costs.costs[1, here], rtol=1e-12)


def test_the_same_samples_take_part() -> None:
    """Also where a bucket is measured to cost next to nothing."""
    corrector, costs = Corrector(PostBalance()), predicted(3)
    assignment = PostBalance().assign(costs, GRID)
    for _ in range(20):
        measured = {name: loads * 1e-9 for name, loads in assignment.loads(costs).items()}
        corrector.observe(assignment, costs, measured, 0.0)
    np.testing.assert_array_equal(corrector.corrected(costs).takes_part, costs.takes_part)


def test_switches_off_where_it_costs_more_than_it_saves_and_tries_again() -> None:
    run = Run(Corrector(PostBalance(), Correction(window=5, retry_after=3)), PostBalance(), truth=exact)
    on = [(run.step(seed, spent_s=0.01), run.corrector.on)[1] for seed in range(20)]
    assert on == ([True] * 4 + [False] * 3 + [True]) * 2 + [True] * 4
    off = Run(Corrector(PostBalance(), Correction(window=5, retry_after=3)), PostBalance(), truth=exact)
    for seed in range(5):
        off.step(seed, spent_s=0.01)
    costs = predicted(7)
    assert off.corrector.corrected(costs) is costs
    report = off.corrector.report()
    assert not report.on and report.cost_s == pytest.approx(0.01) and report.benefit_s <= report.cost_s
    assert report.summary == (
        f"correction off: saved {report.benefit_s:.3g} s a step, cost 0.01 s, over 5 steps; tried again in 3 steps"
    )


@pytest.mark.parametrize(("spent_s", "on"), [(0.1, True), (1e6, False)])
def test_the_measured_cost_decides(spent_s: float, on: bool) -> None:
    run = Run(Corrector(PostBalance()), PostBalance())
    for seed in range(20):
        run.step(seed, spent_s)
    assert run.corrector.on is on
    assert run.corrector.report().benefit_s > 0.1


def test_stays_on_with_auto() -> None:
    auto = Auto(candidates=(PostBalance(),))
    run = Run(Corrector(auto, Correction(window=10)), auto)
    times = np.array([run.step(seed) for seed in range(30)])
    assert run.corrector.on and times[10:, 0].sum() < times[10:, 1].sum()


def test_an_order_that_no_cost_changes_saves_nothing() -> None:
    run = Run(Corrector(Arrival(), Correction(window=4)), Arrival())
    for seed in range(4):
        run.step(seed)
    assert not run.corrector.on and run.corrector.report().benefit_s == 0.0


def test_the_same_calls_give_the_same_bytes() -> None:
    reports: list[bytes] = []
    plans: list[Assignment] = []
    for _ in range(2):
        run = Run(Corrector(PostBalance(), Correction(window=5)), PostBalance(), noise=0.2)
        for seed in range(12):
            run.step(seed, spent_s=0.001)
        reports.append(msgspec.json.encode(run.corrector.report()))
        plans.append(PostBalance().assign(run.corrector.corrected(predicted(77)), GRID))
    assert reports[0] == reports[1] and plans[0] == plans[1]
    assert msgspec.json.decode(reports[0], type=CorrectionReport) == run.corrector.report()


def test_seconds_that_fit_no_grid_are_refused() -> None:
    corrector, costs = Corrector(PostBalance()), predicted(0)
    assignment = PostBalance().assign(costs, GRID)
    with pytest.raises(ConfigError, match="seconds of 'audio'; the step has vision, language_model"):
        corrector.observe(assignment, costs, {"audio": np.ones((2, 4))}, 0.0)
    with pytest.raises(ConfigError, match=r"seconds of vision have shape \(4,\); wanted \(2, 4\)"):
        corrector.observe(assignment, costs, {"vision": np.ones(4)}, 0.0)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"memory": 1.0}, {"spread": 0.0}, {"clip": 1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        replace(Correction(), **wrong)
