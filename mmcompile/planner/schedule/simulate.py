"""Discrete-event simulation of a schedule: start and end of every action, from the duration of each.

A rank runs its actions in order. A send starts when its rank reaches it and costs the rank nothing; messages of one
directed pair of stages follow one another. A receive waits for the message of its sending and receiving stage and of the
microbatch number in each. Plans are compared by the makespans that result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from mmcompile.costmodel.compute import LayerTimes
from mmcompile.errors import PlanError, VerifyError
from mmcompile.planner.schedule.schedule import Action, ActionKind, Schedule

Durations = Mapping[str, LayerTimes | Sequence[LayerTimes] | Mapping[int, LayerTimes]]
"""Stage name -> its durations: one for all microbatches, a sequence by microbatch, or a mapping by microbatch number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action with its start and end in s, predicted or measured.

    Predicted times count from the start of the step, and a SEND lasts until the message has arrived (its rank continues
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
    """Result of a simulated step: times of its actions, and computing seconds of each rank."""

    events: tuple[Event, ...] = field(repr=False)
    """F, B, I, W and SEND events in order of start; () if events were not recorded."""
    makespan_s: float
    """Seconds from the step's start to the end of its last computation."""
    busy_s: tuple[float, ...]
    """Seconds that each rank computes, [ranks]."""

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle, 0..1."""
        available = len(self.busy_s) * self.makespan_s
        return 1.0 - sum(self.busy_s) / available if available else 0.0


def simulate(
    schedule: Schedule,
    durations: Durations,
    link_s: Mapping[tuple[str, str], float] | None = None,
    *,
    record: bool = True,
) -> Timeline:
    """Return the timeline of a schedule whose actions take given seconds.

    Args:
        durations: durations of every stage, one for all microbatches or one for each; a mapping need not have microbatches that
            the stage does not compute.
        link_s: (sending stage, receiving stage) -> seconds of one message; an absent pair costs nothing.
        record: False leaves `Timeline.events` empty, which is several times faster.

    Raises:
        PlanError: a stage has no durations, or none for a microbatch that it computes.
        VerifyError: the schedule deadlocks (`check_schedule` finds where).
    """
    index = {name: position for position, name in enumerate(schedule.stages)}
    state = _State(
        num_stages=len(index),
        seconds=_seconds(schedule, durations),
        link_s={
            index[source] * len(index) + index[target]: seconds
            for (source, target), seconds in (link_s or {}).items()
            if source in index and target in index
        },
        clock=[0.0] * len(schedule.ranks),
        busy=[0.0] * len(schedule.ranks),
        events=[] if record else None,
    )
    positions = [0] * len(schedule.ranks)
    state.ready.extend(range(len(schedule.ranks)))
    while state.ready:
        rank = state.ready.popleft()
        positions[rank] = state.play(rank, schedule.ranks[rank], positions[rank])
    _check_finished(schedule, positions)
    return Timeline(
        events=_events(schedule, state.events or ()), makespan_s=max(state.clock, default=0.0), busy_s=tuple(state.busy)
    )


_Seconds = Sequence[Sequence[float] | Mapping[int, float]]
"""Seconds of a stage's actions by microbatch number: four entries, for the action kinds F, B, I and W."""
_parts = attrgetter("forward_s", "backward_s", "input_grad_s", "weight_grad_s")


def _seconds(schedule: Schedule, durations: Durations) -> list[_Seconds]:
    numbers: list[set[int]] = [set() for _ in schedule.stages]
    for actions in schedule.ranks:
        for action in actions:
            if action.peer is None:
                numbers[action.stage].add(action.microbatch)
    for name in schedule.stages:
        if name not in durations:
            raise PlanError(f"stage {name} has no durations; there are some for {', '.join(sorted(durations))}")
    return [_of_stage(name, durations[name], own) for name, own in zip(schedule.stages, numbers, strict=True)]


def _of_stage(
    name: str, given: LayerTimes | Sequence[LayerTimes] | Mapping[int, LayerTimes], numbers: Set[int]
) -> _Seconds:
    """Return the seconds of a stage's actions; PlanError if they lack a microbatch of `numbers`, which the stage runs."""
    count = 1 + max(numbers, default=-1)
    if isinstance(given, LayerTimes):
        return [[seconds] * count for seconds in _parts(given)]
    if isinstance(given, Mapping):
        missing = sorted(numbers - given.keys())
        if missing:
            raise PlanError(f"stage {name} has no duration of microbatch {missing[0]}, which the schedule has")
        return [dict(zip(given, part, strict=True)) for part in zip(*map(_parts, given.values()), strict=True)]
    if len(given) < count:
        raise PlanError(f"stage {name} has durations of {len(given)} microbatches, the schedule has {count}")
    return list(zip(*map(_parts, given), strict=True))


def _check_finished(schedule: Schedule, positions: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} at step {position} ({actions[position]})"
        for rank, (actions, position) in enumerate(zip(schedule.ranks, positions, strict=True))
        if position < len(actions)
    ]
    if stuck:
        raise VerifyError(f"the schedule deadlocks: {', '.join(stuck)}")


