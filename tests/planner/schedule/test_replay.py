"""The simulator against published measurements: Cornstarch's pipelines, split with and without knowing what is frozen."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import pytest
from support.plans.plan_flows import chain

from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.schedule.schedule import build_schedule
from mmcompile.planner.schedule.simulate import simulate

MICROBATCHES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A pipeline as published: a chain of equal encoder stages, then equal stages of the language model."""

    encoder_stages: int
    language_stages: int
    """Cornstarch, Table 9."""
    encoder_ms: tuple[float, float]
    language_ms: tuple[float, float]
    """Forward and backward of one stage, Tables 3 and 11."""

    @property
    def iteration_ms(self) -> float:
        toys, flow = chain(self.encoder_stages + self.language_stages)
        encoder, language = (
            LayerTimes(forward_s=forward, input_grad_s=backward)
            for forward, backward in (self.encoder_ms, self.language_ms)
        )
        durations = {toy.name: encoder if i < self.encoder_stages else language for i, toy in enumerate(toys)}
        return simulate(build_schedule(toys, [flow] * MICROBATCHES), durations, record=False).makespan_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model, its two splits, and what is known of the ratio of their iteration times."""

    aware: Split
    unaware: Split
    published: float
    """Throughput aware / throughput unaware, Tables 3 and 11."""
    independent: float
    """What another simulator, written independently, makes of the same numbers."""

    @property
    def simulated(self) -> float:
        return self.unaware.iteration_ms / self.aware.iteration_ms

    @property
    def error(self) -> float:
        return abs(self.simulated / self.published - 1)


Numbers = tuple[int, int, float, float, float, float]
"""Encoder stages, language model stages, encoder forward and backward, language model forward and backward."""


def row(aware: Numbers, unaware: Numbers, throughputs: tuple[float, float], independent: float) -> Row:
    splits = [
        Split(encoder_stages=e, language_stages=l, encoder_ms=(ef, eb), language_ms=(lf, lb))
        for e, l, ef, eb, lf, lb in (aware, unaware)  # noqa: E741
    ]
    published = throughputs[0] / throughputs[1]
    return Row(aware=splits[0], unaware=splits[1], published=published, independent=independent)


# Cornstarch, Tables 3 (medium language model, M), 11 (large, L) and 9 (numbers of stages). Table 10 (small) contradicts the
# counts of Table 9 and is left out.
ROWS = {
    "M VLM-S": row((1, 6, 49.06, 0.12, 27.46, 43.03), (1, 3, 26.49, 0.16, 28.13, 51.32), (6.47, 5.30), 1.00),
    "M VLM-M": row((2, 5, 75.04, 0.27, 28.15, 51.30), (3, 4, 45.90, 0.16, 45.26, 84.89), (5.15, 3.73), 1.54),
    "M ALM-S": row((1, 6, 57.25, 0.38, 81.73, 157.12), (1, 5, 57.79, 0.38, 81.94, 157.14), (1.94, 1.94), 0.97),
    "M ALM-M": row((1, 6, 176.80, 0.64, 82.19, 157.51), (4, 4, 93.39, 0.34, 98.25, 189.11), (1.96, 1.70), 1.14),
    "M VLM-L": row((4, 5, 101.02, 0.20, 34.67, 63.77), (5, 3, 70.42, 0.15, 67.03, 127.34), (3.17, 2.06), 1.68),
    "M ALM-L": row((2, 4, 308.16, 0.73, 100.20, 188.50), (5, 5, 145.97, 0.33, 121.21, 235.23), (1.98, 1.69), 1.21),
    "L VLM-S": row((1, 5, 52.54, 0.10, 88.58, 171.72), (5, 3, 85.83, 0.10, 106.26, 171.38), (2.39, 2.10), 1.04),
    "L VLM-M": row((1, 5, 249.38, 0.49, 88.95, 171.68), (1, 5, 132.16, 0.26, 113.64, 213.58), (2.29, 1.85), 1.23),
    "L VLM-L": row((1, 4, 481.44, 0.74, 106.53, 215.06), (2, 4, 246.22, 0.38, 146.62, 287.14), (1.76, 1.81), 0.95),
    "L ALM-S": row((1, 5, 76.84, 0.24, 286.16, 596.40), (1, 5, 78.80, 0.24, 285.07, 594.31), (0.72, 0.73), 1.00),
    "L ALM-M": row((1, 5, 197.21, 0.45, 287.37, 597.47), (1, 3, 101.97, 0.24, 359.27, 743.91), (0.72, 0.62), 1.15),
    "L ALM-L": row((1, 5, 319.31, 0.50, 286.31, 596.50), (2, 4, 177.29, 0.27, 356.06, 742.80), (0.71, 0.61), 1.20),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_independent_simulator_agrees_to_its_printed_digits(name: str) -> None:
    assert ROWS[name].simulated == pytest.approx(ROWS[name].independent, abs=0.006)


def test_the_median_error_against_the_published_ratios_is_at_most_five_percent() -> None:
    errors = {name: row.error for name, row in ROWS.items()}
    assert len(errors) == 12
    assert median(errors.values()) <= 0.05
    # By far the largest is of a row that contradicts itself: its one encoder stage takes 49.06 ms with and 26.49 ms without.
    worst = max(errors, key=errors.__getitem__)
    assert worst == "M VLM-S"
    assert errors.pop(worst) < 0.20
    assert max(errors.values()) < 0.13
