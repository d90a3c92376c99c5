"""Number of pipelines of each template: the combination with the shortest step, found without listing all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.job import Job
from mmcompile.units import format_seconds

SPARE_GAIN = 0.01
"""Smallest relative gain of a step for which usable nodes are left idle."""
_MAX_TIED = 32
"""Largest number of combinations of templates returned among those with equally short steps."""
_IMPOSSIBLE = -(1 << 40)


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """Combinations of templates with the shortest step, and the reason why nodes are left over."""

    iteration_s: float
    sizes: tuple[tuple[int, ...], ...]
    """Node counts of the pipelines for each combination with the shortest step, as (2, 2, 3); first the combination most like
    that of the running pipelines."""
    spare_reason: str
    """Reason why nodes are left over; "" if all nodes are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shapes:
    """Sizes and times of templates, with limits of a step: search input, hashable so that results can be cached."""

    templates: tuple[tuple[int, float, float], ...]
    """(number of nodes, seconds to fill the pipeline, further seconds for each microbatch) of every template."""
    min_pipelines: int
    num_microbatches: int


def compositions(sizes: Sequence[int], num_nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield each combination, `counts[i]` pipelines of `sizes[i]` nodes, that uses all `num_nodes` nodes (Oobleck, Eq. 2.5)."""
    if not sizes:
        yield from [()] if num_nodes == 0 else []
        return
    for count in range(num_nodes // sizes[0], -1, -1):
        for rest in compositions(sizes[1:], num_nodes - count * sizes[0]):
            yield (count, *rest)


def fastest(job: Job, num_nodes: int, like: Mapping[int, int] | None = None) -> Composition:
    """Return the combinations of templates with the shortest step of `job.num_microbatches`, among those that use every node.

    A deadline limits the microbatches that each template's pipeline can run. Whether a combination then runs the whole step is a
    knapsack over nodes and pipelines. The least deadline is found by bisection over all possible end times.

    Args:
        like: node count -> number of running pipelines, by which tied combinations are sorted.

    Raises:
        PlanError: there are fewer nodes than fault tolerance needs.
    """
    if num_nodes < job.min_nodes:
        raise PlanError(
            f"{num_nodes} nodes cannot hold {job.min_pipelines} pipelines of at least {job.templates[0].num_nodes}; "
            f"wanted {job.min_nodes}"
        )
    shapes = _Shapes(
        templates=tuple((one.num_nodes, one.fill_s, one.slowest_s) for one in job.templates),
        min_pipelines=job.min_pipelines,
        num_microbatches=job.num_microbatches,
    )
    used, seconds, reason = _used(shapes, num_nodes)
    table = _capacities(shapes, _limits(shapes, seconds), used)
    tied = tuple(_combinations(shapes, _limits(shapes, seconds), table, used, like or {}))
    return Composition(iteration_s=seconds, sizes=tied, spare_reason=reason)


@lru_cache(maxsize=4096)
def _used(shapes: _Shapes, num_nodes: int) -> tuple[int, float, str]:
    """Return (nodes to use out of `num_nodes`, least seconds of a step on them, reason why the others stay idle or "")."""
    most = int(np.flatnonzero(_in_time(shapes, float("inf"), num_nodes))[-1])
    seconds = _least(shapes, (most,))
    reason = ""
    if most < num_nodes:
        sizes = ", ".join(str(size) for size, _, _ in shapes.templates)
        reason = (
            f"no combination of templates of {sizes} nodes, with {shapes.min_pipelines} to {shapes.num_microbatches} "
            f"pipelines, uses more than {most} of {num_nodes} nodes"
        )
    fewer = float("inf")
    if _in_time(shapes, seconds * (1 - SPARE_GAIN), most).any():
        fewer = _least(shapes, tuple(range(most + 1)))
    if fewer < seconds * (1 - SPARE_GAIN):
        used = int(np.flatnonzero(_in_time(shapes, fewer, most))[-1])
        reason = f"a step takes {format_seconds(fewer)} with {used} nodes and {format_seconds(seconds)} with {most}"
        return used, fewer, reason
    return most, seconds, reason


def _least(shapes: _Shapes, used: tuple[int, ...]) -> float:
    """Return the least seconds of a step among combinations of templates whose total number of nodes is in `used`."""
    ends = np.unique(np.concatenate([_ends(shapes, index) for index in range(len(shapes.templates))]))
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if _in_time(shapes, float(ends[middle]), max(used))[list(used)].any():
            high = middle
        else:
            low = middle + 1
    return float(ends[low])


def _in_time(shapes: _Shapes, deadline_s: float, num_nodes: int) -> np.ndarray:
    """Return bool [nodes + 1]: entry n is True if templates that use exactly n nodes can run a step in `deadline_s`."""
    limits = _limits(shapes, deadline_s)
    usable = [(size, limit) for (size, _, _), limit in zip(shapes.templates, limits, strict=True) if limit]
    found = np.zeros(num_nodes + 1, dtype=bool)
    if not usable:
        return found
    sizes, most = (np.array(column) for column in zip(*usable, strict=True))
    widest = int(sizes.max())
    # Columns left of 0 nodes stand for what cannot be.
    before = widest + np.arange(num_nodes + 1) - sizes[:, None]
    best = np.full(widest + num_nodes + 1, _IMPOSSIBLE, dtype=np.int64)
    best[widest] = 0
    for pipelines in range(1, _max_pipelines(shapes, num_nodes) + 1):
        best[widest:] = (best[before] + most[:, None]).max(axis=0)
        if pipelines >= shapes.min_pipelines:
            found |= best[widest:] >= shapes.num_microbatches
    return found


def _max_pipelines(shapes: _Shapes, num_nodes: int) -> int:
    return max(shapes.min_pipelines, min(shapes.num_microbatches, num_nodes // shapes.templates[0][0]))


@lru_cache(maxsize=1024)
def _ends(shapes: _Shapes, index: int) -> np.ndarray:
    """Return the seconds in which a pipeline of template `index` runs 1, 2, ... microbatches, float64 [microbatches]."""
    _, fill_s, slowest_s = shapes.templates[index]
    return fill_s + np.arange(1, shapes.num_microbatches + 1) * slowest_s


def _limits(shapes: _Shapes, deadline_s: float) -> tuple[int, ...]:
    """Return, for each template, the most microbatches that a pipeline of it can run in `deadline_s`, or 0."""
    return tuple(
        int(np.searchsorted(_ends(shapes, index), deadline_s, side="right")) for index in range(len(shapes.templates))
    )


def _capacities(shapes: _Shapes, limits: tuple[int, ...], num_nodes: int) -> np.ndarray:
    """Return the most microbatches that pipelines can run by a deadline, int64 [templates + 1, pipelines + 1, nodes + 1].

    Entry [t, p, n] is for p pipelines of the first t templates on exactly n nodes together. `limits`: template -> most
    microbatches of one pipeline.
    """
    most = _max_pipelines(shapes, num_nodes)
    table = np.full((len(limits) + 1, most + 1, num_nodes + 1), _IMPOSSIBLE, dtype=np.int64)
    table[:, 0, 0] = 0
    for index, ((size, _, _), limit) in enumerate(zip(shapes.templates, limits, strict=True)):
        layer = table[index + 1]
        layer[:] = table[index]
        if limit == 0 or size > num_nodes:
            continue
        for pipelines in range(1, most + 1):
            np.maximum(layer[pipelines, size:], layer[pipelines - 1, :-size] + limit, out=layer[pipelines, size:])
    return table


def _combinations(
    shapes: _Shapes, limits: tuple[int, ...], table: np.ndarray, used: int, like: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Yield up to `_MAX_TIED` combinations of templates that run a step in time on `used` nodes, as node counts of pipelines.

    Those most similar to `like` (node count -> number of running pipelines) come first. `limits`: most microbatches that one
    pipeline of each template runs in time. `table`: entry [t, p, n], most microbatches that p pipelines of the first t templates
    run in time on n nodes together.
    """
    sizes = [size for size, _, _ in shapes.templates]
    wanted = shapes.num_microbatches

    def fill(index: int, pipelines: int, nodes: int, capacity: int) -> Iterator[tuple[int, ...]]:
        if index < 0:
            yield ()
            return
        size, limit = sizes[index], limits[index]
        most = min(pipelines, nodes // size) if limit else 0
        for count in sorted(range(most + 1), key=lambda count: (abs(count - like.get(size, 0)), count)):
            rest_pipelines, rest_nodes, ahead = pipelines - count, nodes - count * size, capacity + count * limit
            if table[index, rest_pipelines, rest_nodes] + ahead >= wanted:
                for rest in fill(index - 1, rest_pipelines, rest_nodes, ahead):
                    yield (*rest, *[size] * count)

    running = sum(like.values())
    found = 0
    counts = range(shapes.min_pipelines, table.shape[1])
    for pipelines in sorted(counts, key=lambda count: (abs(count - running) if running else -count, count)):
        for combination in fill(len(sizes) - 1, pipelines, used, 0):
            yield combination
            found += 1
            if found == _MAX_TIED:
                return
