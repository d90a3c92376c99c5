"""`attribute`: idle time of the ranks of each chain by cause, found by removing the causes one after another.

The step is simulated as it is, and then again

    1. with links that take no time,
    2. and with equal microbatches: each runs in every stage in which any runs, for its mean time,
    3. and with equal stages: every rank has the mean work of all ranks.

What is idle after 3 is the warm-up: filling and draining, (S - 1) / (M + S - 1) of the time for S stages and M microbatches. What
each change takes away is the share of its cause: links, microbatches, stages. The work of all ranks together stays the same.

Where a change would add idle time (the slowest chain is *less* idle than it would be among equals), its cause has no share, and
the next change is compared with the idle time before it. So no share is negative, and the shares of a chain add up to its bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.plan.plan_record import BubbleShare
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, Placed, build_schedule
from mmcompile.planner.schedule.simulate import Durations, Timeline, simulate

_NOTHING = LayerTimes(forward_s=0.0, input_grad_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Inputs of one simulation of a step: stages, the path of each microbatch through them (`flows`), durations, schedule."""

    stages: Sequence[Placed]
    flows: Sequence[Flow]
    durations: Durations
    kind: ScheduleKind


def attribute(
    stages: Sequence[Placed],
    flows: Sequence[Flow],
    durations: Durations,
    link_s: Mapping[tuple[str, str], float] | None = None,
    *,
    chains: Mapping[str, Sequence[str]],
    kind: ScheduleKind = "1f1b",
) -> tuple[BubbleShare, ...]:
    """Return the idle share of the ranks of each chain, by cause: warm-up, unequal stages, unequal microbatches, messages.

    Args:
        stages: all stages, each on one rank.
        flows: stages that each microbatch passes, and the edges between them.
        durations: stage name -> seconds of forward and backward, for all microbatches or for each.
        link_s: (sending stage, receiving stage) -> seconds of a message; 0 if absent.
        chains: chain name -> names of its stages. Ranks that run stages of several chains count in each.

    Returns:
        One entry for each chain, in the order of `chains`; all zero for a step that takes no time.
    """
    case = Case(stages=stages, flows=flows, durations=durations, kind=kind)
    steady = equal_microbatches(case)
    actual = _simulated(case, link_s or {})
    ladder = [actual, _simulated(case, {}), _simulated(steady, {}), _simulated(equal_stages(steady), {})]
    rank = {stage.name: stage.ranks[0] for stage in stages}
    return tuple(
        _share(chain, sorted({rank[name] for name in names}), ladder, actual.makespan_s)
        for chain, names in chains.items()
    )


def _simulated(case: Case, link_s: Mapping[tuple[str, str], float]) -> Timeline:
    schedule = build_schedule(case.stages, case.flows, case.kind)
    return simulate(schedule, case.durations, link_s, record=False)


def _share(chain: str, ranks: Sequence[int], ladder: Sequence[Timeline], makespan_s: float) -> BubbleShare:
    if not makespan_s or not ranks:
        return BubbleShare(chain=chain, warm_up=0.0, stages=0.0, microbatches=0.0, links=0.0)
    left: list[float] = []
    for step in ladder:
        share = sum(step.makespan_s - step.busy_s[rank] for rank in ranks) / (len(ranks) * makespan_s)
        left.append(max(0.0, min([share, *left[-1:]])))
    links, microbatches, stages = (before - after for before, after in pairwise(left))
    return BubbleShare(chain=chain, warm_up=left[-1], stages=stages, microbatches=microbatches, links=links)


def equal_microbatches(case: Case) -> Case:
    """Return the case in which every microbatch runs in all stages that any microbatch runs in, for the stage's mean time."""
    if not case.flows:
        return case
    flow = _union(case.stages, case.flows)
    durations = {stage.name: _mean(stage.name, case) for stage in case.stages}
    return replace(case, flows=[flow] * len(case.flows), durations=durations)


def equal_stages(case: Case) -> Case:
    """Return the case in which every rank computes for the mean seconds of all ranks, with the mean share of backward.

    Microbatches must be equal already, as from `equal_microbatches`. Ranks without backward keep having none. Stages on the same
    rank divide its seconds in proportion to their former ones. Ranks without work count in the mean, and get forwards.
    """
    if not case.flows:
        return case
    durations = {name: duration for name, duration in case.durations.items() if isinstance(duration, LayerTimes)}
    groups: dict[int, list[str]] = {}
    for stage in case.stages:
        groups.setdefault(stage.ranks[0], []).append(stage.name)
    totals = {rank: _sum(durations[name] for name in names) for rank, names in groups.items()}
    mean_s = _sum(totals.values()).total_s / max(1, len(totals))
    profiles = {
        trains: _sum(total for total in totals.values() if (total.backward_s > 0) == trains) for trains in (True, False)
    }
    equal: dict[str, LayerTimes] = {}
    for rank, names in groups.items():
        profile = profiles[totals[rank].backward_s > 0]
        factor = mean_s / profile.total_s if profile.total_s else 0.0
        # Ranks without any work get forwards.
        wanted = _scaled(profile, factor, factor) if factor else replace(_NOTHING, forward_s=mean_s)
        for name in names:
            equal[name] = _part(wanted, durations[name], totals[rank], len(names))
    everyone = tuple(stage.name for stage in case.stages)
    flows = [replace(flow, stages=everyone) for flow in case.flows[:1]] * len(case.flows)
    return replace(case, flows=flows, durations=equal)


def _part(wanted: LayerTimes, own: LayerTimes, total: LayerTimes, count: int) -> LayerTimes:
    # In proportion to the stage's part of the old seconds; without forwards, stages of the rank get equal parts.
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


def _mean(name: str, case: Case) -> LayerTimes:
    """Return the mean seconds of a stage over all microbatches; one that does not run in the stage counts as 0 s."""
    given = case.durations[name]
    parts: list[LayerTimes] = []
    for microbatch, flow in enumerate(case.flows):
        duration = given if isinstance(given, LayerTimes) else given[microbatch]
        parts.append(_scaled(duration, float(name in flow.stages), float(name in flow.backward)))
    return _scaled(_sum(parts), 1 / len(parts), 1 / len(parts))


def _scaled(duration: LayerTimes, forward: float, backward: float) -> LayerTimes:
    return LayerTimes(
        forward_s=duration.forward_s * forward,
        input_grad_s=duration.input_grad_s * backward,
        weight_grad_s=duration.weight_grad_s * backward,
    )


def _sum(durations: Iterable[LayerTimes]) -> LayerTimes:
    items = list(durations)
    return LayerTimes(
        forward_s=sum(item.forward_s for item in items),
        input_grad_s=sum(item.input_grad_s for item in items),
        weight_grad_s=sum(item.weight_grad_s for item in items),
    )
