"""`check_schedule`: run a schedule in unit steps and refuse it at the first rule it breaks.

Rules: each stage of a flow runs one forward, and, where the flow says so, one backward, whole (B) or in two parts (I then W),
and nothing else; a forward waits for every edge into its stage, a B or I for its own forward and every gradient, a W for
its I; gradients leave after B or I; each receive meets exactly one send; between two stages, sends and receives come in the
same order; no rank waits for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from mmcompile.errors import VerifyError
from mmcompile.plan.simulator.schedule import Action, ActionKind, Flow, Schedule

_ROWS_AROUND = 5


def check_schedule(schedule: Schedule, flows: Sequence[Flow]) -> None:
    """Prove that a schedule runs its flows to the end.

    Raises:
        VerifyError: it does not; the message names rank, step and action and prints the rank-by-step grid around it.
    """
    home = _home(schedule)
    _check_complete(schedule, flows, home)
    run = _Run(schedule=schedule, flows=flows, home=home, split=_split(schedule), positions=[0] * len(schedule.ranks))
    while any(run.positions[rank] < len(actions) for rank, actions in enumerate(schedule.ranks)):
        if not any([run.advance(rank) for rank in range(len(schedule.ranks))]):
            rank = next(r for r, actions in enumerate(schedule.ranks) if run.positions[r] < len(actions))
            raise run.error(rank, "no rank can move: deadlock")
    for (source, target, kind), waiting in run.channels.items():
        if waiting:
            names = f"{schedule.stages[source]} -> {schedule.stages[target]}"
            raise VerifyError(f"{len(waiting)} {kind} from {names} never received (microbatches {sorted(waiting)})")


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


def _check_complete(schedule: Schedule, flows: Sequence[Flow], home: Mapping[int, int]) -> None:
    """Exactly the actions that the flows ask for, each once."""
    split = _split(schedule)
    wanted = Counter(chain.from_iterable(_expected(schedule, m, flow, home, split) for m, flow in enumerate(flows)))
    seen: Counter[str] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for step, action in enumerate(actions):
            seen[str(action)] += 1
            if seen[str(action)] > wanted[str(action)]:
                times = "twice" if wanted[str(action)] else "but no flow asks for it"
                raise _error(schedule, rank, step, f"{action} stands here {times}")
    missing = sorted((wanted - seen).elements())
    if missing:
        listed = ", ".join(missing[:8])
        raise VerifyError(f"the schedule lacks {listed} ({len(missing)} actions)\n{format_grid(schedule)}")


def _split(schedule: Schedule) -> set[tuple[int, int]]:
    """(stage, microbatch) pairs whose backward comes in two parts."""
    parts = (ActionKind.I, ActionKind.W)
    return {
        (action.stage, action.microbatch) for actions in schedule.ranks for action in actions if action.kind in parts
    }


def _expected(
    schedule: Schedule, microbatch: int, flow: Flow, home: Mapping[int, int], split: Set[tuple[int, int]]
) -> Iterator[str]:
    index = {name: position for position, name in enumerate(schedule.stages)}
    yield from (f"{index[name]}F{microbatch}" for name in flow.stages)
    for name in flow.backward:
        parts = "IW" if (index[name], microbatch) in split else "B"
        yield from (f"{index[name]}{part}{microbatch}" for part in parts)
    for edge in flow.edges:
        source, target = index[edge.source], index[edge.target]
        if home.get(source) == home.get(target):
            continue
        yield f"{source}SEND_F{microbatch}>{target}"
        yield f"{target}RECV_F{microbatch}<{source}"
        if edge.gradient:
            yield f"{target}SEND_B{microbatch}>{source}"
            yield f"{source}RECV_B{microbatch}<{target}"


@dataclass(kw_only=True, slots=True)
class _Run:
    """Where every rank stands, what has been computed and received, what is under way."""

    schedule: Schedule
    flows: Sequence[Flow]
    home: Mapping[int, int]
    split: Set[tuple[int, int]]
    positions: list[int]
    done: set[str] = field(default_factory=set)
    channels: dict[tuple[int, int, str], deque[int]] = field(default_factory=dict)

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
        self.done.add(str(action))
        self.positions[rank] += 1
        return True

    def _receive(self, rank: int, action: Action) -> bool:
        assert action.peer is not None
        sent = "SEND_F" if action.kind is ActionKind.RECV_F else "SEND_B"
        waiting = self.channels.get((action.peer, action.stage, sent))
        if not waiting:
            return False
        if waiting[0] != action.microbatch:
            raise self.error(rank, f"the next message from stage {action.peer} is of microbatch {waiting[0]}")
        waiting.popleft()
        return True

    def _send(self, rank: int, action: Action) -> None:
        assert action.peer is not None
        made = "F" if action.kind is ActionKind.SEND_F else self._gradient_of(action.stage, action.microbatch)
        self._need(rank, f"{action.stage}{made}{action.microbatch}")
        channel = (action.stage, action.peer, str(action.kind))
        self.channels.setdefault(channel, deque()).append(action.microbatch)

    def _compute(self, rank: int, action: Action) -> None:
        if action.kind is ActionKind.W:
            self._need(rank, f"{action.stage}I{action.microbatch}")
            return
        forward = action.kind is ActionKind.F
        if not forward:
            self._need(rank, f"{action.stage}F{action.microbatch}")
        name = self.schedule.stages[action.stage]
        for edge in self.flows[action.microbatch].edges:
            if forward and edge.target == name:
                self._need_edge(rank, action, edge.source, "F")
            if not forward and edge.source == name and edge.gradient:
                self._need_edge(rank, action, edge.target, "B")

    def _need_edge(self, rank: int, action: Action, peer_name: str, kind: str) -> None:
        peer = self.schedule.stages.index(peer_name)
        if self.home[peer] == rank:
            made = "F" if kind == "F" else self._gradient_of(peer, action.microbatch)
            self._need(rank, f"{peer}{made}{action.microbatch}")
        else:
            self._need(rank, f"{action.stage}RECV_{kind}{action.microbatch}<{peer}")

    def _gradient_of(self, stage: int, microbatch: int) -> str:
        """The kind of action that makes the gradients a stage sends."""
        return "I" if (stage, microbatch) in self.split else "B"

    def _need(self, rank: int, earlier: str) -> None:
        if earlier not in self.done:
            raise self.error(rank, f"{earlier} must come first")

    def error(self, rank: int, what: str) -> VerifyError:
        return _error(self.schedule, rank, self.positions[rank], what)


def _error(schedule: Schedule, rank: int, step: int, what: str) -> VerifyError:
    action = schedule.ranks[rank][step]
    grid = format_grid(schedule, (rank, step), what)
    return VerifyError(f"schedule breaks at rank {rank}, step {step}, action {action}: {what}\n{grid}")
