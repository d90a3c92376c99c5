"""Templates bound to nodes: the combination with the shortest step, then the assignment with most state in place.

Faster pipelines get more of a step's microbatches.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.composition import fastest
from mmcompile.planner.resilience.job import Job, Node
from mmcompile.planner.resilience.membership import MembershipPlan, NodePipeline, Spare, Stop
from mmcompile.planner.resilience.regroup import NodeGroups, RegroupRule
from mmcompile.planner.resilience.template import Template
from mmcompile.units import format_seconds


def instantiate(job: Job, nodes: Sequence[Node]) -> MembershipPlan[Node] | Stop:
    """Return the first pipelines of a run, on nodes that hold no state yet (Oobleck, §2.4.2); `Stop` for too few nodes.

    All combinations of templates that use every node are considered, with at least as many pipelines as fault tolerance needs.
    The one with the shortest step is chosen.
    """
    if len(nodes) < job.min_nodes:
        return too_few(job, len(nodes))
    found = recompose(job, nodes, {})
    reason = f"no combination of templates has a shorter step than {format_seconds(found.iteration_s)}"
    return planned(job, found.pipelines, found.spares, RegroupRule.START, reason=reason)


def recompose(
    job: Job, nodes: Sequence[Node], holdings: Mapping[Node, np.ndarray], running: Mapping[int, int] | None = None
) -> MembershipPlan[Node]:
    """Return the plan, without copies, with the shortest step on given nodes; among equals that with most bytes kept in place.

    Args:
        nodes: candidates, at least `job.min_nodes`.
        holdings: node -> layers that it holds, bool [layers].
        running: node count -> number of running pipelines; among equally fast combinations, similar ones are tried first.
    """
    found = fastest(job, len(nodes), running)
    best = max((bind(job, sizes, nodes, holdings) for sizes in found.sizes), key=lambda one: one.kept_bytes)
    return planned(
        job,
        with_microbatches(job, best.groups),
        tuple(Spare(node=node, reason=found.spare_reason) for node in best.spares),
        RegroupRule.RECOMPOSE,
        kept_bytes=best.kept_bytes,
    )


def bind(
    job: Job, sizes: Sequence[int], nodes: Sequence[Node], holdings: Mapping[Node, np.ndarray]
) -> NodeGroups[Node]:
    """Return pipelines with their nodes, such that as many bytes of layers as possible are already on their node (exact).

    Args:
        sizes: nodes of each pipeline; their sum is at most the number of nodes.
        holdings: node -> layers that it holds with their optimizer state, bool [layers]; an absent node holds none.
    """
    held = np.array([holdings.get(node, np.zeros(len(job.layers), dtype=bool)) for node in nodes], dtype=np.float64)
    needed = np.concatenate([job.needs(size) for size in sizes])
    kept = held @ (needed * job.bytes_of).T
    rows, places = linear_sum_assignment(kept, maximize=True)
    chosen = {int(place): nodes[row] for row, place in zip(rows, places, strict=True)}
    ends = np.cumsum(sizes).tolist()
    used = set(chosen.values())
    return NodeGroups(
        groups=tuple(
            tuple(chosen[place] for place in range(end - size, end)) for size, end in zip(sizes, ends, strict=True)
        ),
        spares=tuple(node for node in nodes if node not in used),
        kept_bytes=round(float(kept[rows, places].sum())),
    )


def planned(
    job: Job,
    pipelines: tuple[NodePipeline[Node], ...],
    spares: tuple[Spare[Node], ...],
    rule: RegroupRule,
    *,
    reason: str = "",
    kept_bytes: int = 0,
) -> MembershipPlan[Node]:
    """Return the `MembershipPlan` of the given pipelines, with the predicted seconds of its step and without copies."""
    return MembershipPlan(
        pipelines=pipelines,
        spares=spares,
        rule=rule,
        reason=reason,
        iteration_s=max(job.by_size[len(one.nodes)].iteration_s(one.num_microbatches) for one in pipelines),
        kept_bytes=kept_bytes,
    )


def with_microbatches(job: Job, groups: Sequence[Sequence[Node]]) -> tuple[NodePipeline[Node], ...]:
    """Return pipelines on given groups of nodes, with each pipeline's share of a step's microbatches."""
    counts = split([job.by_size[len(group)] for group in groups], job.num_microbatches)
    return tuple(
        NodePipeline(nodes=tuple(group), num_microbatches=count) for group, count in zip(groups, counts, strict=True)
    )


def split(templates: Sequence[Template], num_microbatches: int) -> tuple[int, ...]:
    """Return each template's number of microbatches, at least one, such that the slowest pipeline ends as early as possible.

    Minimises `max_i fill_i + b_i * w_i`, with b_i microbatches of w_i seconds, exactly: the next microbatch goes to the pipeline
    that would finish first. Oobleck's Eq. 2.6 minimises the spread of the pipelines' times instead, which is no shorter.

    Raises:
        PlanError: there are fewer microbatches than pipelines.
    """
    if not templates or num_microbatches < len(templates):
        raise PlanError(
            f"{num_microbatches} microbatches cannot be dealt to {len(templates)} pipelines, at least one to each; "
            f"the nearest number that can is {max(1, len(templates))}"
        )
    counts = [1] * len(templates)
    heap = [(template.iteration_s(2), index) for index, template in enumerate(templates)]
    heapq.heapify(heap)
    for _ in range(num_microbatches - len(templates)):
        _, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (templates[index].iteration_s(counts[index] + 1), index))
    return tuple(counts)


def held_by(job: Job, pipelines: Sequence[NodePipeline[Node]]) -> dict[Node, np.ndarray]:
    """Return node -> layers that it runs in one of the pipelines, bool [layers]; these are the least that it holds."""
    return {
        node: mask
        for pipeline in pipelines
        for node, mask in zip(pipeline.nodes, job.needs(len(pipeline.nodes)), strict=True)
    }


def too_few(job: Job, num_nodes: int) -> Stop:
    """Return the decision to stop because there are fewer nodes than fault tolerance needs."""
    return Stop(
        reason=(
            f"{num_nodes} nodes are left and {job.min_nodes} are needed: {job.min_pipelines} pipelines (fault tolerance "
            f"{job.fault_tolerance}) of at least {job.templates[0].num_nodes} nodes"
        )
    )
