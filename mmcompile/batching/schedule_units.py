"""`units_of`: the microbatches of a step plan as units of the schedule; `action_lines`: the order of their actions by rank."""

from __future__ import annotations

from collections.abc import Sequence

from mmcompile.batching.step_plan import MicrobatchPlan, StepPlan
from mmcompile.codegen.program import PatternPrograms
from mmcompile.config import ScheduleKind
from mmcompile.errors import PlanError
from mmcompile.planner.plan.placement import PlacedStage, lockstep_of
from mmcompile.planner.schedule.schedule import CrossEdge, Flow, FlowEdge, Unit, schedule_units

_Replica = tuple[str, int]
"""(name of a balance group, which is a set of stages that compute the same samples together; index of a replica of it)."""


def flow_of(programs: PatternPrograms, stages: Sequence[str]) -> Flow:
    """Return the stages that a microbatch of the pattern runs, the edges between them, and the stages with a backward.

    Args:
        stages: program names of the stages of one balance group, in plan order. Edges to and from other stages are left out.
    """
    present = {name: programs.programs[name] for name in stages if name in programs.programs}
    gradient: dict[tuple[str, str], bool] = {}
    for program in present.values():
        for port in program.inputs:
            if port.kind == "link" and port.peers[0] in present:
                edge = (port.peers[0], program.stage)
                gradient[edge] = gradient.get(edge, False) or port.gradient
    return Flow(
        stages=tuple(present),
        edges=tuple(FlowEdge(source=a, target=b, gradient=value) for (a, b), value in gradient.items()),
        backward=tuple(name for name, program in present.items() if program.has_backward),
    )


def units_of(plan: StepPlan, stages: Sequence[PlacedStage]) -> tuple[tuple[Unit, ...], tuple[CrossEdge, ...]]:
    """Return a unit for each microbatch, in order, and an edge for each pair of stages that exchange values between units.

    Args:
        stages: placed stages of all replicas.

    Raises:
        PlanError: a microbatch or an exchange names a stage that its balance group and replica do not have.
    """
    names: dict[_Replica, dict[str, str]] = {}
    for stage in stages:
        names.setdefault((stage.tower, stage.replica), {})[stage.program_name] = stage.name
    flows: dict[tuple[_Replica, Flow], Flow] = {}
    for microbatch in plan.microbatches:
        if (key := (_replica(microbatch), microbatch.flow)) not in flows:
            flows[key] = _placed(microbatch, names.get(key[0], {}))
    units = tuple(
        Unit(
            number=microbatch.number,
            slot=microbatch.slot,
            backward_slot=microbatch.slot + microbatch.lag,
            flow=flows[_replica(microbatch), microbatch.flow],
        )
        for microbatch in plan.microbatches
    )
    return units, _edges(plan, names)


def num_slots(plan: StepPlan) -> int:
    """Return 1 + the largest slot of a forward or backward; slots number the microbatches of a replica in run order, from 0."""
    return 1 + max((microbatch.slot + microbatch.lag for microbatch in plan.microbatches), default=-1)


def action_lines(
    stages: Sequence[PlacedStage], kind: ScheduleKind, units: Sequence[Unit], edges: Sequence[CrossEdge], slots: int
) -> tuple[str, ...]:
    """Return `StepPlan.actions`: the actions of each rank in a step, as text. Raises PlanError if they cannot be scheduled.

    Args:
        stages: placed stages of all replicas.
        units, edges: result of `units_of`.
        slots: result of `num_slots`.
    """
    return schedule_units(stages, units, edges, kind, num_slots=slots, together=lockstep_of(stages)).lines


def _edges(plan: StepPlan, names: dict[_Replica, dict[str, str]]) -> tuple[CrossEdge, ...]:
    gradient: dict[tuple[tuple[str, int], tuple[str, int]], bool] = {}
    for exchange in plan.exchanges:
        source, target = plan.microbatches[exchange.source], plan.microbatches[exchange.target]
        ends = (
            (_name(exchange.producer, source, names[_replica(source)]), source.number),
            (_name(exchange.consumer, target, names[_replica(target)]), target.number),
        )
        gradient[ends] = gradient.get(ends, False) or exchange.gradient
    return tuple(
        CrossEdge(source=source, target=target, gradient=value) for (source, target), value in gradient.items()
    )


def _replica(microbatch: MicrobatchPlan) -> _Replica:
    return microbatch.tower, microbatch.replica


def _placed(microbatch: MicrobatchPlan, names: dict[str, str]) -> Flow:
    flow = microbatch.flow

    def renamed(*stages: str) -> tuple[str, ...]:
        return tuple(_name(stage, microbatch, names) for stage in stages)

    edges = ((*renamed(edge.source, edge.target), edge.gradient) for edge in flow.edges)
    return Flow(
        stages=renamed(*flow.stages),
        edges=tuple(FlowEdge(source=source, target=target, gradient=gradient) for source, target, gradient in edges),
        backward=renamed(*flow.backward),
    )


def _name(stage: str, microbatch: MicrobatchPlan, names: dict[str, str]) -> str:
    if stage not in names:
        raise PlanError(
            f"microbatch {microbatch.index} names stage {stage}; replica {microbatch.replica} of tower "
            f"{microbatch.tower!r} has {', '.join(names) or 'none'}"
        )
    return names[stage]
