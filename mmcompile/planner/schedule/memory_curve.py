"""`memory_curve`: bytes of each rank over a simulated step.

A forward allocates its activations when it starts. They are freed when the backward B of the same microbatch ends; where the
backward is split, I frees what W does not need, and W the rest. The forward of a stage that runs no backward for the
microbatch keeps nothing. Parameters, gradients and optimizer state are there all the time. Messages under way and what one
kernel needs for itself are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmcompile.planner.schedule.schedule import Action, ActionKind, Schedule
from mmcompile.planner.schedule.simulate import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBytes:
    """Bytes that a stage keeps of one microbatch for its backward."""

    activation_bytes: int
    weight_grad_bytes: int | None = None
    """Part that W needs; None for all of it."""

    @property
    def until_weight_grad(self) -> int:
        """Bytes kept until the weight gradient."""
        return self.activation_bytes if self.weight_grad_bytes is None else self.weight_grad_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes of one rank over time."""

    rank: int
    points: tuple[tuple[float, int], ...]
    """(seconds, bytes from then on), in order; begins at 0 with the bytes that are there all the time."""

    @property
    def peak_bytes(self) -> int:
        """Largest bytes over the step."""
        return max(num_bytes for _, num_bytes in self.points)


def memory_curve(
    schedule: Schedule,
    timeline: Timeline,
    saved: Mapping[str, SavedBytes | Sequence[SavedBytes]],
    fixed_bytes: Mapping[str, int],
) -> tuple[MemoryCurve, ...]:
    """Follow the bytes of each rank through a step.

    Args:
        timeline: of the schedule, with its events recorded.
        saved: stage name -> what it keeps of every microbatch, or of each.
        fixed_bytes: stage name -> what it holds all the time.

    Returns:
        One a rank.
    """
    when = {(event.stage, event.kind, event.microbatch): (event.start_s, event.end_s) for event in timeline.events}
    names = schedule.stages
    backward = (ActionKind.B, ActionKind.I)
    returns = {(a.stage, a.microbatch) for actions in schedule.ranks for a in actions if a.kind in backward}
    curves: list[MemoryCurve] = []
    for rank, actions in enumerate(schedule.ranks):
        held = sum(fixed_bytes[names[stage]] for stage in {action.stage for action in actions})
        points = [(0.0, held)]
        for action in actions:
            name, microbatch = names[action.stage], action.microbatch
            if not action.kind.is_compute or (action.stage, microbatch) not in returns:
                continue
            given = saved[name]
            change = _change(action, given if isinstance(given, SavedBytes) else given[microbatch])
            if change:
                held += change
                start_s, end_s = when[name, action.kind, microbatch]
                points.append((start_s if action.kind is ActionKind.F else end_s, held))
        curves.append(MemoryCurve(rank=rank, points=tuple(points)))
    return tuple(curves)


def _change(action: Action, saved: SavedBytes) -> int:
    match action.kind:
        case ActionKind.F:
            return saved.activation_bytes
        case ActionKind.I:
            return saved.until_weight_grad - saved.activation_bytes
        case ActionKind.W:
            return -saved.until_weight_grad
        case _:
            return -saved.activation_bytes
