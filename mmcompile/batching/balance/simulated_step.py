"""`simulate_step`: a step of an `Assignment`, event by event, with every microbatch as slow as its samples make it.

Costs of samples become seconds of stages by the share that each stage has of its component. What an encoder makes of a
microbatch goes to the first stage of the language model, to the replicas and microbatches that hold its samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment, SampleCosts
from mmcompile.batching.balance.auto import StepTime
from mmcompile.config import ScheduleKind
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.placement import PlacedStage, replica_name
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain
from mmcompile.planner.schedule.schedule import CrossEdge, Flow, FlowEdge, Unit, schedule_units
from mmcompile.planner.schedule.simulate import Timeline, simulate

_TOLERANCE = 1e-6
"""Largest accepted deviation from 1 of the sum of a component's stage shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShare:
    """Fractions of a component's cost that one of its stages has."""

    name: str
    forward: float
    input_grad: float
    weight_grad: float

    @property
    def backward(self) -> float:
        """Fraction of the component's cost in this stage's backward: input and weight gradients."""
        return self.input_grad + self.weight_grad


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Pipeline stages that a simulated step runs through. Every replica of every stage has a rank of its own."""

    stages: Mapping[str, tuple[StageShare, ...]]
    """Component -> its stages in order; the language model last. The shares of a component add up to 1."""
    schedule: ScheduleKind = "1f1b"
    link_s: float = 0.0
    """Seconds of a message from one rank to another."""

    def __post_init__(self) -> None:
        for component, shares in self.stages.items():
            parts = [part for share in shares for part in (share.forward, share.input_grad, share.weight_grad)]
            if min(parts, default=-1.0) < 0 or abs(sum(parts) - 1) > _TOLERANCE:
                raise ConfigError(
                    f"the shares of {component}'s {len(shares)} stages add up to {sum(parts):g}; wanted at least one stage, no "
                    "share below 0, and 1 in all"
                )
        if not self.stages or self.link_s < 0:
            raise ConfigError(
                f"{len(self.stages)} components and messages of {self.link_s} s; wanted a component, and 0 s or more"
            )

    @property
    def slowest(self) -> dict[str, float]:
        """Component -> fraction of its cost that is in its slowest stage."""
        return {
            component: max(share.forward + share.backward for share in shares)
            for component, shares in self.stages.items()
        }

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return a plan's step shape: its components are balance groups (stages that compute the same samples together).

        Every message takes the mean predicted time of all the plan's transfers between stages on different ranks.

        Raises:
            PlanError: stages of one balance group differ in replicas, or a balance group is predicted to take 0 s.
        """
        between = [
            p2p_seconds(link.num_bytes, plan.cluster.between(source, target))
            for link in plan.links
            for source, target in [(plan.stage(link.source).ranks[0], plan.stage(link.target).ranks[0])]
            if source != target
        ]
        return cls(
            stages={name: _shares(name, chains) for name, chains in towers(plan).items()},
            schedule=plan.schedule,
            link_s=sum(between) / len(between) if between else 0.0,
        )


def simulate_step(assignment: Assignment, costs: SampleCosts, shape: StepShape, *, record: bool = True) -> Timeline:
    """Simulate a step event by event, and return its timeline.

    Args:
        costs: seconds of each sample, forward and backward, in all stages of a component, on one replica.
        record: False leaves `Timeline.events` empty, which is faster.

    Returns:
        Timeline with a rank for each stage of each replica, component by component, replica by replica. Microbatches are numbered
        slot + lag * (microbatches of a replica): slot in run order, lag if the language model computes the samples in slot + lag.

    Raises:
        ConfigError: the shape has other components than the assignment.
        VerifyError: the assignment does not fit the costs (`Assignment.check`).
    """
    assignment.check(costs)
    parts = _parts(assignment)
    stages, units, edges = step_units(assignment, shape, parts)
    schedule = schedule_units(stages, units, edges, shape.schedule, num_slots=assignment.grid.num_microbatches)
    return simulate(schedule, _durations(assignment, costs, shape, parts), _links(shape, units, edges), record=record)


