"""Microbatches dealt to unlike pipelines: against all splits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.plans.template_jobs import timed_template

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.microbatches import count_microbatches, split


def every_split(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in every_split(total - first, parts - 1):
            yield (first, *rest)


def spread(times: list[float], counts: tuple[int, ...]) -> float:
    finish = [time * count for time, count in zip(times, counts, strict=True)]
    mean = sum(finish) / len(finish)
    return sum((value - mean) ** 2 for value in finish)


@pytest.mark.parametrize("seed", range(40))
def test_both_objectives_equal_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.randint(1, 4)
    total = rng.randint(parts, 14)
    templates = [
        timed_template(index + 1, rng.uniform(0, 3), rng.choice([1.0, 1.5, rng.random() + 0.1]))
        for index in range(parts)
    ]
    times = [template.iteration_s(1) for template in templates]

    fast = split(templates, total)
    even = split(templates, total, "variance")

    assert sum(fast) == sum(even) == total and min(*fast, *even) >= 1
    slowest = min(
        max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))
        for counts in every_split(total, parts)
    )
    assert max(t.iteration_s(count) for t, count in zip(templates, fast, strict=True)) == slowest
    least = min(spread(times, counts) for counts in every_split(total, parts))
    assert spread(times, even) == pytest.approx(least, rel=1e-9, abs=1e-12)


def test_pipelines_of_a_template_may_differ() -> None:
    """Seven equal pipelines take 32 microbatches, which one whole number for all seven cannot."""
    assert split([timed_template(3, 1.0, 1.0)] * 7, 32) == (5, 5, 5, 5, 4, 4, 4)


def test_too_few_microbatches_name_the_nearest_number() -> None:
    with pytest.raises(PlanError, match="3 microbatches cannot be dealt to 4 pipelines.*nearest number that can is 4"):
        split([timed_template(1, 0.0, 1.0)] * 4, 3)


@pytest.mark.parametrize(
    ("batch", "samples", "pipelines", "nearest"),
    [(100, 8, 3, "96 and 104"), (100, 8, 13, "104"), (16, 8, 3, "24"), (7, 8, 1, "8")],
)
def test_a_batch_that_cannot_be_cut_names_the_nearest(batch: int, samples: int, pipelines: int, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"global batch of {batch} samples.*nearest that can: {nearest}$"):
        count_microbatches(batch, samples, pipelines)


def test_a_batch_that_can_be_cut() -> None:
    assert count_microbatches(96, 8, 3) == 12
