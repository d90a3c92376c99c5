"""`Schedule`: for each rank an ordered list of actions; `build_schedule` makes it for any DAG of stages.

The order of computations is `mmcompile.plan.simulator.order`'s. Sends never block and stand right after what made the value;
receives block and stand right before what needs it. Between two stages both sides follow the order of microbatches. Edges
inside a rank have no SEND or RECV: the value is handed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mmcompile.errors import PlanError
from mmcompile.plan.plan import ScheduleKind
from mmcompile.plan.simulator.order import Key, Order, crossings


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEdge:
    """Tensors of one microbatch that go from a stage to a later one; `gradient` if any of them sends gradient back."""

    source: str
    target: str
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What one microbatch does: the stages that have work, the edges between them, the stages that run a backward."""

    stages: tuple[str, ...]
    edges: tuple[FlowEdge, ...]
    backward: tuple[str, ...]


class ActionKind(StrEnum):
    """What a rank does next. F, B, I and W compute; the others move the tensors of one edge of one microbatch."""

    F = "F"
    B = "B"
    """The whole backward, I and W in one."""
    I = "I"  # noqa: E741 (the letter is the field's)
    """Gradients of the inputs: what stages before wait for."""
    W = "W"
    """Gradients of the weights, after I."""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        return self in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)

    @property
    def is_send(self) -> bool:
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_receive(self) -> bool:
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One step of a rank. Text: stage, kind, microbatch as in torch's schedules, then `>` or `<` and the peer stage.

    `2F0`, `2B0`, `2I0`, `2W0`, `1SEND_F3>2` (stage 1 sends microbatch 3 to stage 2), `2RECV_F3<1`, `2SEND_B3>1`, `1RECV_B3<2`.
    """

    stage: int
    """Index into `Schedule.stages`."""
    kind: ActionKind
    microbatch: int
    peer: int | None = None
    """The stage on the other side of a send or receive."""

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of `str`. Raises PlanError with the forms that are valid."""
        match = _ACTION.fullmatch(text.strip())
        if match is not None:
            stage, kind, microbatch, arrow, peer = match.groups()
            expected = ">" if ActionKind(kind).is_send else "<" if ActionKind(kind).is_receive else None
            if arrow == expected:
                return cls(
                    stage=int(stage),
                    kind=ActionKind(kind),
                    microbatch=int(microbatch),
                    peer=None if peer is None else int(peer),
                )
        raise PlanError(
            f"{text!r} is not an action; write 2F0, 2B0, 2I0, 2W0, 1SEND_F3>2, 2RECV_F3<1, 2SEND_B3>1 or 1RECV_B3<2"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What every rank does in one step. `str` prints one line a rank, `parse` reads it back."""

    stages: tuple[str, ...]
    """Stage names; an action's stage is an index into them."""
    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        lines = (f"rank {rank}: " + " ".join(map(str, actions)) for rank, actions in enumerate(self.ranks))
        return "\n".join(line.rstrip() for line in (f"stages: {' '.join(self.stages)}", *lines))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Inverse of `str`. Raises PlanError naming the line that does not read."""
        head, *lines = text.strip().splitlines()
        if not head.startswith("stages:"):
            raise PlanError(f"a schedule begins with 'stages: NAME ...', got {head!r}")
        ranks: list[tuple[Action, ...]] = []
        for line in lines:
            label, _, actions = line.partition(":")
            if label != f"rank {len(ranks)}":
                raise PlanError(f"expected a line 'rank {len(ranks)}: ...', got {line!r}")
            ranks.append(tuple(Action.parse(word) for word in actions.split()))
        return cls(stages=tuple(head.removeprefix("stages:").split()), ranks=tuple(ranks))


class Placed(Protocol):
    """A stage, as far as a schedule needs to know it (`mmcompile.plan.plan.Stage` is one)."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def depth(self) -> int:
        """Longest path, in stages, to the loss stage."""
        ...


def in_flight(kind: ScheduleKind, depth: int, num_microbatches: int) -> int:
    """Microbatches whose activations a stage holds at its peak, if it runs a backward (without one it holds none).

    Args:
        depth: longest path, in stages, to the loss stage.
    """
    match kind:
        case "gpipe":
            return num_microbatches
        case "1f1b" | "zb-h1":
            return min(depth + 1, num_microbatches)
        case "eager-1f1b":
            return min(2 * depth + 1, num_microbatches)


def build_schedule(stages: Sequence[Placed], flows: Sequence[Flow], kind: ScheduleKind = "1f1b") -> Schedule:
    """Order one step over the DAG of stages; it cannot deadlock (see `mmcompile.plan.simulator.order`).

    Args:
        stages: all stages of the plan, each on one rank.
        flows: one a microbatch, in order. A stage absent from a flow does nothing for that microbatch.
        kind: the rule of the order. `zb-h1` runs each backward as I and W, the others as B.

    Raises:
        PlanError: a flow names an unknown stage, an edge does not lead towards the loss, or a stage has several ranks.
    """
    index = {stage.name: position for position, stage in enumerate(stages)}
    rank = _ranks(stages)
    depth = tuple(stage.depth for stage in stages)
    edges = {edge for flow in dict.fromkeys(flows) for edge in _checked(flow, index, depth)}
    order = Order(kind=kind, num_microbatches=len(flows), depth=depth, crossings=crossings(edges, rank, depth))
    programs = {flow: _Program.of(flow, index, rank, split=kind == "zb-h1") for flow in dict.fromkeys(flows)}
    keyed: list[list[tuple[Key, list[Action]]]] = [[] for _ in range(1 + max(rank))]
    for microbatch, flow in enumerate(flows):
        program = programs[flow]
        for stage, steps in program.forward.items():
            keyed[rank[stage]].append((order.forward_key(stage, microbatch), _at(stage, microbatch, steps)))
        for stage, steps in program.backward.items():
            keyed[rank[stage]].append((order.backward_key(stage, microbatch), _at(stage, microbatch, steps)))
    names = tuple(stage.name for stage in stages)
    return Schedule(stages=names, ranks=tuple(_in_order(items) for items in keyed))


def _ranks(stages: Sequence[Placed]) -> tuple[int, ...]:
    for stage in stages:
        if len(stage.ranks) != 1:
            raise PlanError(f"stage {stage.name} runs on ranks {stage.ranks}; a schedule wants one rank a stage")
    return tuple(stage.ranks[0] for stage in stages)


def _in_order(keyed: list[tuple[Key, list[Action]]]) -> tuple[Action, ...]:
    return tuple(action for _, actions in sorted(keyed, key=lambda item: item[0]) for action in actions)


_Step = tuple[ActionKind, int | None]
"""A kind and the peer stage."""


def _at(stage: int, microbatch: int, steps: Sequence[_Step]) -> list[Action]:
    return [Action(stage=stage, kind=kind, microbatch=microbatch, peer=peer) for kind, peer in steps]


def _checked(flow: Flow, index: Mapping[str, int], depth: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Edges of a flow as pairs of stage indices."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Program:
    """What each stage does for a microbatch of one flow, messages to other ranks included, peers ascending."""

    forward: Mapping[int, tuple[_Step, ...]]
    backward: Mapping[int, tuple[_Step, ...]]

    @classmethod
    def of(cls, flow: Flow, index: Mapping[str, int], rank: Sequence[int], *, split: bool) -> _Program:
        """`split`: the backward as I and W."""
        pairs = sorted((index[edge.source], index[edge.target], edge.gradient) for edge in flow.edges)
        crossing = [pair for pair in pairs if rank[pair[0]] != rank[pair[1]]]
        before = _grouped((target, (ActionKind.RECV_F, source)) for source, target, _ in crossing)
        after = _grouped((source, (ActionKind.SEND_F, target)) for source, target, _ in crossing)
        back = [(source, target) for source, target, gradient in crossing if gradient]
        receives = _grouped((source, (ActionKind.RECV_B, target)) for source, target in back)
        sends = _grouped((target, (ActionKind.SEND_B, source)) for source, target in back)
        compute: _Step = (ActionKind.I if split else ActionKind.B, None)
        late: tuple[_Step, ...] = ((ActionKind.W, None),) if split else ()
        forward = [index[name] for name in flow.stages]
        backward = [index[name] for name in flow.backward]
        return cls(
            forward={s: (*before.get(s, ()), (ActionKind.F, None), *after.get(s, ())) for s in forward},
            backward={s: (*receives.get(s, ()), compute, *sends.get(s, ()), *late) for s in backward},
        )


def _grouped(pairs: Iterable[tuple[int, _Step]]) -> dict[int, list[_Step]]:
    groups: dict[int, list[_Step]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
