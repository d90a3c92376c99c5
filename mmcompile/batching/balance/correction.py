"""Adaptive correction: ratio of measured to predicted costs of samples, by component and shape bucket.

Kernels change with shapes, so a few kinds of samples cost steadily more or less than interpolation predicts. Samples are put into
buckets by predicted cost; for each, the ratio measured / predicted is learned from the seconds of whole microbatches:

    measured_m / predicted_m = sum over buckets b of share_mb * ratio_b

where share_mb is bucket b's part of microbatch m's predicted cost: least squares over all past microbatches with exponential
forgetting, no ratio negative. The more measurements scatter, the more of them it takes to move a bucket away from its component's
common ratio; large deviations of single microbatches are clipped.

Learning is switched off when it saves less than it costs. So that noise does not count as savings, microbatches teach two further
learners in turn; a step planned by the ratios of one is timed by the other, whose errors differ.

Source: DFLOP §3.4.3, which tracks throughput per shape but does not define the penalty; the equations here are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts
from mmcompile.batching.balance.auto import StepTime
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.bucket_bounds import pipelined
from mmcompile.errors import ConfigError

_LEAST_NOISE = 0.01
"""Lower limit of the assumed relative standard deviation of measured seconds."""

_OUTLIER = 3.0
"""Number of standard deviations beyond which a measurement is clipped."""

_LARGEST_FACTOR = 32.0
"""Upper limit of the factor learned for a shape bucket; the lower limit is its inverse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Settings of the correction of predicted sample costs by learned ratios measured / predicted, and of switching it off."""

    buckets_per_octave: int = 2
    """Number of shape buckets per doubling of the predicted cost."""
    memory: float = 0.95
    """Factor by which the weight of past measurements shrinks at each step (exponential forgetting)."""
    spread: float = 0.3
    """Assumed relative standard deviation of measured / predicted cost between groups of samples of similar predicted cost."""
    clip: float = 1.5
    """Largest factor between measured and expected time of a microbatch; larger ones are clipped, as interruptions cause them.

    The limit does not apply if most microbatches of the step deviate as much.
    """
    window: int = 20
    """Number of steps over which benefit is compared with cost."""
    retry_after: int = 500
    """Number of steps for which the correction stays off before it is tried again."""
    step_time: StepTime = pipelined
    """Function that times an assignment by the learned costs, to compute the benefit."""

    def __post_init__(self) -> None:
        if min(self.buckets_per_octave, self.window, self.retry_after) < 1:
            raise ConfigError(
                f"{self.buckets_per_octave} buckets an octave, a window of {self.window} and {self.retry_after} steps off; "
                "wanted at least 1 of each"
            )
        if not (0 <= self.memory < 1 and self.spread > 0 and self.clip > 1):
            raise ConfigError(
                f"memory {self.memory}, spread {self.spread}, clip {self.clip}; wanted 0 <= memory < 1, spread > 0, clip > 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionReport:
    """State of the correction of predicted sample costs: on or off, the reason, and the seconds that it saves and costs."""

    on: bool
    reason: str
    benefit_s: float
    """Seconds saved per step: the mean over the last complete window, or over the steps so far if none is complete.

    `cost_s` is the mean of the seconds that measuring and correcting cost, over the same steps.
    """
    cost_s: float

    @property
    def summary(self) -> str:
        """One line of text: on or off (predicted sample costs are corrected or not), and the reason."""
        return f"correction {'on' if self.on else 'off'}: {self.reason}"


@final
class Corrector:
    """Learner of cost ratios from measured steps, which corrects the costs of later steps. It is deterministic.

    Args:
        balancer: balancer that plans the steps; also run without correction, to measure the savings.
    """

    def __init__(self, balancer: Balancer, settings: Correction | None = None) -> None:
        self._settings = settings or Correction()
        self._balancer = balancer
        self._learned: dict[str, _Learned] = {}
        self._halves: tuple[dict[str, _Learned], ...] = ({}, {})
        self._num_steps = 0
        self._saved_s: list[float] = []
        self._spent_s: list[float] = []
        self._left_off = 0
        self._verdict = (0.0, 0.0)
        self._reason = ""

    @property
    def on(self) -> bool:
        """True while costs are corrected and steps need to be measured."""
        return self._left_off == 0

    def corrected(self, costs: SampleCosts) -> SampleCosts:
        """Return the costs in measured seconds, or unchanged while off or before anything was measured.

        Costs of 0 stay 0, other costs stay above 0. A component never measured is scaled by the geometric mean of the others'
        ratios.
        """
        return _corrected(costs, self._learned) if self.on and self._learned else costs

    def observe(
        self, assignment: Assignment, costs: SampleCosts, measured: Mapping[str, np.ndarray], spent_s: float
    ) -> None:
        """Learn from a measured step. While off, only count the step; `measured` may be empty then.

        Args:
            assignment: assignment that the step ran with.
            costs: predicted costs, not corrected.
            measured: component -> seconds of each microbatch, float64 [replicas, microbatches]; nan or 0 where not measured.
            spent_s: seconds that measuring and correcting took in this step.

        Raises:
            ConfigError: `measured` has an unknown component, or a shape that is not the grid's.
        """
        _check(assignment, measured)
        self._num_steps += 1
        if not self.on:
            self._left_off -= 1
            return
        self._saved_s.append(self._saved(costs, assignment.grid))
        self._spent_s.append(spent_s)
        for name, seconds in measured.items():
            row, flat = assignment.components.index(name), seconds.ravel()
            buckets = assignment.buckets(row)
            half = (np.arange(len(flat)) + self._num_steps) % 2
            self._learn(self._learned, name, _evidence(buckets, costs.costs[row], flat, self._settings))
            for index, learned in enumerate(self._halves):
                mine = np.where(half == index, flat, np.nan)
                self._learn(learned, name, _evidence(buckets, costs.costs[row], mine, self._settings))
        if len(self._saved_s) == self._settings.window:
            self._judge()

    def report(self) -> CorrectionReport:
        """Return whether the correction is on, and what it saves and costs."""
        benefit_s, cost_s = self._verdict
        reason = self._reason
        if not reason and self._saved_s:
            benefit_s, cost_s = float(np.mean(self._saved_s)), float(np.mean(self._spent_s))
            reason = f"saves {benefit_s:.3g} s a step, costs {cost_s:.3g} s, after {len(self._saved_s)} steps"
        if not self.on:
            reason += f"; tried again in {self._left_off} steps"
        reason = reason or "no step was measured yet"
        return CorrectionReport(on=self.on, reason=reason, benefit_s=benefit_s, cost_s=cost_s)

    def _saved(self, costs: SampleCosts, grid: Grid) -> float:
        """Return the seconds that correction saves in a step with these samples, negative if it makes the step slower."""
        if not all(self._halves):
            return 0.0
        # A step planned by the ratios of one learner is timed by the other, so that noise does not count.
        turn = self._num_steps % 2
        taught, judge = _corrected(costs, self._halves[turn]), _corrected(costs, self._halves[1 - turn])
        without, corrected = self._balancer.assign(costs, grid), self._balancer.assign(taught, grid)
        return self._settings.step_time(without, judge) - self._settings.step_time(corrected, judge)

    def _learn(self, learned: dict[str, _Learned], name: str, evidence: _Evidence) -> None:
        if len(evidence.ratios):
            learned.setdefault(name, _Learned(self._settings)).learn(evidence)

    def _judge(self) -> None:
        benefit_s, cost_s = float(np.mean(self._saved_s)), float(np.mean(self._spent_s))
        self._verdict = (benefit_s, cost_s)
        self._reason = f"saved {benefit_s:.3g} s a step, cost {cost_s:.3g} s, over {len(self._saved_s)} steps"
        if benefit_s <= cost_s:
            self._left_off = self._settings.retry_after
        self._saved_s, self._spent_s = [], []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Evidence:
    """Ratios measured / predicted seconds of one component's microbatches in one step, and the shape buckets of their samples."""

    keys: np.ndarray
    """Numbers of the shape buckets that occur in the step, int64 [buckets], ascending."""
    shares: np.ndarray
    """Fraction of a microbatch's predicted cost in each shape bucket (samples of like cost), float64 [microbatches, buckets]."""
    ratios: np.ndarray
    """Measured over predicted seconds, float64 [microbatches]."""


