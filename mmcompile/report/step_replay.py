"""Simulation of a step of a plan: as planned, in another order, or with more microbatches.

One simulated rank stands for all ranks of a stage (its shards and replicas), as they do the same at the same time. Stages that
share ranks are one *group*, on one simulated rank. Microbatches are those of one replica of the last chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.errors import PlanError
from mmcompile.planner.plan.bottlenecks import RankGroup
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import BubbleShare, Stage
from mmcompile.planner.schedule.bubbles import attribute
from mmcompile.planner.schedule.schedule import ActionKind, Flow, FlowEdge, Schedule, build_schedule
from mmcompile.planner.schedule.simulate import Timeline, simulate

_SIGNS = {ActionKind.F: 1, ActionKind.I: 0, ActionKind.W: -1, ActionKind.B: -1}
"""Action kind -> 1 if it allocates a microbatch's activations, -1 if it frees them, 0 if neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes of one rank over the time of a step."""

    rank: int
    points: tuple[tuple[float, int], ...]
    """(seconds, bytes from then on) in order; the first point is at 0 s with the bytes held throughout."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes over the step."""
        return max(num_bytes for _, num_bytes in self.points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A simulated step: schedule, work and seconds of each microbatch, and derived totals."""

    plan: Plan = field(repr=False)
    kind: ScheduleKind
    schedule: Schedule = field(repr=False)
    """Schedule in which one simulated rank stands for all ranks of a group of stages that share ranks."""
    groups: tuple[RankGroup, ...]
    timeline: Timeline
    flows: tuple[Flow, ...] = field(repr=False)
    loads: Mapping[str, Sequence[float]] = field(repr=False)
    """Chain -> work of each microbatch relative to the plan's prediction."""
    durations: Mapping[str, Sequence[LayerTimes]] = field(repr=False)
    """Stage -> times [s] of each microbatch."""
    link_s: Mapping[tuple[str, str], float] = field(repr=False)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of one replica of the last chain."""
        return len(self.flows)

    @property
    def iteration_s(self) -> float:
        """Seconds of the step, including the plan's gradient reduction and optimizer step."""
        return self.timeline.makespan_s + self.plan.predicted.reduce_s

    @property
    def bubble(self) -> float:
        """Idle share of the time of all ranks, 0..1."""
        weights = [len(group.ranks) for group in self.groups]
        available = sum(weights) * self.timeline.makespan_s
        busy = sum(weight * busy_s for weight, busy_s in zip(weights, self.timeline.busy_s, strict=True))
        return 1.0 - busy / available if available else 0.0

    def idle(self, group: int) -> float:
        """Return the idle share, 0..1, of the time of the ranks of `groups[group]`."""
        makespan_s = self.timeline.makespan_s
        return 1.0 - self.timeline.busy_s[group] / makespan_s if makespan_s else 0.0

    def bubbles(self) -> tuple[BubbleShare, ...]:
        """Return the idle shares of each chain's ranks, by cause."""
        return attribute(
            _placed(self.plan, self.groups),
            self.flows,
            self.durations,
            self.link_s,
            chains={chain.name: [stage.name for stage in chain.stages] for chain in self.plan.chains},
            kind=self.kind,
        )

    def memory(self) -> tuple[MemoryCurve, ...]:
        """Return the bytes of one rank over the step for each entry of `groups`, the stages that share ranks."""
        saved = {
            stage.name: [round(load * stage.prediction.saved_bytes) for load in self.loads[chain.name]]
            for chain in self.plan.chains
            for stage in chain.stages
        }
        predictions = {stage.name: stage.prediction for stage in self.plan.stages}
        fixed = {name: own.fixed_bytes if own.in_flight else own.total_bytes for name, own in predictions.items()}
        return memory_curve(self.schedule, self.timeline, saved, fixed)


def replay(
    plan: Plan,
    *,
    schedule: ScheduleKind | None = None,
    num_microbatches: int | None = None,
    loads: Mapping[str, Sequence[float]] | None = None,
) -> Replay:
    """Simulate a step in which every microbatch passes through every stage.

    Args:
        schedule: order of each rank; the plan's by default.
        num_microbatches: microbatches of one replica of the last chain; the plan's by default.
        loads: chain -> work of each microbatch relative to the plan's prediction; durations and bytes saved for
            backward are taken to grow with it.

    Raises:
        PlanError: the plan has several stages and no links.
    """
    if not plan.links and len(plan.stages) > 1:
        raise PlanError(
            f"this plan has {len(plan.stages)} stages and no links between them, so nothing says what waits for what (a plan by "
            f"{plan.strategy} that runs layers in several stages has none); simulate another plan"
        )
    kind, count = schedule or plan.schedule, num_microbatches or plan.num_microbatches
    groups = stage_groups(plan)
    pairs = {(link.source, link.target): bool(link.gradient) for link in plan.links}
    flow = Flow(
        stages=tuple(stage.name for stage in plan.stages),
        edges=tuple(
            FlowEdge(source=source, target=target, gradient=gradient) for (source, target), gradient in pairs.items()
        ),
        backward=tuple(stage.name for stage in plan.stages if stage.has_backward),
    )
    flows = (flow,) * count
    work = {chain.name: (loads or {}).get(chain.name, [1.0] * count) for chain in plan.chains}
    durations = {
        stage.name: [stage.prediction.times * load for load in work[chain.name]]
        for chain in plan.chains
        for stage in chain.stages
    }
    link_s = _link_seconds(plan)
    order = build_schedule(_placed(plan, groups), flows, kind)
    return Replay(
        plan=plan,
        kind=kind,
        schedule=order,
        groups=groups,
        timeline=simulate(order, durations, link_s),
        flows=flows,
        loads=work,
        durations=durations,
        link_s=link_s,
    )


def _placed(plan: Plan, groups: Sequence[RankGroup]) -> list[Stage]:
    # One simulated rank stands for a group of ranks.
    number = {stage.name: index for index, group in enumerate(groups) for stage in group.stages}
    return [replace(stage, ranks=(number[stage.name],)) for stage in plan.stages]


def stage_groups(plan: Plan) -> tuple[RankGroup, ...]:
    """Return the stages as groups that share ranks, in order of each group's first stage."""
    groups: list[list[Stage]] = []
    for stage in plan.stages:
        ranks = set(stage.ranks)
        met = [group for group in groups if any(not ranks.isdisjoint(other.ranks) for other in group)]
        joined = [other for group in met for other in group] + [stage]
        groups = [group for group in groups if group not in met]
        groups.append(joined)
    order = {stage.name: index for index, stage in enumerate(plan.stages)}
    groups.sort(key=lambda group: order[group[0].name])
    return tuple(RankGroup(stages=tuple(group)) for group in groups)


def _link_seconds(plan: Plan) -> dict[tuple[str, str], float]:
    """Return (sending stage, receiving stage) -> seconds of a message, activations or gradient. Shards send in parallel."""
    seconds: dict[tuple[str, str], float] = {}
    widths = {stage.name: chain.tp * chain.cp for chain in plan.chains for stage in chain.stages}
    for link in plan.links:
        source, target = plan.stage(link.source), plan.stage(link.target)
        num_bytes = link.num_bytes // min(widths[link.source], widths[link.target])
        message_s = p2p_seconds(num_bytes, plan.cluster.between(source.ranks[0], target.ranks[0]))
        both = ((link.source, link.target), (link.target, link.source))
        seconds |= {pair: seconds.get(pair, 0.0) + message_s for pair in both}
    return seconds


def memory_curve(
    schedule: Schedule, timeline: Timeline, saved: Mapping[str, Sequence[int]], fixed_bytes: Mapping[str, int]
) -> tuple[MemoryCurve, ...]:
    """Return the bytes of each rank over a step, one curve per rank, in order.

    A forward allocates its activations when it starts. They are freed when the backward B of the same microbatch ends, or W
    where the backward is split. The forward of a stage that runs no backward for the microbatch keeps nothing. Parameters,
    gradients and optimizer state are there all the time. Messages in flight and the scratch memory of kernels are not counted.

    Args:
        timeline: timeline of the schedule, with recorded events.
        saved: stage name -> bytes kept for the backward of each microbatch.
        fixed_bytes: stage name -> bytes held throughout the step.
    """
    when = {(event.stage, event.kind, event.microbatch): (event.start_s, event.end_s) for event in timeline.events}
    names = schedule.stages
    backward = (ActionKind.B, ActionKind.I)
    returns = {(a.stage, a.microbatch) for actions in schedule.ranks for a in actions if a.kind in backward}
    curves: list[MemoryCurve] = []
    for rank, actions in enumerate(schedule.ranks):
        held = sum(fixed_bytes[names[stage]] for stage in {action.stage for action in actions})
        points = [(0.0, held)]
        for action in actions:
            name, microbatch = names[action.stage], action.microbatch
            if not action.kind.is_compute or (action.stage, microbatch) not in returns:
                continue
            change = saved[name][microbatch] * _SIGNS[action.kind]
            if change:
                held += change
                start_s, end_s = when[name, action.kind, microbatch]
                points.append((start_s if action.kind is ActionKind.F else end_s, held))
        curves.append(MemoryCurve(rank=rank, points=tuple(points)))
    return tuple(curves)
