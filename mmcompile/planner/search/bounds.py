"""Fast estimates of candidates: a lower bound of the makespan, and the simulator's makespan of many candidates at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import ScheduleKind
from mmcompile.planner.schedule.order import ticks
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.options import Array, Index


def lower_bound_s(candidate: Candidate) -> float:
    """Return a lower bound of the seconds of a candidate's step, if every microbatch is the mean one.

    Let a stage run M microbatches, each F seconds forward and B backward, with w warm-up forwards. For one microbatch, let
    `before` be the seconds of forwards upstream, `after` of backwards upstream, and `round` from the stage to the loss and back.
    Under 1F1B the step takes

        before + M (F + B) + after + max(0, round - w F) + max(0, round - w B)

    at least: the stage has only w more forwards to do before its first backward, and only w backwards between its last forward
    and its last backward. Both gaps count if M > w + 1, else the larger. The bound is exact for a chain of equal stages. Eager
    1F1B has twice the warm-up. Under GPipe the whole `round` lies between a stage's last forward and its first backward. Under
    ZB-H1 the way back is of input gradients only.
    """
    schedule, microbatches = candidate.setting.schedule, candidate.setting.num_microbatches
    count = len(candidate.stages)
    forward = [stage.forward_s for stage in candidate.stages]
    backward = [stage.backward_s for stage in candidate.stages]
    late = [stage.weight_grad_s if schedule == "zb-h1" else 0.0 for stage in candidate.stages]
    way = [own - behind for own, behind in zip(backward, late, strict=True)]
    before, after, down, back = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
    for source, target in sorted(candidate.edges):
        before[target] = max(before[target], before[source] + forward[source])
        after[target] = max(after[target], after[source] + way[source])
    for source, target in sorted(candidate.edges, reverse=True):
        down[source] = max(down[source], down[target] + forward[target])
        back[source] = max(back[source], back[target] + way[target])
    bound = 0.0
    for index, stage in enumerate(candidate.stages):
        busy = before[index] + microbatches * (forward[index] + backward[index])
        if not stage.has_backward:
            # Its last forward still has to reach the loss and come back as far as any gradient goes.
            bound = max(bound, busy + down[index] + after[-1] + way[-1])
            continue
        round_s = down[index] + back[index]
        gap_s = _gap(schedule, round_s, stage.depth, microbatches, forward[index], backward[index])
        bound = max(bound, busy + max(0.0, after[index] - late[index]) + gap_s)
    return bound


def _gap(
    schedule: ScheduleKind, round_s: float, depth: int, microbatches: int, forward_s: float, backward_s: float
) -> float:
    """Return the least seconds that a stage idles between its first forward and its last backward under a schedule.

    `round_s` is the seconds of a microbatch from the stage to the loss and back, `depth` the number of stages to the loss.
    `forward_s` and `backward_s` are the stage's own seconds of a microbatch.
    """
    if schedule == "gpipe":
        return round_s
    warm_up = 2 * depth if schedule == "eager-1f1b" else depth
    gaps = (max(0.0, round_s - warm_up * forward_s), max(0.0, round_s - warm_up * backward_s))
    return sum(gaps) if microbatches > warm_up + 1 else max(gaps)


def expected_s(candidates: Sequence[Candidate]) -> list[float]:
    """Return the mean seconds of each candidate's step over draws of random samples, with gradient reduction and optimizer.

    The makespans are those of the simulator, for candidates whose stages do not share ranks.
    """
    if not candidates:
        return []
    ends = _Union.of(candidates).play()  # [draws, stages]
    found: list[float] = []
    first = 0
    for candidate in candidates:
        last = first + len(candidate.stages)
        draws = len(candidate.durations)
        found.append(float((ends[:draws, first:last] + np.array(candidate.tail_s)).max(axis=1).mean()))
        first = last
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Union:
    """Simulator of many candidates at once, with arrays over the stages of all candidates, numbered one after the other.

    It advances in ticks. In one tick a stage runs at most one forward or backward, and these do not depend on each other. The
    number of a tick is a sort key of `mmcompile.planner.schedule.order`.
    """

    seconds: tuple[Array, Array, Array]
    """Seconds of forward, of the backward's part that earlier stages await, of its rest: [draws, stages, microbatches] each."""
    count: Index
    """Number of microbatches of each stage, [stages]."""
    step: Index
    """Number of ticks (steps of the simulation) from one microbatch to the next in each stage, [stages]."""
    start: Index
    """Number of the tick (step of the simulation) in which each stage runs its first forward, [stages]."""
    turn: Index
    """Number of the tick (step of the simulation) in which each stage runs its first backward, [stages]."""
    backward: NDArray[np.bool_]
    into: Index
    """Row s: indices of edges over which stage s receives forward tensors, padded with the number of edges, [stages, most]."""
    out: Index
    """Row s: indices of edges over which stage s receives gradients, padded with the number of edges, [stages, most]."""
    source: Index
    """Index of the stage that sends forward over each edge, [edges]."""
    target: Index
    """Index of the stage that sends a gradient back over each edge, [edges]; the number of stages for edges without gradient."""
    link_s: Array

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> _Union:
        durations = [candidate.durations for candidate in candidates]
        draws = max(len(own) for own in durations)
        most = max(own.shape[2] for own in durations)
        padded = np.concatenate([_padded(own, draws, most) for own in durations], axis=1)
        late = np.concatenate([np.full(len(c.stages), c.setting.schedule == "zb-h1") for c in candidates])[
            None, :, None
        ]
        forward, input_grad, weight_grad = (padded[..., part] for part in range(3))
        stages = [(stage, c.setting) for c in candidates for stage in c.stages]
        rules = np.array([ticks(setting.schedule, stage.depth, setting.num_microbatches) for stage, setting in stages])
        offsets = np.cumsum([0, *(len(c.stages) for c in candidates)]).tolist()
        edges = sorted(
            (source + offset, target + offset, seconds)
            for candidate, offset in zip(candidates, offsets, strict=False)
            for (source, target), seconds in candidate.link_s.items()
        )
        backward = np.array([stage.has_backward for stage, _ in stages])
        source = np.array([edge[0] for edge in edges], dtype=np.int64)
        target = np.array([edge[1] for edge in edges], dtype=np.int64)
        gradient = backward[source]
        return cls(
            seconds=(forward, np.where(late, input_grad, input_grad + weight_grad), np.where(late, weight_grad, 0.0)),
            count=np.array([setting.num_microbatches for _, setting in stages]),
            step=rules[:, 0],
            start=rules[:, 1],
            turn=rules[:, 2],
            backward=backward,
            into=_lists(target, len(stages), np.ones_like(gradient)),
            out=_lists(source, len(stages), gradient),
            source=source,
            target=np.where(gradient, target, len(stages)),
            link_s=np.array([edge[2] for edge in edges]),
        )

    def play(self) -> Array:
        """Simulate all draws of samples; return seconds at which each stage of all candidates has finished, [draws, stages]."""
        draws, num_stages = self.seconds[0].shape[:2]
        most, edges = int(self.count.max()), len(self.source)
        clock = np.zeros((draws, num_stages))
        # [draws, edges + 1, microbatches + 1]: when a message has arrived. Before the first column: the channel's start.
        there = np.zeros((draws, edges + 1, most + 1))
        back = np.zeros((draws, edges + 1, most + 1))
        last = self.turn + self.step * self.count
        for tick in range(int(self.start.min()), int(last.max())):
            self._advance(clock, tick - self.start, self.seconds[0], there, self.into, self.source)
            since = np.where(self.backward, tick - self.turn, -1)
            runs, microbatch = self._advance(clock, since, self.seconds[1], back, self.out, self.target)
            clock[:, runs] += self.seconds[2][:, runs, microbatch]
        return clock

    def _advance(
        self, clock: Array, since: Index, seconds: Array, arrived: Array, awaited: Index, ends: Index
    ) -> tuple[Index, Index]:
        """Run all forwards, or all backwards, of one tick; update `clock` and `arrived` in place.

        Args:
            clock: seconds at which each stage is done so far, [draws, stages].
            since: ticks since the first forward, or first backward, of each stage, [stages]; negative before it.
            seconds: seconds of each microbatch, [draws, stages, microbatches].
            arrived: seconds at which each message has arrived, [draws, edges + 1, microbatches + 1].
            awaited: indices of the edges over which each stage receives, [stages, most].
            ends: index of the stage that sends over each edge, [edges]; the number of stages for none.

        Returns:
            Indices of the stages that run in this tick, and the microbatch that each of them runs.
        """
        runs = np.flatnonzero((since >= 0) & (since % self.step == 0) & (since < self.step * self.count))
        microbatch = since[runs] // self.step[runs]
        if len(runs):
            ready = arrived[:, awaited[runs], microbatch[:, None] + 1].max(axis=2)
            clock[:, runs] = np.maximum(clock[:, runs], ready) + seconds[:, runs, microbatch]
            carried = np.full(len(since) + 1, -1)
            carried[runs] = microbatch
            sends = np.flatnonzero(carried[ends] >= 0)
            column = carried[ends[sends]]
            done = np.maximum(clock[:, ends[sends]], arrived[:, sends, column])
            arrived[:, sends, column + 1] = done + self.link_s[sends]
        return runs, microbatch


def _padded(durations: Array, draws: int, most: int) -> Array:
    """Return durations padded to [draws, stages, most, 3]: added microbatches take 0 s, and a single draw is repeated."""
    own, _, count, _ = durations.shape
    wide = np.broadcast_to(durations, (draws, *durations.shape[1:])) if own < draws else durations
    return np.pad(wide, ((0, 0), (0, 0), (0, most - count), (0, 0)))


def _lists(ends: Index, num_stages: int, kept: NDArray[np.bool_]) -> Index:
    """Return the indices of the `kept` edges of each stage, [stages, most], padded with the number of edges.

    `ends` has the stage of each edge.
    """
    found: list[list[int]] = [[] for _ in range(num_stages)]
    for edge, end in enumerate(ends.tolist()):
        if kept[edge]:
            found[end].append(edge)
    most = max(1, *map(len, found))
    return np.array([[*own, *[len(ends)] * (most - len(own))] for own in found], dtype=np.int64)
