"""The same work, spread evenly: over microbatches, or over ranks. What bubbles are measured against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mmcompile.config import ScheduleKind
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, Placed
from mmcompile.planner.schedule.simulate import Durations, StageDuration

_NOTHING = StageDuration(forward_s=0.0, input_grad_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step to be scheduled and simulated."""

    stages: Sequence[Placed]
    flows: Sequence[Flow]
    durations: Durations
    kind: ScheduleKind


def equal_microbatches(case: Case) -> Case:
    """Every microbatch takes part in all that any does, for the mean time over all microbatches."""
    if not case.flows:
        return case
    flow = _union(case.stages, case.flows)
    durations = {stage.name: _mean(stage.name, case) for stage in case.stages}
    return replace(case, flows=[flow] * len(case.flows), durations=durations)


def equal_stages(case: Case) -> Case:
    """Every rank has the mean seconds of all ranks, as forwards and backwards in the mean proportion of its kind.

    Ranks that only run forwards stay so, they have a mean of their own. Stages of one rank share in proportion to what
    they have. Stages that no microbatch passes through take part as well, beside the others.

    Args:
        case: with equal microbatches.
    """
    if not case.flows:
        return case
    durations = {name: duration for name, duration in case.durations.items() if isinstance(duration, StageDuration)}
    groups: dict[int, list[str]] = {}
    for stage in case.stages:
        groups.setdefault(stage.ranks[0], []).append(stage.name)
    totals = {rank: _sum(durations[name] for name in names) for rank, names in groups.items()}
    mean_s = _total_s(_sum(totals.values())) / max(1, len(totals))
    profiles = {
        trains: _sum(total for total in totals.values() if (total.backward_s > 0) == trains) for trains in (True, False)
    }
    equal: dict[str, StageDuration] = {}
    for rank, names in groups.items():
        profile = profiles[totals[rank].backward_s > 0]
        factor = mean_s / _total_s(profile) if _total_s(profile) else 0.0
        # Ranks without any work get forwards.
        wanted = _scaled(profile, factor, factor) if factor else replace(_NOTHING, forward_s=mean_s)
        for name in names:
            equal[name] = _part(wanted, durations[name], totals[rank], len(names))
    everyone = tuple(stage.name for stage in case.stages)
    flows = [replace(flow, stages=everyone) for flow in case.flows[:1]] * len(case.flows)
    return replace(case, flows=flows, durations=equal)


def _part(wanted: StageDuration, own: StageDuration, total: StageDuration, count: int) -> StageDuration:
    """What one of a rank's stages gets of what the rank should have."""
    forward = own.forward_s / total.forward_s if total.forward_s else 1 / count
    backward = own.backward_s / total.backward_s if total.backward_s else 0.0
    return _scaled(wanted, forward, backward)


def _union(stages: Sequence[Placed], flows: Sequence[Flow]) -> Flow:
    present = {name for flow in flows for name in flow.stages}
    backward = {name for flow in flows for name in flow.backward}
    gradient: dict[tuple[str, str], bool] = {}
    for flow in dict.fromkeys(flows):
        for edge in flow.edges:
            pair = (edge.source, edge.target)
            gradient[pair] = gradient.get(pair, False) or edge.gradient
    return Flow(
        stages=tuple(stage.name for stage in stages if stage.name in present),
        edges=tuple(
            FlowEdge(source=source, target=target, gradient=found) for (source, target), found in gradient.items()
        ),
        backward=tuple(stage.name for stage in stages if stage.name in backward),
    )


def _mean(name: str, case: Case) -> StageDuration:
    """What a stage really runs in all microbatches, over their number."""
    given = case.durations[name]
    parts: list[StageDuration] = []
    for microbatch, flow in enumerate(case.flows):
        duration = given if isinstance(given, StageDuration) else given[microbatch]
        parts.append(_scaled(duration, float(name in flow.stages), float(name in flow.backward)))
    return _scaled(_sum(parts), 1 / len(parts), 1 / len(parts))


def _scaled(duration: StageDuration, forward: float, backward: float) -> StageDuration:
    return StageDuration(
        forward_s=duration.forward_s * forward,
        input_grad_s=duration.input_grad_s * backward,
        weight_grad_s=duration.weight_grad_s * backward,
    )


def _sum(durations: Iterable[StageDuration]) -> StageDuration:
    items = list(durations)
    return StageDuration(
        forward_s=sum(item.forward_s for item in items),
        input_grad_s=sum(item.input_grad_s for item in items),
        weight_grad_s=sum(item.weight_grad_s for item in items),
    )


def _total_s(duration: StageDuration) -> float:
    return duration.forward_s + duration.backward_s
