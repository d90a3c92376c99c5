"""What a plan predicts for one step, event by event."""

from __future__ import annotations

from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.plan.plan import Plan
from mmcompile.plan.schedule import Flow, FlowEdge, build_schedule
from mmcompile.plan.simulate import StageDuration, Timeline, simulate


def predict(plan: Plan) -> Timeline:
    """Simulate one step of a plan in which every microbatch passes through every stage."""
    flow = Flow(
        stages=tuple(stage.name for stage in plan.stages),
        edges=tuple(
            FlowEdge(source=link.source, target=link.target, gradient=bool(link.gradient)) for link in plan.links
        ),
        backward=tuple(stage.name for stage in plan.stages if stage.has_backward),
    )
    durations = {
        stage.name: StageDuration(forward_s=stage.prediction.forward_s, backward_s=stage.prediction.backward_s)
        for stage in plan.stages
    }
    schedule = build_schedule(plan.stages, [flow] * plan.num_microbatches)
    return simulate(schedule, durations, _link_seconds(plan))


def _link_seconds(plan: Plan) -> dict[tuple[str, str], float]:
    ranks = {stage.name: stage.ranks[0] for stage in plan.stages}
    seconds: dict[tuple[str, str], float] = {}
    for link in plan.links:
        wire = plan.cluster.between(ranks[link.source], ranks[link.target])
        message_s = p2p_seconds(link.num_bytes, wire)
        # A gradient has the size of what it is the gradient of.
        seconds[link.source, link.target] = seconds[link.target, link.source] = message_s
    return seconds
