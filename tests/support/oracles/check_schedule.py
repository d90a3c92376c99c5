"""`check_schedule`, `check_units`: run a schedule in unit steps and refuse it at the first rule it breaks.

Rules: each stage of a unit's flow runs one forward, and, where the flow says so, one backward, whole (B) or in two parts (I then
W), and nothing else; a forward waits for every edge into it, from its own unit and from others, a B or I for its own forward and
every gradient, a W for its I; gradients leave after B or I; each receive meets exactly one send; between two stages, sends and
receives come in the same order; no rank waits for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from mmcompile.errors import VerifyError
from mmcompile.planner.schedule.order import Side
from mmcompile.planner.schedule.schedule import Action, ActionKind, CrossEdge, Flow, Schedule, Unit

_ROWS_AROUND = 5


def check_schedule(schedule: Schedule, flows: Sequence[Flow]) -> None:
    """Prove that a schedule runs its flows, one a microbatch, to the end.

    Raises:
        VerifyError: it does not; the message names rank, step and action and prints the rank-by-step grid around it.
    """
    check_units(schedule, [Unit(number=m, slot=m, backward_slot=m, flow=flow) for m, flow in enumerate(flows)], ())


def check_units(schedule: Schedule, units: Sequence[Unit], edges: Sequence[CrossEdge]) -> None:
    """Prove that a schedule runs units, and what goes from one to another, to the end.

    Raises:
        VerifyError: it does not, as `check_schedule`; or a stage has two units of one number, or an edge an end that is in none.
    """
    wanted = _Wanted.of(schedule, units, edges)
    _check_complete(schedule, wanted)
    run = _Run(schedule=schedule, wanted=wanted, positions=[0] * len(schedule.ranks))
    while any(run.positions[rank] < len(actions) for rank, actions in enumerate(schedule.ranks)):
        if not any([run.advance(rank) for rank in range(len(schedule.ranks))]):
            rank = next(r for r, actions in enumerate(schedule.ranks) if run.positions[r] < len(actions))
            raise run.error(rank, "no rank can move: deadlock")
    for (source, target, kind), waiting in run.channels.items():
        if waiting:
            names = f"{schedule.stages[source]} -> {schedule.stages[target]}"
            microbatches = sorted(sent for sent, _ in waiting)
            raise VerifyError(f"{len(waiting)} {kind} from {names} never received (microbatches {microbatches})")


def format_grid(schedule: Schedule, mark: tuple[int, int] | None = None, note: str = "") -> str:
    """A row a step, a column a rank.

    Args:
        mark: (rank, step) to point at; only the rows around it are printed then.
        note: text beside the mark.
    """
    num_steps = max((len(actions) for actions in schedule.ranks), default=0)
    rows = range(num_steps)
    if mark is not None:
        rows = range(max(0, mark[1] - _ROWS_AROUND), min(num_steps, mark[1] + _ROWS_AROUND + 1))
    cells = [[str(actions[row]) if row < len(actions) else "" for actions in schedule.ranks] for row in rows]
    if mark is not None:
        cells[mark[1] - rows.start][mark[0]] += " *"
    header = [f"rank {rank}" for rank in range(len(schedule.ranks))]
    widths = [max(len(row[column]) for row in (header, *cells)) for column in range(len(header))]
    lines = ["          " + "  ".join(map(str.ljust, header, widths))]
    for row, line in zip(rows, cells, strict=True):
        arrow = f"  <-- * {note}" if mark is not None and row == mark[1] else ""
        lines.append(f"step {row:>4} " + "  ".join(map(str.ljust, line, widths)) + arrow)
    return "\n".join(line.rstrip() for line in lines)


def _home(schedule: Schedule) -> dict[int, int]:
    """The rank of each stage."""
    home: dict[int, int] = {}
    for rank, actions in enumerate(schedule.ranks):
        for step, action in enumerate(actions):
            if home.setdefault(action.stage, rank) != rank:
                name = schedule.stages[action.stage]
                raise _error(schedule, rank, step, f"stage {name} also runs on rank {home[action.stage]}")
    return home


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edge:
    source: Side
    target: Side
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What units ask of a schedule, by indices of stages."""

    forward: Set[Side]
    backward: Set[Side]
    edges: Sequence[_Edge]
    """Inside units and between them."""
    before: Mapping[Side, Sequence[Side]]
    """Whose values a forward needs."""
    after: Mapping[Side, Sequence[Side]]
    """Whose gradients a backward needs."""
    home: Mapping[int, int]
    split: Set[Side]
    """Whose backward comes in two parts."""

    @classmethod
    def of(cls, schedule: Schedule, units: Sequence[Unit], cross: Sequence[CrossEdge]) -> _Wanted:
        index = {name: position for position, name in enumerate(schedule.stages)}
        forward: set[Side] = set()
        for unit in units:
            for name in unit.flow.stages:
                side = (index[name], unit.number)
                if side in forward:
                    raise VerifyError(f"stage {name} has two microbatches {unit.number}; numbers must differ")
                forward.add(side)
        edges = [
            _Edge(
                source=(index[edge.source], unit.number),
                target=(index[edge.target], unit.number),
                gradient=edge.gradient,
            )
            for unit in units
            for edge in unit.flow.edges
        ]
        for edge in cross:
            source, target = (index[edge.source[0]], edge.source[1]), (index[edge.target[0]], edge.target[1])
            if not forward.issuperset((source, target)):
                raise VerifyError(
                    f"an edge between microbatches {edge.source} -> {edge.target} of which one is not computed"
                )
            edges.append(_Edge(source=source, target=target, gradient=edge.gradient))
        before: dict[Side, list[Side]] = {}
        after: dict[Side, list[Side]] = {}
        for edge in edges:
            before.setdefault(edge.target, []).append(edge.source)
            if edge.gradient:
                after.setdefault(edge.source, []).append(edge.target)
        return cls(
            forward=forward,
            backward={(index[name], unit.number) for unit in units for name in unit.flow.backward},
            edges=edges,
            before=before,
            after=after,
            home=_home(schedule),
            split=_split(schedule),
        )

    def is_local(self, one: Side, two: Side) -> bool:
        return self.home.get(one[0]) == self.home.get(two[0])

    def actions(self) -> Iterator[str]:
        """The text of all actions."""
        yield from (_compute(side, ActionKind.F) for side in self.forward)
        for side in self.backward:
            parts = (ActionKind.I, ActionKind.W) if side in self.split else (ActionKind.B,)
            yield from (_compute(side, part) for part in parts)
        for edge in self.edges:
            if self.is_local(edge.source, edge.target):
                continue
            yield _message(edge.source, ActionKind.SEND_F, edge.target)
            yield _message(edge.target, ActionKind.RECV_F, edge.source)
            if edge.gradient:
                yield _message(edge.target, ActionKind.SEND_B, edge.source)
                yield _message(edge.source, ActionKind.RECV_B, edge.target)

    def gradient_of(self, side: Side) -> str:
        """The action that makes the gradients a stage sends."""
        return _compute(side, ActionKind.I if side in self.split else ActionKind.B)


