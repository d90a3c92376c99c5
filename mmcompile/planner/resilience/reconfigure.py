"""The next pipelines after nodes were lost, leave, or join."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.binding import Holdings, bind
from mmcompile.planner.resilience.copies import plan_copies
from mmcompile.planner.resilience.instantiate import Bound, held_by, recompose, sizes_of, too_few, with_microbatches
from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.pipelines import Membership, Pipeline, Spare, StateLost, Stop
from mmcompile.planner.resilience.regroup import Rule, regroup
from mmcompile.units import format_bytes, format_seconds

_ALIKE = 1e-9
"""Relative difference of times that are the same."""


def reconfigure(
    job: Job,
    pipelines: Sequence[Pipeline],
    *,
    lost: Collection[int] = (),
    draining: Collection[int] = (),
    joined: Sequence[int] = (),
    spares: Sequence[int] = (),
    holdings: Mapping[int, np.ndarray] | None = None,
) -> Membership | Stop | StateLost:
    """Decide what runs next.

    Two candidates: the published rules (`regroup`), which touch few pipelines, and a recomposition of all nodes. The shorter step
    wins, then fewer idle nodes, then more state in place, then the rules. Nodes that join are placed by recomposition.

    Args:
        job: templates, batch and promise.
        pipelines: that ran.
        lost: nodes that are gone.
        draining: nodes that leave and can still send what they hold.
        joined: new nodes.
        spares: idle nodes.
        holdings: node -> layers it holds at the agreed step, bool [layers], former owners included; by default what each
            node's pipeline gave it.

    Returns:
        The next pipelines with copies and spare nodes; `Stop` where fewer nodes are left than keep the promise; `StateLost`
        where some layer has no holder.

    Raises:
        PlanError: a node that joins is there already.
    """
    gone = {*lost, *draining}
    running = [node for pipeline in pipelines for node in pipeline.nodes]
    _check(joined, [*running, *spares])
    nodes = [node for node in (*running, *spares, *joined) if node not in gone]
    known = held_by(job, pipelines) if holdings is None else holdings
    sources = {node: held for node, held in known.items() if node not in lost}
    if missing := _missing(job, sources):
        return StateLost(layers=tuple(job.layers[index] for index in missing))
    if len(nodes) < job.min_nodes:
        return too_few(job, len(nodes))
    free = recompose(job, nodes, sources, sizes_of(pipelines))
    if joined:
        count = "a node joins" if len(joined) == 1 else f"{len(joined)} nodes join"
        return _membership(job, free, sources, Rule.RECOMPOSE, f"{count}; {_figures(free)} is the shortest step")
    by_rules, rule = _by_rules(job, pipelines, gone, spares, sources)
    if isinstance(by_rules, str):
        return _membership(job, free, sources, Rule.RECOMPOSE, f"{by_rules}; recomposing gives {_figures(free)}")
    reason = _advantage(free, by_rules, rule)
    if reason:
        return _membership(job, free, sources, Rule.RECOMPOSE, reason)
    reason = f"recomposing all nodes is no better: {_figures(free)}, here {_figures(by_rules)}"
    return _membership(job, by_rules, sources, rule, reason)


def _check(joined: Sequence[int], present: Sequence[int]) -> None:
    twice = sorted(set(joined) & set(present)) or sorted({node for node in joined if joined.count(node) > 1})
    if twice:
        raise PlanError(f"nodes {twice} join and are there already; a node that comes back needs a new number")


def _missing(job: Job, sources: Holdings) -> list[int]:
    held = np.zeros(len(job.layers), dtype=bool)
    for one in sources.values():
        held |= one
    return np.flatnonzero(~held & (job.bytes_of > 0)).tolist()


def _by_rules(
    job: Job, pipelines: Sequence[Pipeline], gone: Collection[int], spares: Sequence[int], sources: Holdings
) -> tuple[Bound | str, Rule]:
    """What the published rules give, each group keeping as much in place as it can; or why that is no answer."""
    found = regroup([pipeline.nodes for pipeline in pipelines], gone, tuple(job.by_size), spares)
    if found is None:
        return "no pipeline has enough nodes left", Rule.MERGE
    count = len(found.groups)
    if not job.min_pipelines <= count <= job.num_microbatches:
        wanted = f"{job.min_pipelines} to {job.num_microbatches}"
        return f"{found.rule} gives {count} pipelines and {wanted} are wanted", found.rule
    sizes = [len(group) for group in found.groups]
    bindings = [bind(job, (len(group),), group, sources) for group in found.groups]
    bound = Bound(
        pipelines=with_microbatches(job, sizes, [binding.pipelines[0] for binding in bindings]),
        spares=tuple(Spare(node=node, reason="a step is no shorter with it") for node in found.spares),
        kept_bytes=sum(binding.kept_bytes for binding in bindings),
    )
    return bound, found.rule


def _advantage(free: Bound, by_rules: Bound, rule: Rule) -> str:
    """Why to recompose; "" where the rules are as good."""
    ours, theirs = free.iteration_s, by_rules.iteration_s
    if abs(ours - theirs) > _ALIKE * theirs:
        return f"a step takes {format_seconds(ours)}, after {rule} {format_seconds(theirs)}" if ours < theirs else ""
    if len(free.spares) != len(by_rules.spares):
        fewer = f"{len(free.spares)} nodes are idle, after {rule} {len(by_rules.spares)}"
        return fewer if len(free.spares) < len(by_rules.spares) else ""
    more = free.kept_bytes - by_rules.kept_bytes
    return f"a step is as short as after {rule}, and {format_bytes(more)} more stay in place" if more > 0 else ""


def _figures(bound: Bound) -> str:
    return f"{format_seconds(bound.iteration_s)} with {format_bytes(bound.kept_bytes)} kept in place"


def _membership(job: Job, bound: Bound, sources: Holdings, rule: Rule, reason: str) -> Membership:
    return Membership(
        pipelines=bound.pipelines,
        spares=bound.spares,
        copies=plan_copies(job, held_by(job, bound.pipelines), sources),
        rule=rule,
        reason=reason,
        kept_bytes=bound.kept_bytes,
    )
