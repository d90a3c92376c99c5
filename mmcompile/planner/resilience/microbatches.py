"""The microbatches of a step, dealt to pipelines that are not equally fast."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.template import Template

Objective = Literal["makespan", "variance"]
"""What a split minimises: the slowest pipeline's time, or the spread of the pipelines' times as published."""


def split(templates: Sequence[Template], num_microbatches: int, objective: Objective = "makespan") -> tuple[int, ...]:
    """Deal a step's microbatches to pipelines, at least one to each.

    `makespan` minimises `max_i fill_i + b_i * w_i` exactly: the next microbatch goes to the pipeline that would finish first
    with it (ties to the first). `variance` minimises `sum_i (b_i * T_i - mean)^2` with `T_i = fill_i + w_i` (Oobleck,
    Eq. 2.6), but with a whole number for each pipeline rather than one for all pipelines of a template.

    Args:
        templates: one for each pipeline.
        num_microbatches: to deal.

    Returns:
        Microbatches of each pipeline; their sum is `num_microbatches`.

    Raises:
        PlanError: fewer microbatches than pipelines.
    """
    if not templates or num_microbatches < len(templates):
        raise PlanError(
            f"{num_microbatches} microbatches cannot be dealt to {len(templates)} pipelines, at least one to each; "
            f"the nearest number that can is {max(1, len(templates))}"
        )
    return _fastest(templates, num_microbatches) if objective == "makespan" else _evenest(templates, num_microbatches)


def count_microbatches(global_batch: int, microbatch_samples: int, num_pipelines: int) -> int:
    """Microbatches of a step.

    Args:
        global_batch: samples of a step.
        microbatch_samples: samples of a microbatch.
        num_pipelines: that need at least one microbatch each.

    Raises:
        PlanError: the batch is no whole number of microbatches, or they are fewer than the pipelines; names the nearest
            batches that can be split. The batch is never changed silently.
    """
    whole, rest = divmod(global_batch, microbatch_samples)
    if rest == 0 and whole >= num_pipelines:
        return whole
    below = [count for count in (whole,) if count >= num_pipelines]
    near = [count * microbatch_samples for count in (*below, max(whole + 1, num_pipelines))]
    raise PlanError(
        f"a global batch of {global_batch} samples cannot be cut into microbatches of {microbatch_samples} with at least one "
        f"for each of {num_pipelines} pipelines; the nearest that can: {' and '.join(map(str, near))}"
    )


def _fastest(templates: Sequence[Template], num_microbatches: int) -> tuple[int, ...]:
    counts = [1] * len(templates)
    heap = [(template.iteration_s(2), index) for index, template in enumerate(templates)]
    heapq.heapify(heap)
    for _ in range(num_microbatches - len(templates)):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (templates[index].iteration_s(counts[index] + 1), index))
    return tuple(counts)


def _evenest(templates: Sequence[Template], num_microbatches: int) -> tuple[int, ...]:
    """The spread is the least over c of `sum_i (b_i * T_i - c)^2`, and for a fixed c dealing one by one is exact.

    As c grows over all possible means, microbatches only move from faster to slower pipelines, one at a time; the best split
    is met on the way.
    """
    times = [template.iteration_s(1) for template in templates]
    least, most = (bound(times) * num_microbatches / len(times) for bound in (min, max))
    counts = _dealt(times, num_microbatches, least)
    best, best_spread = tuple(counts), _spread(times, counts)
    while (move := _next_move(times, counts)) is not None:
        target, giver, taker = move
        if target > most:
            break
        counts[giver] -= 1
        counts[taker] += 1
        if (spread := _spread(times, counts)) < best_spread:
            best, best_spread = tuple(counts), spread
    return best


def _dealt(times: Sequence[float], num_microbatches: int, target: float) -> list[int]:
    """The split with the least `sum_i (b_i * T_i - target)^2`."""
    counts = [1] * len(times)
    heap = [(time * (3 * time - 2 * target), index) for index, time in enumerate(times)]
    heapq.heapify(heap)
    for _ in range(num_microbatches - len(times)):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (times[index] * (times[index] * (2 * counts[index] + 1) - 2 * target), index))
    return counts


def _spread(times: Sequence[float], counts: Sequence[int]) -> float:
    finish = [time * count for time, count in zip(times, counts, strict=True)]
    mean = sum(finish) / len(finish)
    return sum((value - mean) ** 2 for value in finish)


def _next_move(times: Sequence[float], counts: Sequence[int]) -> tuple[float, int, int] | None:
    """The move of one microbatch, faster pipeline to slower, that pays at the least c: (c, from, to); None for none."""
    moves = [
        (
            (times[taker] ** 2 * (2 * counts[taker] + 1) - times[giver] ** 2 * (2 * counts[giver] - 1))
            / (2 * (times[taker] - times[giver])),
            giver,
            taker,
        )
        for giver in range(len(times))
        for taker in range(len(times))
        if counts[giver] > 1 and times[taker] > times[giver]
    ]
    return min(moves, default=None)