def _compute(side: Side, kind: ActionKind) -> str:
    return f"{side[0]}{kind}{side[1]}"


def _message(side: Side, kind: ActionKind, peer: Side) -> str:
    other = None if peer[1] == side[1] else peer[1]
    return str(Action(stage=side[0], kind=kind, microbatch=side[1], peer=peer[0], peer_microbatch=other))


def _text(action: Action) -> str:
    """One text for each action: the peer's microbatch stands there only if it is another one."""
    return str(replace(action, peer_microbatch=None) if action.peer_microbatch == action.microbatch else action)


def _split(schedule: Schedule) -> set[Side]:
    parts = (ActionKind.I, ActionKind.W)
    return {
        (action.stage, action.microbatch) for actions in schedule.ranks for action in actions if action.kind in parts
    }


def _check_complete(schedule: Schedule, wanted: _Wanted) -> None:
    """Exactly the actions that the units ask for, each once."""
    asked = Counter(wanted.actions())
    seen: Counter[str] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for step, action in enumerate(actions):
            text = _text(action)
            seen[text] += 1
            if seen[text] > asked[text]:
                times = "twice" if asked[text] else "but no flow asks for it"
                raise _error(schedule, rank, step, f"{action} stands here {times}")
    missing = sorted((asked - seen).elements())
    if missing:
        listed = ", ".join(missing[:8])
        raise VerifyError(f"the schedule lacks {listed} ({len(missing)} actions)\n{format_grid(schedule)}")


