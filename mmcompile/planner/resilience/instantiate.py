"""Templates bound to nodes: the fastest combination, then the most state in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmcompile.planner.resilience.binding import Holdings, bind
from mmcompile.planner.resilience.composition import fastest
from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.microbatches import split
from mmcompile.planner.resilience.pipelines import Membership, Pipeline, Spare, Stop
from mmcompile.planner.resilience.regroup import Rule
from mmcompile.units import format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Pipelines with nodes and microbatches, before anything is copied."""

    pipelines: tuple[Pipeline, ...]
    spares: tuple[Spare, ...]
    kept_bytes: int
    """Of layers that their node holds already."""

    @property
    def iteration_s(self) -> float:
        return max(pipeline.iteration_s for pipeline in self.pipelines)


def instantiate(job: Job, nodes: Sequence[int]) -> Membership | Stop:
    """Start a run: pipelines on nodes that hold nothing yet (Oobleck, §2.4.2).

    All combinations of templates that use every node are considered, with at least as many pipelines as the promise needs; the
    one with the shortest step wins.

    Args:
        job: templates, batch and promise.
        nodes: that are there.
    """
    if len(nodes) < job.min_nodes:
        return too_few(job, len(nodes))
    bound = recompose(job, nodes, {})
    reason = f"no combination of templates has a shorter step than {format_seconds(bound.iteration_s)}"
    return Membership(
        pipelines=bound.pipelines, spares=bound.spares, copies=(), rule=Rule.START, reason=reason, kept_bytes=0
    )


def recompose(job: Job, nodes: Sequence[int], holdings: Holdings, running: Mapping[int, int] | None = None) -> Bound:
    """Any templates on any nodes: the shortest step, and among those the most bytes kept in place.

    Args:
        job: templates, batch and promise.
        nodes: that can be used, at least `job.min_nodes`.
        holdings: what they hold.
        running: pipelines that run now, by size; tried first among combinations that are equally fast.
    """
    found = fastest(job, len(nodes), running)
    bindings = ((sizes, bind(job, sizes, nodes, holdings)) for sizes in found.sizes)
    sizes, best = max(bindings, key=lambda one: one[1].kept_bytes)
    return Bound(
        pipelines=with_microbatches(job, sizes, best.pipelines),
        spares=tuple(Spare(node=node, reason=found.spare_reason) for node in best.spares),
        kept_bytes=best.kept_bytes,
    )


def with_microbatches(job: Job, sizes: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[Pipeline, ...]:
    """Pipelines of these sizes on these nodes, with their shares of a step."""
    templates = [job.by_size[size] for size in sizes]
    counts = split(templates, job.num_microbatches, job.objective)
    return tuple(
        Pipeline(template=template, nodes=tuple(group), num_microbatches=count)
        for template, group, count in zip(templates, groups, counts, strict=True)
    )


def held_by(job: Job, pipelines: Sequence[Pipeline]) -> dict[int, np.ndarray]:
    """Node -> layers it runs, bool [layers]; what it holds if nothing else is known."""
    return {
        node: mask
        for pipeline in pipelines
        for node, mask in zip(pipeline.nodes, job.needs(pipeline.template), strict=True)
    }


def sizes_of(pipelines: Sequence[Pipeline]) -> Counter[int]:
    """Pipelines by node count."""
    return Counter(len(pipeline.nodes) for pipeline in pipelines)


def too_few(job: Job, num_nodes: int) -> Stop:
    """Training stops: the promise cannot be kept."""
    return Stop(
        num_nodes=num_nodes,
        needed_nodes=job.min_nodes,
        reason=(
            f"{num_nodes} nodes are left and {job.min_nodes} are needed: {job.min_pipelines} pipelines (fault tolerance "
            f"{job.fault_tolerance}) of at least {job.templates[0].num_nodes} nodes"
        ),
    )