def step_time(shape: StepShape) -> StepTime:
    """Return a function for `Auto` that gives the seconds of a step by `simulate_step`."""

    def makespan_s(assignment: Assignment, costs: SampleCosts) -> float:
        return simulate_step(assignment, costs, shape, record=False).makespan_s

    return makespan_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Microbatches of one component in all replicas, each identified by the integer replica * `span` + number in the replica."""

    span: int
    of_sample: np.ndarray
    """Microbatch of each sample, as replica * `span` + number, int64 [samples]; -1 if the sample has no work in the component."""
    present: Sequence[int]
    """Microbatches that have samples, as replica * `span` + number, ascending."""


def _parts(assignment: Assignment) -> list[_Parts]:
    assignment.check_order()
    count = assignment.grid.num_microbatches
    last = assignment.microbatch[-1]
    lags = [np.where((row == ABSENT) | (last == ABSENT), 0, last - row) for row in assignment.microbatch]
    most = max((int(lag.max(initial=0)) for lag in lags), default=0)
    span = count * (most + 1)
    found: list[_Parts] = []
    for replica, row, lag in zip(assignment.replica, assignment.microbatch, lags, strict=True):
        unit = np.where(row == ABSENT, ABSENT, replica.astype(np.int64) * span + row + lag * count)
        found.append(_Parts(span=span, of_sample=unit, present=np.unique(unit[unit != ABSENT]).tolist()))
    return found


def step_units(
    assignment: Assignment, shape: StepShape, parts: Sequence[_Parts] | None = None
) -> tuple[tuple[PlacedStage, ...], tuple[Unit, ...], tuple[CrossEdge, ...]]:
    """Return the inputs of `schedule_units` for a step.

    A microbatch without samples has no unit. Samples of an encoder's microbatch that the language model computes `lag` slots
    later form a separate unit, numbered slot + lag * microbatches; its backward runs after the language model's.

    Args:
        parts: units of each component if already known; None to derive them.

    Returns:
        Stages, component by component, replica by replica (`vision.0#1` is in the second replica of several); units; and edges,
        one from each encoder unit to each language-model unit that shares a sample with it.

    Raises:
        ConfigError: the shape has other components than the assignment.
        VerifyError: the language model computes a sample before an encoder has.
    """
    parts = _parts(assignment) if parts is None else parts
    if tuple(shape.stages) != assignment.components:
        raise ConfigError(
            f"stages of {', '.join(shape.stages)} for an assignment to {', '.join(assignment.components)}; give the same, in the "
            "same order"
        )
    stages: list[PlacedStage] = []
    units: list[Unit] = []
    count = assignment.grid.num_microbatches
    trains = _backwards(shape)
    for component, num_replicas, own in zip(assignment.components, assignment.grid.num_replicas, parts, strict=True):
        after = 0 if component == assignment.components[-1] else len(shape.stages[assignment.components[-1]])
        flows: list[Flow] = []
        for replica in range(num_replicas):
            placed = list(_placed(component, shape, replica, num_replicas, after, len(stages)))
            flows.append(_flow([stage.name for stage in placed], trains[component]))
            stages.extend(placed)
        for unit in own.present:
            replica, number = divmod(unit, own.span)
            lag, slot = divmod(number, count)
            units.append(Unit(number=number, slot=slot, backward_slot=slot + lag, flow=flows[replica]))
    return tuple(stages), tuple(units), tuple(_edges(assignment, shape, parts, trains))


def _backwards(shape: StepShape) -> dict[str, list[bool]]:
    """Return component -> list with True for each stage that runs a backward: it, or a stage that feeds it, is trained."""
    found: dict[str, list[bool]] = {}
    for component, shares in shape.stages.items():
        is_last = len(found) + 1 == len(shape.stages)
        flows = is_last and any(trains[-1] for trains in found.values())
        own: list[bool] = []
        for share in shares:
            flows = flows or share.backward > 0
            own.append(flows)
        found[component] = own
    return found


def _placed(
    component: str, shape: StepShape, replica: int, num_replicas: int, after: int, first_rank: int
) -> Iterator[PlacedStage]:
    shares = shape.stages[component]
    for index, share in enumerate(shares):
        yield PlacedStage(
            name=_name(share, replica, num_replicas),
            ranks=(first_rank + index,),
            depth=len(shares) - 1 - index + after,
            program=share.name,
            tower=component,
            replica=replica,
        )


def _name(share: StageShare, replica: int, num_replicas: int) -> str:
    return replica_name(share.name, replica) if num_replicas > 1 else share.name


def _flow(names: Sequence[str], trains: Sequence[bool]) -> Flow:
    return Flow(
        stages=tuple(names),
        edges=tuple(
            FlowEdge(source=source, target=target, gradient=gradient)
            for (source, target), gradient in zip(pairwise(names), trains, strict=False)
        ),
        backward=tuple(name for name, gradient in zip(names, trains, strict=True) if gradient),
    )


def _edges(
    assignment: Assignment, shape: StepShape, parts: Sequence[_Parts], trains: Mapping[str, Sequence[bool]]
) -> Iterator[CrossEdge]:
    *encoders, last = assignment.components
    counts, end = assignment.grid.num_replicas, parts[-1]
    for component, count, own in zip(encoders, counts, parts, strict=False):
        both = (own.of_sample != ABSENT) & (end.of_sample != ABSENT)
        pairs = np.unique(np.stack([own.of_sample[both], end.of_sample[both]]), axis=1)
        for source, target in pairs.T.tolist():
            (source_replica, source_number), (target_replica, target_number) = (
                divmod(source, own.span),
                divmod(target, end.span),
            )
            yield CrossEdge(
                source=(_name(shape.stages[component][-1], source_replica, count), source_number),
                target=(_name(shape.stages[last][0], target_replica, counts[-1]), target_number),
                gradient=trains[component][-1],
            )


def _durations(
    assignment: Assignment, costs: SampleCosts, shape: StepShape, parts: Sequence[_Parts]
) -> dict[str, Mapping[int, LayerTimes]]:
    found: dict[str, Mapping[int, LayerTimes]] = {}
    for row, (component, own) in enumerate(zip(assignment.components, parts, strict=True)):
        num_replicas = assignment.grid.num_replicas[row]
        here = own.of_sample != ABSENT
        cost = np.bincount(own.of_sample[here], weights=costs.costs[row, here]).tolist()
        for share in shape.stages[component]:
            by_replica: list[dict[int, LayerTimes]] = [{} for _ in range(num_replicas)]
            for unit in own.present:
                replica, number = divmod(unit, own.span)
                by_replica[replica][number] = LayerTimes(
                    forward_s=cost[unit] * share.forward,
                    input_grad_s=cost[unit] * share.input_grad,
                    weight_grad_s=cost[unit] * share.weight_grad,
                )
            for replica, durations in enumerate(by_replica):
                found[_name(share, replica, num_replicas)] = durations
    return found


def _links(shape: StepShape, units: Sequence[Unit], edges: Sequence[CrossEdge]) -> dict[tuple[str, str], float]:
    if not shape.link_s:
        return {}
    pairs = {(edge.source, edge.target) for flow in {unit.flow for unit in units} for edge in flow.edges}
    pairs |= {(edge.source[0], edge.target[0]) for edge in edges}
    return {ends: shape.link_s for source, target in pairs for ends in ((source, target), (target, source))}


def _shares(name: str, chains: Sequence[Chain]) -> tuple[StageShare, ...]:
    stages = [stage for chain in chains for stage in chain.stages]
    total_s = sum(stage.prediction.times.total_s for stage in stages)
    if not total_s > 0:
        raise PlanError(f"the stages of {name} are predicted to take no time; make the plan anew with `mmcompile plan`")
    return tuple(
        StageShare(
            name=stage.name,
            forward=stage.prediction.forward_s / total_s,
            input_grad=stage.prediction.input_grad_s / total_s,
            weight_grad=stage.prediction.weight_grad_s / total_s,
        )
        for stage in stages
    )