@dataclass(kw_only=True, slots=True)
class _Run:
    """Where every rank stands, what has been computed and received, what is under way."""

    schedule: Schedule
    wanted: _Wanted
    positions: list[int]
    done: set[str] = field(default_factory=set)
    channels: dict[tuple[int, int, str], deque[tuple[int, int]]] = field(default_factory=dict)
    """(sender, receiver, kind of send) -> microbatches of both of each message that is under way."""

    def advance(self, rank: int) -> bool:
        """Run the next action of a rank; False if it must wait or has none."""
        actions = self.schedule.ranks[rank]
        if self.positions[rank] == len(actions):
            return False
        action = actions[self.positions[rank]]
        if action.kind.is_receive and not self._receive(rank, action):
            return False
        if action.kind.is_send:
            self._send(rank, action)
        if action.kind.is_compute:
            self._compute(rank, action)
        self.done.add(_text(action))
        self.positions[rank] += 1
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        assert action.peer is not None
        sent = "SEND_F" if action.kind is ActionKind.RECV_F else "SEND_B"
        waiting = self.channels.get((action.peer, action.stage, sent))
        if not waiting:
            return False
        if waiting[0] != (action.other, action.microbatch):
            to = "" if waiting[0][0] == waiting[0][1] else f" to microbatch {waiting[0][1]}"
            raise self.error(rank, f"the next message from stage {action.peer} is of microbatch {waiting[0][0]}{to}")
        waiting.popleft()
        return True

    def _send(self, rank: int, action: Action) -> None:
        assert action.peer is not None
        side = (action.stage, action.microbatch)
        forward = action.kind is ActionKind.SEND_F
        self._need(rank, _compute(side, ActionKind.F) if forward else self.wanted.gradient_of(side))
        channel = (action.stage, action.peer, str(action.kind))
        self.channels.setdefault(channel, deque()).append((action.microbatch, action.other))

    def _compute(self, rank: int, action: Action) -> None:
        side = (action.stage, action.microbatch)
        if action.kind is ActionKind.W:
            self._need(rank, _compute(side, ActionKind.I))
        elif action.kind is ActionKind.F:
            for source in self.wanted.before.get(side, ()):
                local = self.wanted.is_local(source, side)
                self._need(rank, _compute(source, ActionKind.F) if local else _message(side, ActionKind.RECV_F, source))
        else:
            self._need(rank, _compute(side, ActionKind.F))
            for target in self.wanted.after.get(side, ()):
                local = self.wanted.is_local(target, side)
                made = self.wanted.gradient_of(target) if local else _message(side, ActionKind.RECV_B, target)
                self._need(rank, made)

    def _need(self, rank: int, earlier: str) -> None:
        if earlier not in self.done:
            raise self.error(rank, f"{earlier} must come first")

    def error(self, rank: int, what: str) -> VerifyError:
        return _error(self.schedule, rank, self.positions[rank], what)


def _error(schedule: Schedule, rank: int, step: int, what: str) -> VerifyError:
    action = schedule.ranks[rank][step]
    grid = format_grid(schedule, (rank, step), what)
    return VerifyError(f"schedule breaks at rank {rank}, step {step}, action {action}: {what}\n{grid}")
