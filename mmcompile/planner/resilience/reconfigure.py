"""The next pipelines after nodes were lost, leave, or join."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.copies import plan_copies
from mmcompile.planner.resilience.instantiate import bind, held_by, planned, recompose, too_few, with_microbatches
from mmcompile.planner.resilience.job import Job, Node
from mmcompile.planner.resilience.membership import MembershipPlan, NodePipeline, Spare, StateLost, Stop, layer_ranges
from mmcompile.planner.resilience.regroup import regroup
from mmcompile.units import format_bytes, format_seconds

_EQUAL = 1e-9
"""Relative difference below which two step times count as equal."""


def reconfigure(
    job: Job,
    pipelines: Sequence[NodePipeline[Node]],
    *,
    lost: Collection[Node] = (),
    draining: Collection[Node] = (),
    joined: Sequence[Node] = (),
    spares: Sequence[Node] = (),
    holdings: Mapping[Node, np.ndarray] | None = None,
) -> MembershipPlan[Node] | Stop | StateLost:
    """Return the next pipelines, with copies and spare nodes, after nodes were lost, leave, or join.

    Two plans are compared: that of Oobleck's rules (`regroup`), which change few pipelines, and the fastest combination of
    templates over all nodes. The plan with the shorter step is returned; of equal ones that with fewer idle nodes, then that
    with more bytes of state in place, then that of the rules. If nodes join, only the fastest combination is considered.

    Args:
        pipelines: pipelines that ran.
        lost: nodes whose state is gone.
        draining: nodes that leave and can still send what they hold.
        joined: nodes that hold no state: new ones, or lost ones that came back.
        spares: idle nodes.
        holdings: node -> layers whose state after the last committed step it holds, bool [layers], also of layers that it no
            longer runs; None: each node holds the layers that it ran.

    Returns:
        The plan; `Stop` if fewer nodes are left than fault tolerance needs; `StateLost` if a layer has no holder.

    Raises:
        PlanError: a node that joins is there already.
    """
    gone = {*lost, *draining}
    running = [node for pipeline in pipelines for node in pipeline.nodes]
    present = {*running, *spares} - set(lost)
    if twice := sorted({node for node in joined if node in present or joined.count(node) > 1}):
        raise PlanError(f"nodes {twice} join and are there already; a node that comes back must have been lost")
    nodes = [*(node for node in (*running, *spares) if node not in gone), *joined]
    known = held_by(job, pipelines) if holdings is None else holdings
    sources = {node: held for node, held in known.items() if node not in lost}
    missing = np.logical_and.reduce([~held for held in sources.values()] + [job.bytes_of > 0])
    if missing.any():
        return StateLost(layers=layer_ranges(job.layers[index] for index in np.flatnonzero(missing)))
    if len(nodes) < job.min_nodes:
        return too_few(job, len(nodes))
    free = recompose(job, nodes, sources, Counter(len(one.nodes) for one in pipelines))
    if joined:
        count = "a node joins" if len(joined) == 1 else f"{len(joined)} nodes join"
        return _with_copies(job, free, sources, f"{count}; {_figures(free)} is the shortest step")
    by_rules = _by_rules(job, pipelines, gone, spares, sources)
    if isinstance(by_rules, str):
        return _with_copies(job, free, sources, f"{by_rules}; recomposing gives {_figures(free)}")
    if reason := _advantage(free, by_rules):
        return _with_copies(job, free, sources, reason)
    reason = f"recomposing all nodes is no better: {_figures(free)}, here {_figures(by_rules)}"
    return _with_copies(job, by_rules, sources, reason)


def _by_rules(
    job: Job,
    pipelines: Sequence[NodePipeline[Node]],
    gone: Collection[Node],
    spares: Sequence[Node],
    sources: Mapping[Node, np.ndarray],
) -> MembershipPlan[Node] | str:
    """Return the plan that the published rules (`regroup`) give when the nodes `gone` leave; else the reason as text."""
    found = regroup([pipeline.nodes for pipeline in pipelines], gone, tuple(job.by_size), spares)
    if found is None:
        return "no pipeline has enough nodes left"
    count = len(found.groups)
    if not job.min_pipelines <= count <= job.num_microbatches:
        wanted = f"{job.min_pipelines} to {job.num_microbatches}"
        return f"{found.rule} gives {count} pipelines and {wanted} are wanted"
    bindings = [bind(job, (len(group),), group, sources) for group in found.groups]
    return planned(
        job,
        with_microbatches(job, [bound.groups[0] for bound in bindings]),
        tuple(Spare(node=node, reason="a step is no shorter with it") for node in found.spares),
        found.rule,
        kept_bytes=sum(bound.kept_bytes for bound in bindings),
    )


def _advantage(free: MembershipPlan[Node], by_rules: MembershipPlan[Node]) -> str:
    """Return the reason why plan `free`, found without the regrouping rules, is better than plan `by_rules`; "" if it is not."""
    ours, theirs, rule = free.iteration_s, by_rules.iteration_s, by_rules.rule
    if abs(ours - theirs) > _EQUAL * theirs:
        return f"a step takes {format_seconds(ours)}, after {rule} {format_seconds(theirs)}" if ours < theirs else ""
    if len(free.spares) != len(by_rules.spares):
        fewer = f"{len(free.spares)} nodes are idle, after {rule} {len(by_rules.spares)}"
        return fewer if len(free.spares) < len(by_rules.spares) else ""
    more = free.kept_bytes - by_rules.kept_bytes
    return f"a step is as short as after {rule}, and {format_bytes(more)} more stay in place" if more > 0 else ""


def _figures(plan: MembershipPlan[Node]) -> str:
    return f"{format_seconds(plan.iteration_s)} with {format_bytes(plan.kept_bytes)} kept in place"


def _with_copies(
    job: Job, plan: MembershipPlan[Node], sources: Mapping[Node, np.ndarray], reason: str
) -> MembershipPlan[Node]:
    return replace(plan, copies=plan_copies(job, held_by(job, plan.pipelines), sources), reason=reason)
