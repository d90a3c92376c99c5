"""Results of a simulated step: iteration time, idle time by cause, memory; and a table of several schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mmcompile.config import ScheduleKind
from mmcompile.planner.plan.bottlenecks import CAUSE_WORDS, bubble_text, causes, memory_bytes
from mmcompile.planner.plan.plan_record import BubbleShare
from mmcompile.planner.plan.stage_rows import rank_ranges
from mmcompile.report.pictures.text_timeline import text_timeline
from mmcompile.report.step_replay import Replay
from mmcompile.units import columns, counted, format_bytes, format_seconds

_MAX_GROUPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFigures:
    """Idle times and memory of a group of ranks that do the same work in a step."""

    stages: str
    ranks: tuple[int, ...]
    busy_s: float
    idle: float
    """Idle share of the step, 0..1."""
    fixed_bytes: int
    """Bytes of parameters, gradients and optimizer state."""
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Times, idle shares and memory of one simulated step."""

    schedule: ScheduleKind
    num_microbatches: int
    iteration_s: float
    planned_s: float
    """Seconds predicted by the plan, for the plan's schedule, number of microbatches and data."""
    bubble: float
    bubbles: tuple[BubbleShare, ...]
    groups: tuple[GroupFigures, ...]
    limit_bytes: int
    """Memory limit of one rank."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a rank of the fullest group."""
        return max(group.peak_bytes for group in self.groups)

    @property
    def fits(self) -> bool:
        """True if the peak bytes are within the memory limit of a rank."""
        return self.peak_bytes <= self.limit_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields, `peak_bytes` and `fits` as JSON values: times [s], idle shares 0..1, memory [bytes]."""
        return msgspec.to_builtins(self) | {"peak_bytes": self.peak_bytes, "fits": self.fits}

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}, {counted(self.num_microbatches, 'microbatch')}: iteration {format_seconds(self.iteration_s)} "
            f"(planned {format_seconds(self.planned_s)}), bubble {self.bubble:.1%}"
        ]
        lines += [f"  {bubble_text(share)}" for share in self.bubbles]
        lines += ["", *columns([_GROUP_HEADER, *map(_group_row, self.groups[:_MAX_GROUPS])], left=(0, 1))]
        if len(self.groups) > _MAX_GROUPS:
            lines.append(f"and {len(self.groups) - _MAX_GROUPS} more")
        if not self.fits:
            lines += ["", f"does not fit: {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}"]
        return "\n".join(lines)


def summarize(step: Replay) -> Simulation:
    """Summarize a simulated step: times, idle shares by cause, memory."""
    curves = step.memory()
    return Simulation(
        schedule=step.kind,
        num_microbatches=step.num_microbatches,
        iteration_s=step.iteration_s,
        planned_s=step.plan.predicted.iteration_s,
        bubble=step.bubble,
        bubbles=step.bubbles(),
        groups=tuple(
            GroupFigures(
                stages=group.name,
                ranks=group.ranks,
                busy_s=step.timeline.busy_s[index],
                idle=step.idle(index),
                fixed_bytes=curves[index].points[0][1],
                peak_bytes=curves[index].peak_bytes,
            )
            for index, group in enumerate(step.groups)
        ),
        limit_bytes=memory_bytes(step.plan),
    )


def timeline_text(step: Replay) -> str:
    """Draw the simulated step in characters: a row for each group of stages that share ranks, at most `_MAX_GROUPS` rows."""
    names = [group.name for group in step.groups]
    left = len(names) - _MAX_GROUPS
    text = text_timeline(step.timeline.events, names[:_MAX_GROUPS])
    return f"{text}\nand {left} more groups of ranks" if left > 0 else text


def compare(steps: Sequence[Simulation]) -> str:
    """Return a table of schedules, fastest first."""
    ordered = sorted(steps, key=lambda step: step.iteration_s)
    best_s = ordered[0].iteration_s
    header = ("schedule", "iteration", "", "bubble", *CAUSE_WORDS.values(), "fullest rank", "")
    return "\n".join(columns([header, *(_compared(step, best_s) for step in ordered)], left=(0,)))


def _compared(step: Simulation, best_s: float) -> tuple[str, ...]:
    slower = step.iteration_s / best_s - 1
    shares = _mean_causes(step)
    return (
        step.schedule,
        format_seconds(step.iteration_s),
        "best" if slower == 0 else f"{slower:+.1%}",
        f"{step.bubble:.1%}",
        *(f"{share:.1%}" for share in shares.values()),
        format_bytes(step.peak_bytes),
        "" if step.fits else "does not fit",
    )


def _mean_causes(step: Simulation) -> Mapping[str, float]:
    """Return cause of idle time -> its share of the step time, as the mean over all ranks."""
    weights = {share.chain: 0 for share in step.bubbles}
    for group in step.groups:
        for name in group.stages.split(" + "):
            chain = name.rpartition(".")[0]
            if chain in weights:
                weights[chain] += len(group.ranks)
    total = sum(weights.values())
    return {
        cause: sum(weights[share.chain] * causes(share)[cause] for share in step.bubbles) / total
        for cause in CAUSE_WORDS
    }


_GROUP_HEADER = ("ranks", "stages", "busy", "idle", "always held", "peak")


def _group_row(group: GroupFigures) -> tuple[str, ...]:
    return (
        rank_ranges(group.ranks),
        group.stages,
        format_seconds(group.busy_s),
        f"{group.idle:.1%}",
        format_bytes(group.fixed_bytes),
        format_bytes(group.peak_bytes),
    )
