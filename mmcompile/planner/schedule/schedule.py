"""`Schedule`: for each rank an ordered list of actions; `build_schedule` makes it for any DAG of stages.

The order of computations is `mmcompile.planner.schedule.order`'s. An edge inside a rank has no SEND or RECV. Sends never block
and stand right after the computation that made the value. Receives block and stand right before the computation that needs the
value, or before an earlier one that needs a message sent later. So two stages have their messages in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mmcompile.config import ScheduleKind
from mmcompile.errors import PlanError
from mmcompile.planner.schedule.order import Key, MessageOrder, OrderKeys, Side, crossings, in_order_of_sends


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEdge:
    """Tensors of one microbatch sent from a stage to a later one; `gradient` is True if a gradient is sent back."""

    source: str
    target: str
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Work of one microbatch: names of its stages, the edges between them, and the names of the stages that run a backward."""

    stages: tuple[str, ...]
    edges: tuple[FlowEdge, ...]
    backward: tuple[str, ...]


class ActionKind(StrEnum):
    """Kind of an action of a rank. F, B, I and W compute; the others move the tensors of one edge of one microbatch."""

    F = "F"
    B = "B"
    """Whole backward of a microbatch in a stage: I and W in one action."""
    I = "I"  # noqa: E741 (the letter is the field's)
    """Part of a backward that computes gradients of the stage's inputs, for which earlier stages wait."""
    W = "W"
    """Part of a backward that computes gradients of the weights, run after I."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W."""
        return self in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)

    @property
    def is_send(self) -> bool:
        """True for actions that send a tensor or gradient."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_receive(self) -> bool:
        """True for actions that receive a tensor or gradient."""
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Work of one microbatch in a subset of the stages, and its places among the forwards and the backwards of a step."""

    number: int
    """Index by which the actions of a schedule name this unit; unique among units that share a stage."""
    slot: int
    """Place of the forward among the microbatches of a step, from 0."""
    backward_slot: int
    """Place of the backward among the microbatches of a step; later than `slot` if the microbatch's samples are deferred."""
    flow: Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossEdge:
    """Tensors sent from a stage of one `Unit` (a microbatch's work in some of the stages) to a stage of another unit.

    The receiving unit's forward slot must not be earlier than the sending one's, and its backward slot must not be later.
    """

    source: tuple[str, int]
    """(name of the sending stage, `Unit.number` of the microbatch's work that makes the tensors)."""
    target: tuple[str, int]
    gradient: bool


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:([<>])(\d+)(?:\.(\d+))?)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Action of a rank. Its text is stage, kind, microbatch as in torch's schedules, then `>` or `<` and the peer stage.

    `2F0`, `2B0`, `2I0`, `2W0`, `1SEND_F3>2` (stage 1 sends microbatch 3 to stage 2), `2RECV_F3<1`, `2SEND_B3>1`, `1RECV_B3<2`.
    If the peer computes the same samples in another microbatch, its number follows: `1SEND_F3>2.5`, `2RECV_F5<1.3`.
    """

    stage: int
    """Index of the stage in `Schedule.stages`."""
    kind: ActionKind
    microbatch: int
    peer: int | None = None
    """Index of the other stage of a send or receive; None for F, B, I and W."""
    peer_microbatch: int | None = None
    """Microbatch number of the message in the peer stage if it differs from `microbatch`, else None."""

    @property
    def other(self) -> int:
        """Microbatch number in the peer stage of a send or receive."""
        return self.microbatch if self.peer_microbatch is None else self.peer_microbatch

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.peer is None:
            return text
        end = "" if self.peer_microbatch is None else f".{self.peer_microbatch}"
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}{end}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text describes, the inverse of `str`. Other text raises PlanError with the valid forms."""
        match = _ACTION.fullmatch(text.strip())
        if match is not None:
            stage, kind, microbatch, arrow, peer, other = match.groups()
            expected = ">" if ActionKind(kind).is_send else "<" if ActionKind(kind).is_receive else None
            if arrow == expected:
                return cls(
                    stage=int(stage),
                    kind=ActionKind(kind),
                    microbatch=int(microbatch),
                    peer=None if peer is None else int(peer),
                    peer_microbatch=None if other is None else int(other),
                )
        raise PlanError(
            f"{text!r} is not an action; write 2F0, 2B0, 2I0, 2W0, 1SEND_F3>2, 2RECV_F3<1, 2SEND_B3>1 or 1RECV_B3<2"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Ordered actions of every rank in one step. `str` prints one line for each rank, `parse` reads the text back."""

    stages: tuple[str, ...]
    """Stage names; an action's stage is an index into them."""
    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        lines = (f"rank {rank}: {line}" for rank, line in enumerate(self.lines))
        return "\n".join(line.rstrip() for line in (f"stages: {' '.join(self.stages)}", *lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """Actions of each rank as text, separated by spaces; `parse_actions` reads one line back."""
        return tuple(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the schedule that a text describes, the inverse of `str`. Raises PlanError that names an invalid line."""
        head, *lines = text.strip().splitlines()
        if not head.startswith("stages:"):
            raise PlanError(f"a schedule begins with 'stages: NAME ...', got {head!r}")
        ranks: list[tuple[Action, ...]] = []
        for line in lines:
            label, _, actions = line.partition(":")
            if label != f"rank {len(ranks)}":
                raise PlanError(f"expected a line 'rank {len(ranks)}: ...', got {line!r}")
            ranks.append(parse_actions(actions))
        return cls(stages=tuple(head.removeprefix("stages:").split()), ranks=tuple(ranks))


def parse_actions(line: str) -> tuple[Action, ...]:
    """Return the actions in one line of `Schedule.lines`. Raises PlanError that names an invalid word."""
    return tuple(Action.parse(word) for word in line.split())


class Placed(Protocol):
    """Protocol of a stage that can be scheduled; `mmcompile.planner.plan.plan.Stage` implements it."""

    @property
    def name(self) -> str:
        """Name of the stage, unique in a schedule."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that run the stage."""
        ...

    @property
    def depth(self) -> int:
        """Number of stages on the longest path to the loss stage."""
        ...


def in_flight(kind: ScheduleKind, depth: int, num_microbatches: int) -> int:
    """Return the number of microbatches whose activations a stage with a backward holds at its peak.

    `depth` is the number of stages on the longest path to the loss stage.
    """
    match kind:
        case "gpipe":
            return num_microbatches
        case "1f1b" | "zb-h1":
            return min(depth + 1, num_microbatches)
        case "eager-1f1b":
            return min(2 * depth + 1, num_microbatches)


def build_schedule(stages: Sequence[Placed], flows: Sequence[Flow], kind: ScheduleKind = "1f1b") -> Schedule:
    """Return the schedule of one step over the DAG of stages; it cannot deadlock (see `mmcompile.planner.schedule.order`).

    Args:
        stages: all stages of the plan, each on one rank.
        flows: one flow for each microbatch, in order. A stage absent from a flow does nothing for that microbatch.
        kind: rule that orders forwards and backwards. `zb-h1` runs each backward as I and W, the others as B.

    Raises:
        PlanError: a flow names an unknown stage, an edge does not lead towards the loss, or a stage has several ranks.
    """
    units = [Unit(number=m, slot=m, backward_slot=m, flow=flow) for m, flow in enumerate(flows)]
    return schedule_units(stages, units, (), kind, num_slots=len(flows))


def schedule_units(
    stages: Sequence[Placed],
    units: Sequence[Unit],
    edges: Sequence[CrossEdge],
    kind: ScheduleKind = "1f1b",
    *,
    num_slots: int,
    together: Sequence[Sequence[int]] = (),
) -> Schedule:
    """Return the schedule of a step in which samples may change microbatch between stages.

    `build_schedule` is the case without `edges`. The schedule cannot deadlock, and both sides of a pair of stages have their
    messages in the same order. A receive stands right before the computation that needs its message, or before an earlier
    computation that needs a message sent later.

    Args:
        stages: all stages of the plan, those of every replica, each on one rank.
        units: work of each microbatch in a subset of the stages.
        edges: tensors sent between stages of different units.
        kind: rule that orders forwards and backwards.
        num_slots: number of microbatches of each replica.
        together: groups of stage indices that exchange values while they compute: their ranks run them in the same order.

    Raises:
        PlanError: as `build_schedule`; or an edge names a stage that its unit has not, leads to an earlier slot, or carries
            gradient to a stage without backward.
    """
    index = {stage.name: position for position, stage in enumerate(stages)}
    rank = _ranks(stages)
    depth = tuple(stage.depth for stage in stages)
    named = {(name, unit.number): unit for unit in units for name in unit.flow.stages} if edges else {}
    crossing = [_crossing(edge, named, index, depth) for edge in edges]
    pairs = {pair for flow in dict.fromkeys(unit.flow for unit in units) for pair in _checked(flow, index, depth)}
    pairs |= {(source[0], target[0]) for source, target, _ in crossing}
    order = OrderKeys(
        kind=kind, num_microbatches=num_slots, depth=depth, crossings=crossings(pairs, rank, depth, together)
    )
    programs = {flow: _Program.of(flow, index, rank) for flow in dict.fromkeys(unit.flow for unit in units)}
    sides = {(index[name], number): unit for (name, number), unit in named.items()}
    values, gradients = _message_orders(crossing, sides, rank)
    split = kind == "zb-h1"
    keyed: list[list[tuple[Key, int, int, list[Action]]]] = [[] for _ in range(1 + max(rank))]
    for unit in units:
        program, number = programs[unit.flow], unit.number
        for stage in program.stages:
            actions = _forward(stage, number, program, values)
            keyed[rank[stage]].append((order.forward_key(stage, unit.slot), unit.slot, number, actions))
        for stage in program.backward:
            actions = _backward(stage, number, program, gradients, split=split)
            keyed[rank[stage]].append((order.backward_key(stage, unit.backward_slot), unit.slot, number, actions))
    names = tuple(stage.name for stage in stages)
    in_order = (sorted(items, key=lambda item: item[:3]) for items in keyed)
    ranks = tuple(tuple(action for *_, actions in items for action in actions) for items in in_order)
    return Schedule(stages=names, ranks=ranks)


def _ranks(stages: Sequence[Placed]) -> tuple[int, ...]:
    for stage in stages:
        if len(stage.ranks) != 1:
            raise PlanError(f"stage {stage.name} runs on ranks {stage.ranks}; a schedule wants one rank a stage")
    return tuple(stage.ranks[0] for stage in stages)


# `CrossEdge` with stages as indices: (source, target, whether a gradient is sent back).
_Crossing = tuple[Side, Side, bool]


def _crossing(
    edge: CrossEdge, units: Mapping[tuple[str, int], Unit], index: Mapping[str, int], depth: tuple[int, ...]
) -> _Crossing:
    for name, number in (edge.source, edge.target):
        if name not in index:
            raise PlanError(f"an edge between microbatches names stage {name!r}; stages are {', '.join(index)}")
        if (name, number) not in units:
            raise PlanError(
                f"an edge between microbatches names microbatch {number} of {name}, which has none of that number"
            )
    source, target = index[edge.source[0]], index[edge.target[0]]
    first, second = units[edge.source], units[edge.target]
    words = f"edge {edge.source[0]} -> {edge.target[0]}"
    if depth[source] <= depth[target]:
        raise PlanError(f"{words} goes from depth {depth[source]} to {depth[target]}; it must fall")
    if second.slot < first.slot or second.backward_slot > first.backward_slot:
        raise PlanError(
            f"{words} leads from a microbatch of slots {first.slot}, {first.backward_slot} to one of slots {second.slot}, "
            f"{second.backward_slot}: forward earlier, or backward later"
        )
    if edge.gradient and not (edge.source[0] in first.flow.backward and edge.target[0] in second.flow.backward):
        raise PlanError(f"{words} carries gradient, but one of them runs no backward")
    return (source, edge.source[1]), (target, edge.target[1]), edge.gradient


def _message_orders(
    edges: Sequence[_Crossing], units: Mapping[Side, Unit], rank: Sequence[int]
) -> tuple[MessageOrder, MessageOrder]:
    crossing = [edge for edge in edges if rank[edge[0][0]] != rank[edge[1][0]]]
    values = ((source, target) for source, target, _ in crossing)
    gradients = ((target, source) for source, target, gradient in crossing if gradient)
    return (
        in_order_of_sends(values, lambda side: (units[side].slot,)),
        in_order_of_sends(gradients, lambda side: (units[side].backward_slot, units[side].slot)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Program:
    """Indices of the stages that a microbatch passes, and of the stages on other ranks with which each exchanges messages."""

    stages: tuple[int, ...]
    backward: tuple[int, ...]
    before: Mapping[int, Sequence[int]]
    """Stage index -> indices of the stages on other ranks from which it receives forward tensors."""
    after: Mapping[int, Sequence[int]]
    gradients_from: Mapping[int, Sequence[int]]
    gradients_to: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, flow: Flow, index: Mapping[str, int], rank: Sequence[int]) -> _Program:
        pairs = sorted((index[edge.source], index[edge.target], edge.gradient) for edge in flow.edges)
        crossing = [pair for pair in pairs if rank[pair[0]] != rank[pair[1]]]
        return cls(
            stages=tuple(index[name] for name in flow.stages),
            backward=tuple(index[name] for name in flow.backward),
            before=_grouped((target, source) for source, target, _ in crossing),
            after=_grouped((source, target) for source, target, _ in crossing),
            gradients_from=_grouped((source, target) for source, target, gradient in crossing if gradient),
            gradients_to=_grouped((target, source) for source, target, gradient in crossing if gradient),
        )


def _forward(stage: int, number: int, program: _Program, between: MessageOrder) -> list[Action]:
    side = (stage, number)
    return [
        *_messages(ActionKind.RECV_F, side, program.before, between.receives.get(side, ())),
        Action(stage=stage, kind=ActionKind.F, microbatch=number),
        *_messages(ActionKind.SEND_F, side, program.after, _from(side, between)),
    ]


def _backward(stage: int, number: int, program: _Program, between: MessageOrder, *, split: bool) -> list[Action]:
    side = (stage, number)
    return [
        *_messages(ActionKind.RECV_B, side, program.gradients_from, between.receives.get(side, ())),
        Action(stage=stage, kind=ActionKind.I if split else ActionKind.B, microbatch=number),
        *_messages(ActionKind.SEND_B, side, program.gradients_to, _from(side, between)),
        *([Action(stage=stage, kind=ActionKind.W, microbatch=number)] if split else ()),
    ]


def _from(side: Side, messages: MessageOrder) -> list[tuple[Side, Side]]:
    return [(side, receiver) for receiver in messages.sends.get(side, ())]


def _messages(
    kind: ActionKind, side: Side, inside: Mapping[int, Sequence[int]], between: Iterable[tuple[Side, Side]]
) -> list[Action]:
    stage, number = side
    return [
        *(Action(stage=stage, kind=kind, microbatch=number, peer=peer) for peer in inside.get(stage, ())),
        *(
            Action(stage=stage, kind=kind, microbatch=own, peer=peer, peer_microbatch=None if other == own else other)
            for (_, own), (peer, other) in between
        ),
    ]


def _checked(flow: Flow, index: Mapping[str, int], depth: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Return a flow's edges as (source stage index, target stage index); raise PlanError if the flow is invalid."""
    present = set(flow.stages)
    for name in (*flow.stages, *flow.backward):
        if name not in index:
            raise PlanError(f"a flow names stage {name!r}; stages are {', '.join(index)}")
    if not present.issuperset(flow.backward):
        missing = ", ".join(sorted(set(flow.backward) - present))
        raise PlanError(f"a flow has a backward of {missing} but no forward; its stages are {', '.join(flow.stages)}")
    for edge in flow.edges:
        ends = {edge.source, edge.target}
        if not present.issuperset(ends):
            names = ", ".join(flow.stages)
            raise PlanError(f"a flow has an edge {edge.source} -> {edge.target} outside its stages {names}")
        if edge.gradient and not ends.issubset(flow.backward):
            raise PlanError(f"edge {edge.source} -> {edge.target} carries gradient, but one of them runs no backward")
        source, target = index[edge.source], index[edge.target]
        if depth[source] <= depth[target]:
            raise PlanError(
                f"edge {edge.source} -> {edge.target} goes from depth {depth[source]} to {depth[target]}; it must fall"
            )
        yield source, target


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