_Record = tuple[float, int, float, Action]
"""(start in s, rank, end in s, action) of a simulated action."""


def _events(schedule: Schedule, records: Sequence[_Record]) -> tuple[Event, ...]:
    return tuple(
        Event(
            rank=rank,
            stage=schedule.stages[action.stage],
            kind=action.kind,
            microbatch=action.microbatch,
            start_s=start,
            end_s=end,
        )
        for start, rank, end, action in sorted(records, key=lambda record: record[:3])
    )


@dataclass(kw_only=True, slots=True)
class _State:
    num_stages: int
    seconds: Sequence[_Seconds]
    link_s: Mapping[int, float]
    """Channel (source * num_stages + target) -> seconds of a message from stage `source` to stage `target`."""
    clock: list[float]
    busy: list[float]
    events: list[_Record] | None
    ready: deque[int] = field(default_factory=deque)
    arrivals: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """(channel, sender's microbatch, receiver's) -> arrival time in s. Values and gradients never share a channel."""
    waiting: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(channel, sender's microbatch, receiver's) -> rank that waits for the message."""
    channel_free: dict[int, float] = field(default_factory=dict)

    def play(self, rank: int, actions: Sequence[Action], position: int) -> int:
        """Simulate a rank's actions from a position until one must wait for a message; return the position where it stopped."""
        # One flat loop over locals: the planner plays millions of actions, and calls would cost more than the work.
        num_stages, seconds, arrivals, waiting = self.num_stages, self.seconds, self.arrivals, self.waiting
        channel_free, link_s, events = self.channel_free, self.link_s, self.events
        forward, backward, input_grad = ActionKind.F, ActionKind.B, ActionKind.I
        send_f, send_b = ActionKind.SEND_F, ActionKind.SEND_B
        now, busy = self.clock[rank], self.busy[rank]
        for step in range(position, len(actions)):
            action = actions[step]
            kind, stage, microbatch, peer = action.kind, action.stage, action.microbatch, action.peer
            if peer is None:
                part = 0 if kind is forward else 1 if kind is backward else 2 if kind is input_grad else 3
                taken = seconds[stage][part][microbatch]
                if events is not None:
                    events.append((now, rank, now + taken, action))
                now += taken
                busy += taken
            elif kind is send_f or kind is send_b:
                other = action.peer_microbatch
                channel = stage * num_stages + peer
                start = channel_free.get(channel, 0.0)
                if now > start:
                    start = now
                end = start + link_s.get(channel, 0.0)
                channel_free[channel] = end
                key = (channel, microbatch, microbatch if other is None else other)
                arrivals[key] = end
                if events is not None:
                    events.append((start, rank, end, action))
                if key in waiting:
                    self.ready.append(waiting.pop(key))
            else:
                other = action.peer_microbatch
                key = (peer * num_stages + stage, microbatch if other is None else other, microbatch)
                if key not in arrivals:
                    waiting[key] = rank
                    break
                there = arrivals.pop(key)
                if there > now:
                    now = there
        else:
            step = len(actions)
        self.clock[rank], self.busy[rank] = now, busy
        return step
