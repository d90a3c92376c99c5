"""Microbatches dealt to unlike pipelines: against all splits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.plans.template_jobs import timed_template

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.instantiate import split


def every_split(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in every_split(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_pipeline_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.randint(1, 4)
    total = rng.randint(parts, 14)
    templates = [
        timed_template(index + 1, rng.uniform(0, 3), rng.choice([1.0, 1.5, rng.random() + 0.1]))
        for index in range(parts)
    ]

    fast = split(templates, total)

    assert sum(fast) == total and min(fast) >= 1
    slowest = min(
        max(template.iteration_s(count) for template, count in zip(templates, counts, strict=True))
        for counts in every_split(total, parts)
    )
    assert max(t.iteration_s(count) for t, count in zip(templates, fast, strict=True)) == slowest


def test_pipelines_of_a_template_may_differ() -> None:
    """Seven equal pipelines take 32 microbatches, which one whole number for all seven cannot."""
    assert split([timed_template(3, 1.0, 1.0)] * 7, 32) == (5, 5, 5, 5, 4, 4, 4)


def test_too_few_microbatches_name_the_nearest_number() -> None:
    with pytest.raises(PlanError, match="3 microbatches cannot be dealt to 4 pipelines.*nearest number that can is 4"):
        split([timed_template(1, 0.0, 1.0)] * 4, 3)