@final
class _Learned:
    """Learned ratio measured / predicted cost of each shape bucket (samples of similar predicted cost) of one component."""

    def __init__(self, settings: Correction) -> None:
        self._settings = settings
        self.scale = math.nan
        self._noise = math.nan
        self._keys = np.zeros(0, dtype=np.int64)
        self._factors = np.zeros(0)
        self._gram = np.zeros((0, 0))
        self._moment = np.zeros(0)

    def corrected(self, costs: np.ndarray) -> np.ndarray:
        return costs * self.scale * self._factors_of(_keys(costs, self._settings))

    def learn(self, evidence: _Evidence) -> None:
        memory = self._settings.memory
        self.scale = _mixed(self.scale, float(np.median(evidence.ratios)), memory)
        self._grow(evidence.keys)
        expected = evidence.shares @ self._factors_of(evidence.keys) * self.scale
        ratios = expected * np.exp(self._clipped(np.log(evidence.ratios / expected)))
        here = np.searchsorted(self._keys, evidence.keys)
        self._gram *= memory
        self._moment *= memory
        self._gram[np.ix_(here, here)] += evidence.shares.T @ evidence.shares
        self._moment[here] += evidence.shares.T @ ratios
        self._factors = self._solve()

    def _clipped(self, surprise: np.ndarray) -> np.ndarray:
        """Return log ratios of measured to expected seconds, clipped around their median; update the noise estimate."""
        middle = float(np.median(surprise))
        deviation = 1.4826 * float(np.median(np.abs(surprise - middle)))  # of a normal distribution
        self._noise = _mixed(self._noise, deviation, self._settings.memory)
        limit = max(math.log(self._settings.clip), _OUTLIER * deviation)
        return np.clip(surprise, middle - limit, middle + limit)

    def _factors_of(self, keys: np.ndarray) -> np.ndarray:
        if not len(self._keys):
            return np.ones(len(keys))
        position = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[position] == keys, self._factors[position], 1.0)

    def _grow(self, keys: np.ndarray) -> None:
        together = np.union1d(self._keys, keys)
        kept = np.searchsorted(together, self._keys)
        gram, moment, factors = np.zeros((len(together),) * 2), np.zeros(len(together)), np.ones(len(together))
        gram[np.ix_(kept, kept)], moment[kept], factors[kept] = self._gram, self._moment, self._factors
        self._keys, self._gram, self._moment, self._factors = together, gram, moment, factors

    def _solve(self) -> np.ndarray:
        """Return the factor f of each shape bucket, float64 [buckets]: its ratio measured / predicted is f * `scale`.

        f >= 0 minimizes |shares f - ratios / scale|^2 + prior |f - 1|^2, with `shares` and `ratios` of past `_Evidence`. With
        prior = (noise / spread)^2, for relative deviations of measurements and f, f is the most likely if both are normal.
        """
        prior = (max(self._noise, _LEAST_NOISE) / self._settings.spread) ** 2
        lower = np.linalg.cholesky(self._gram + prior * np.eye(len(self._keys)))
        target = solve_triangular(lower, self._moment / self.scale + prior, lower=True)
        factors, _ = nnls(lower.T, target)
        return np.clip(factors, 1 / _LARGEST_FACTOR, _LARGEST_FACTOR)


