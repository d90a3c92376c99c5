"""Discrete-event simulation of a schedule: when every action runs, given how long each takes.

A rank runs its actions in order. A send starts when its rank reaches it and costs the rank nothing; messages of one
directed pair of stages follow one another. A receive waits until its message has arrived. The simulator is the one
judge of plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmcompile.errors import VerifyError
from mmcompile.plan.schedule import Action, ActionKind, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDuration:
    """Seconds of one microbatch in one stage."""

    forward_s: float
    input_grad_s: float
    """The part of the backward that stages before wait for."""
    weight_grad_s: float = 0.0
    """The part of the backward that nothing else waits for."""

    @property
    def backward_s(self) -> float:
        return self.input_grad_s + self.weight_grad_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action in time [s], predicted or measured.

    Predicted times count from the start of the step, and a SEND lasts until the message has arrived (its rank goes on
    meanwhile). Measured times are on the wall clock, which ranks of one machine share.
    """

    rank: int
    stage: str
    kind: ActionKind
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A simulated step."""

    events: tuple[Event, ...] = field(repr=False)
    """F, B and SEND events, by start."""
    makespan_s: float
    """When the last computation ends."""
    busy_s: tuple[float, ...]
    """Computing seconds of each rank."""

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time, 0..1."""
        available = len(self.busy_s) * self.makespan_s
        return 1.0 - sum(self.busy_s) / available if available else 0.0


def simulate(
    schedule: Schedule,
    durations: Mapping[str, StageDuration],
    link_s: Mapping[tuple[str, str], float] | None = None,
) -> Timeline:
    """Play a schedule.

    Args:
        schedule: what each rank does, in order.
        durations: stage name -> seconds of a forward and a backward.
        link_s: (sending stage, receiving stage) -> seconds of one message; an absent pair costs nothing.

    Raises:
        VerifyError: the schedule deadlocks (`check_schedule` says where).
    """
    state = _State(
        stages=schedule.stages,
        durations=[(durations[name].forward_s, durations[name].backward_s) for name in schedule.stages],
        link_s=link_s or {},
        clock=[0.0] * len(schedule.ranks),
        busy=[0.0] * len(schedule.ranks),
    )
    positions = [0] * len(schedule.ranks)
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        actions = schedule.ranks[rank]
        while positions[rank] < len(actions) and state.play(rank, actions[positions[rank]], ready):
            positions[rank] += 1
    _check_finished(schedule, positions)
    events = tuple(sorted(state.events, key=lambda event: (event.start_s, event.rank, event.end_s)))
    return Timeline(events=events, makespan_s=max(state.clock, default=0.0), busy_s=tuple(state.busy))


def _check_finished(schedule: Schedule, positions: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} at step {position} ({actions[position]})"
        for rank, (actions, position) in enumerate(zip(schedule.ranks, positions, strict=True))
        if position < len(actions)
    ]
    if stuck:
        raise VerifyError(f"the schedule deadlocks: {', '.join(stuck)}")


_Message = tuple[int, int, bool, int]


@dataclass(kw_only=True, slots=True)
class _State:
    stages: Sequence[str]
    durations: Sequence[tuple[float, float]]
    link_s: Mapping[tuple[str, str], float]
    clock: list[float]
    busy: list[float]
    events: list[Event] = field(default_factory=list)
    arrivals: dict[_Message, float] = field(default_factory=dict)
    """(source, target, forward?, microbatch) -> when the message is there."""
    waiting: dict[_Message, int] = field(default_factory=dict)
    """The rank that waits for a message."""
    channel_free: dict[tuple[int, int], float] = field(default_factory=dict)

    def play(self, rank: int, action: Action, ready: deque[int]) -> bool:
        """Run one action; False if it must wait for a message (its sender wakes the rank)."""
        match action.kind:
            case ActionKind.F | ActionKind.B:
                seconds = self.durations[action.stage][action.kind is ActionKind.B]
                self._record(rank, action, self.clock[rank], self.clock[rank] + seconds)
                self.clock[rank] += seconds
                self.busy[rank] += seconds
                return True
            case ActionKind.SEND_F | ActionKind.SEND_B:
                self._send(rank, action, ready)
                return True
            case _:
                return self._receive(rank, action)

    def _send(self, rank: int, action: Action, ready: deque[int]) -> None:
        assert action.peer is not None
        channel = (action.stage, action.peer)
        start = max(self.clock[rank], self.channel_free.get(channel, 0.0))
        end = start + self.link_s.get((self.stages[action.stage], self.stages[action.peer]), 0.0)
        self.channel_free[channel] = end
        self._record(rank, action, start, end)
        key = (*channel, action.kind is ActionKind.SEND_F, action.microbatch)
        self.arrivals[key] = end
        if key in self.waiting:
            ready.append(self.waiting.pop(key))

    def _receive(self, rank: int, action: Action) -> bool:
        assert action.peer is not None
        key = (action.peer, action.stage, action.kind is ActionKind.RECV_F, action.microbatch)
        if key not in self.arrivals:
            self.waiting[key] = rank
            return False
        self.clock[rank] = max(self.clock[rank], self.arrivals.pop(key))
        return True

    def _record(self, rank: int, action: Action, start: float, end: float) -> None:
        self.events.append(
            Event(
                rank=rank,
                stage=self.stages[action.stage],
                kind=action.kind,
                microbatch=action.microbatch,
                start_s=start,
                end_s=end,
            )
        )
