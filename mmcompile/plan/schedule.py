"""`Schedule`: for each rank an ordered list of actions, and the 1F1B order over a DAG of stages.

**The order.** Let r(s) be the longest path from stage s to a sink, counting only edges that cross ranks. Give

    the forward of microbatch m in stage s the key 2m - r(s),
    the backward of microbatch m in stage s the key 2m + r(s) + 1,

and let each rank run what it has in the order of keys. In a stage with r = d this reads F0 .. F(d-1), then F(d) B0,
F(d+1) B1, ...: 1F1B with a warm-up of d. Stages of one rank interleave by the same keys; at equal keys forwards go from
the far stage to the near one and backwards the other way.

**Why it cannot deadlock.** An edge that crosses ranks raises r by at least one towards its source, so along every
dependency the forward key rises, and the backward key rises; an edge inside a rank has equal keys at worst, and the
tie-break orders it; a backward's key is above its own forward's. So the keys order *all* actions of all ranks
consistently with every dependency, for any DAG, any map of stages to ranks, and any subset of stages in a microbatch.
Sends never block and stand right after what made the value; receives block and stand right before what needs it.
Between two stages both sides follow the order of microbatches.

Edges inside a rank have no SEND or RECV: the value is handed over.

Source: longest path instead of the stage index, Cornstarch §4.1 (Oobleck / Cornstarch / Entrain dissertation, Ch. 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from mmcompile.errors import PlanError
from mmcompile.plan.plan import ScheduleKind


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
    """What a rank does next. F and B compute; the others move the tensors of one edge of one microbatch."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_send(self) -> bool:
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_receive(self) -> bool:
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One step of a rank. Text: stage, kind, microbatch as in torch's schedules, then `>` or `<` and the peer stage.

    `2F0`, `1SEND_F3>2` (stage 1 sends microbatch 3 to stage 2), `2RECV_F3<1`, `2SEND_B3>1`, `1RECV_B3<2`.
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
        raise PlanError(f"{text!r} is not an action; write 2F0, 2B0, 1SEND_F3>2, 2RECV_F3<1, 2SEND_B3>1 or 1RECV_B3<2")


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


def build_schedule(stages: Sequence[Placed], flows: Sequence[Flow]) -> Schedule:
    """Order one step by 1F1B over the DAG of stages (see the module's docstring).

    Args:
        stages: all stages of the plan, each on one rank.
        flows: one a microbatch, in order. A stage absent from a flow does nothing for that microbatch.

    Raises:
        PlanError: a flow names an unknown stage, an edge does not lead towards the loss, or a stage has several ranks.
    """
    order = _Order.of(stages, flows)
    num_ranks = 1 + max(stage.ranks[0] for stage in stages)
    keyed: list[list[tuple[tuple[int, int, int], list[Action]]]] = [[] for _ in range(num_ranks)]
    for microbatch, flow in enumerate(flows):
        edges = _Edges.of(flow, order)
        backward = set(flow.backward)
        for name in flow.stages:
            index = order.index[name]
            rank = keyed[order.rank[index]]
            rank.append((order.forward_key(index, microbatch), edges.forward(index, microbatch)))
            if name in backward:
                rank.append((order.backward_key(index, microbatch), edges.backward(index, microbatch)))
    return Schedule(
        stages=tuple(stage.name for stage in stages),
        ranks=tuple(_in_order(rank) for rank in keyed),
    )


def _in_order(keyed: list[tuple[tuple[int, int, int], list[Action]]]) -> tuple[Action, ...]:
    return tuple(action for _, actions in sorted(keyed, key=lambda item: item[0]) for action in actions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """Stage indices, their ranks, depths, and distances `r` in rank crossings."""

    index: Mapping[str, int]
    rank: tuple[int, ...]
    depth: tuple[int, ...]
    crossings: tuple[int, ...]

    @classmethod
    def of(cls, stages: Sequence[Placed], flows: Sequence[Flow]) -> _Order:
        index = {stage.name: position for position, stage in enumerate(stages)}
        for stage in stages:
            if len(stage.ranks) != 1:
                raise PlanError(f"stage {stage.name} runs on ranks {stage.ranks}; a schedule wants one rank a stage")
        depth = tuple(stage.depth for stage in stages)
        rank = tuple(stage.ranks[0] for stage in stages)
        edges = {edge for flow in flows for edge in _checked(flow, index, depth)}
        return cls(index=index, rank=rank, depth=depth, crossings=_crossings(edges, rank, depth))

    def forward_key(self, stage: int, microbatch: int) -> tuple[int, int, int]:
        return 2 * microbatch - self.crossings[stage], -self.depth[stage], stage

    def backward_key(self, stage: int, microbatch: int) -> tuple[int, int, int]:
        return 2 * microbatch + self.crossings[stage] + 1, self.depth[stage], stage


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


def _crossings(edges: Iterable[tuple[int, int]], rank: tuple[int, ...], depth: tuple[int, ...]) -> tuple[int, ...]:
    crossings = [0] * len(rank)
    # Sources of equal depth are not joined by an edge, so targets are final when their sources are visited.
    for source, target in sorted(edges, key=lambda edge: (depth[edge[0]], edge)):
        step = int(rank[source] != rank[target])
        crossings[source] = max(crossings[source], crossings[target] + step)
    return tuple(crossings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edges:
    """Edges of one microbatch that cross ranks, by stage index, peers ascending."""

    before: Mapping[int, list[int]]
    after: Mapping[int, list[int]]
    gradient_before: Mapping[int, list[int]]
    gradient_after: Mapping[int, list[int]]

    @classmethod
    def of(cls, flow: Flow, order: _Order) -> _Edges:
        pairs = sorted((order.index[edge.source], order.index[edge.target], edge.gradient) for edge in flow.edges)
        crossing = [pair for pair in pairs if order.rank[pair[0]] != order.rank[pair[1]]]
        return cls(
            before=_grouped((target, source) for source, target, _ in crossing),
            after=_grouped((source, target) for source, target, _ in crossing),
            gradient_before=_grouped((target, source) for source, target, gradient in crossing if gradient),
            gradient_after=_grouped((source, target) for source, target, gradient in crossing if gradient),
        )

    def forward(self, stage: int, microbatch: int) -> list[Action]:
        receives = (_action(stage, ActionKind.RECV_F, microbatch, peer) for peer in self.before.get(stage, ()))
        sends = (_action(stage, ActionKind.SEND_F, microbatch, peer) for peer in self.after.get(stage, ()))
        return [*receives, _action(stage, ActionKind.F, microbatch), *sends]

    def backward(self, stage: int, microbatch: int) -> list[Action]:
        receives = (_action(stage, ActionKind.RECV_B, microbatch, peer) for peer in self.gradient_after.get(stage, ()))
        sends = (_action(stage, ActionKind.SEND_B, microbatch, peer) for peer in self.gradient_before.get(stage, ()))
        return [*receives, _action(stage, ActionKind.B, microbatch), *sends]


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _action(stage: int, kind: ActionKind, microbatch: int, peer: int | None = None) -> Action:
    return Action(stage=stage, kind=kind, microbatch=microbatch, peer=peer)
