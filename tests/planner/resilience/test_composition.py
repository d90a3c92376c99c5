"""Combinations of templates: against all of them."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from support.plans.template_jobs import even_job, random_templates, timed_job, timed_template

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.composition import SPARE_GAIN, compositions, fastest
from mmcompile.planner.resilience.instantiate import split
from mmcompile.planner.resilience.job import Job


def all_sizes(job: Job, num_nodes: int) -> dict[tuple[int, ...], float]:
    """Every combination that uses all nodes, with the seconds of its step."""
    sizes = tuple(job.by_size)
    found = {}
    for counts in compositions(sizes, num_nodes):
        chosen = tuple(size for size, count in zip(sizes, counts, strict=True) for _ in range(count))
        if job.min_pipelines <= len(chosen) <= job.num_microbatches:
            templates = [job.by_size[size] for size in chosen]
            dealt = split(templates, job.num_microbatches)
            found[chosen] = max(t.iteration_s(count) for t, count in zip(templates, dealt, strict=True))
    return found


def test_coin_change() -> None:
    assert set(compositions((2, 3, 4), 8)) == {(4, 0, 0), (2, 0, 1), (1, 2, 0), (0, 0, 2)}
    assert list(compositions((2, 4), 7)) == []


@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_combination_equals_all_combinations(seed: int) -> None:
    rng = random.Random(seed)
    first = rng.randint(1, 3)
    sizes = sorted(rng.sample(range(first, first + 5), rng.randint(1, 4)))
    fault_tolerance = rng.randint(0, 2)
    job = timed_job(
        random_templates(rng, sizes),
        fault_tolerance=fault_tolerance,
        num_microbatches=rng.randint(fault_tolerance + 1, 12),
    )
    num_nodes = rng.randint(job.min_nodes, job.min_nodes + 8)
    found = fastest(job, num_nodes, Counter(rng.choices(sizes, k=2)))

    most = max(used for used in range(num_nodes + 1) if all_sizes(job, used))
    with_most = min(all_sizes(job, most).values())
    with_any = min(min(all_sizes(job, used).values(), default=float("inf")) for used in range(most + 1))
    assert found.iteration_s == (with_any if with_any < with_most * (1 - SPARE_GAIN) else with_most)
    assert bool(found.spare_reason) == (sum(found.sizes[0]) < num_nodes)
    same = {chosen for chosen, seconds in all_sizes(job, sum(found.sizes[0])).items() if seconds <= found.iteration_s}
    assert set(found.sizes) <= same
    assert len(found.sizes) == len(set(found.sizes)) == min(len(same), 32)


def test_what_runs_comes_first_among_equals() -> None:
    job = timed_job([timed_template(size, 0.0, 12.0 / size) for size in (2, 3, 4)], num_microbatches=24)
    tied = fastest(job, 12).sizes
    assert len(tied) > 1
    for sizes in tied:
        assert fastest(job, 12, Counter(sizes)).sizes[0] == sizes


def test_idle_nodes_have_a_reason() -> None:
    gaps = fastest(even_job((2, 4)), 7)
    assert sum(gaps.sizes[0]) == 6
    assert "no combination of templates of 2, 4 nodes" in gaps.spare_reason and "6 of 7 nodes" in gaps.spare_reason
    batch = fastest(timed_job([timed_template(1, 0.0, 1.0)], num_microbatches=3), 5)
    assert sum(batch.sizes[0]) == 3 and "1 to 3 pipelines" in batch.spare_reason
    slow = fastest(timed_job([timed_template(2, 0.0, 1.0), timed_template(3, 0.0, 2.0)]), 3)
    assert sum(slow.sizes[0]) == 2 and slow.spare_reason == "a step takes 8.00 s with 2 nodes and 16.0 s with 3"


def test_too_few_nodes() -> None:
    with pytest.raises(PlanError, match="3 nodes cannot hold 2 pipelines of at least 2; wanted 4"):
        fastest(even_job((2, 3), fault_tolerance=1), 3)


def test_sixty_four_nodes_take_less_than_two_seconds() -> None:
    job = even_job(range(1, 64), fault_tolerance=1, num_layers=96, num_microbatches=512)
    start = time.process_time()
    found = fastest(job, 64)
    assert time.process_time() - start < 2
    assert sum(found.sizes[0]) == 64 and len(found.sizes[0]) >= 2
