"""Predicted events of one step of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.planner.plan.placement import Placement, shard_names
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, build_schedule
from mmcompile.planner.schedule.simulate import Timeline, simulate


def predict(plan: Plan) -> Timeline:
    """Simulate one step of a plan in which every microbatch passes through every stage, and return its timeline.

    All replicas of a chain take the same time, so only one is simulated, under its program name.
    """
    first = [stage for stage in Placement.of(plan).stages if stage.replica == 0]
    placed = [replace(stage, name=stage.program_name) for stage in first]
    shards = {name: stage for chain in plan.chains for stage in chain.stages for name in shard_names(stage, chain.dp)}
    edges = {(source, target): link for link in plan.links for source, target in _ends(plan, link)}
    flow = Flow(
        stages=tuple(shards),
        edges=tuple(
            FlowEdge(source=source, target=target, gradient=bool(link.gradient))
            for (source, target), link in edges.items()
        ),
        backward=tuple(name for name, stage in shards.items() if stage.has_backward),
    )
    durations = {name: stage.prediction.times for name, stage in shards.items()}
    rank = {stage.name: stage.ranks[0] for stage in placed}
    seconds: dict[tuple[str, str], float] = {}
    for (source, target), link in edges.items():
        message_s = p2p_seconds(link.num_bytes, plan.cluster.between(rank[source], rank[target]))
        # A gradient has the size of what it is the gradient of.
        seconds[source, target] = seconds[target, source] = message_s
    order = build_schedule(placed, [flow] * plan.num_microbatches, plan.schedule)
    return simulate(order, durations, seconds)


def _ends(plan: Plan, link: Link) -> Iterable[tuple[str, str]]:
    """Return (source, target) names of the shards that a link connects: one to one if equally many, else each with each."""
    replicas = {stage.name: chain.dp for chain in plan.chains for stage in chain.stages}
    sources, targets = (shard_names(plan.stage(name), replicas[name]) for name in (link.source, link.target))
    return zip(sources, targets, strict=True) if len(sources) == len(targets) else product(sources, targets)