def _mixed(old: float, new: float, memory: float) -> float:
    return new if math.isnan(old) else memory * old + (1 - memory) * new


def _keys(costs: np.ndarray, settings: Correction) -> np.ndarray:
    """Return the shape bucket of each cost, int64: floor(log2(cost) * buckets_per_octave); an arbitrary one for cost 0."""
    present = np.where(costs > 0, costs, 1.0)
    return np.floor(np.log2(present) * settings.buckets_per_octave).astype(np.int64)


def _evidence(buckets: np.ndarray, costs: np.ndarray, seconds: np.ndarray, settings: Correction) -> _Evidence:
    """Return measured / predicted seconds, and cost fractions by shape bucket (similar costs), of measured microbatches.

    Args:
        buckets: int [samples], microbatch (not shape bucket) of each sample, counted over all replicas; -1 if without work.
        costs: predicted costs, float64 [samples].
        seconds: measured seconds, float64 [microbatches of all replicas].
    """
    known = np.where(np.isfinite(seconds), seconds, 0.0) > 0
    here = (buckets != ABSENT) & known[buckets]
    keys, column = np.unique(_keys(costs[here], settings), return_inverse=True)
    rows, row = np.unique(buckets[here], return_inverse=True)
    shape = (len(rows), len(keys))
    sums = np.bincount(row * shape[1] + column, weights=costs[here], minlength=shape[0] * shape[1]).reshape(shape)
    predicted = sums.sum(axis=1)
    return _Evidence(keys=keys, shares=sums / predicted[:, None], ratios=seconds[rows] / predicted)


def _corrected(costs: SampleCosts, learned: Mapping[str, _Learned]) -> SampleCosts:
    """Return costs times the ratios learned for their component; other components take the geometric mean of all ratios."""
    common = math.exp(float(np.mean([math.log(component.scale) for component in learned.values()])))
    rows = [
        learned[name].corrected(row) if name in learned else row * common
        for name, row in zip(costs.components, costs.costs, strict=True)
    ]
    # A cost that becomes 0 would mean that a sample is absent.
    return replace(costs, costs=np.where(costs.takes_part, np.maximum(rows, np.finfo(np.float64).tiny), 0.0))


def _check(assignment: Assignment, measured: Mapping[str, np.ndarray]) -> None:
    for name, seconds in measured.items():
        if name not in assignment.components:
            raise ConfigError(f"seconds of {name!r}; the step has {', '.join(assignment.components)}")
        wanted = (assignment.grid.num_replicas[assignment.components.index(name)], assignment.grid.num_microbatches)
        if seconds.shape != wanted:
            raise ConfigError(f"seconds of {name} have shape {seconds.shape}; wanted {wanted}, replicas x microbatches")
