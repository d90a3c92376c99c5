"""`predict_measured`: seconds of a step from measured layers, actions, messages, preparation and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmcompile.costmodel.calibration import RuntimeCosts
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.schedule.measured import LinkMessages, measured_step
from mmcompile.planner.schedule.schedule import ActionKind, Placed, build_schedule
from mmcompile.planner.schedule.simulate import Timeline, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedParameters:
    """Parameters that a rank's optimizer updates."""

    num_bytes: int = 0
    num_tensors: int = 0

    def seconds(self, runtime: RuntimeCosts) -> float:
        """Return the seconds of the update."""
        return self.num_bytes * runtime.optimizer_s_per_byte + self.num_tensors * runtime.optimizer_s_per_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A predicted step: `iteration_s = prepare_s + step_s + timeline.makespan_s + optimizer_s`."""

    iteration_s: float
    prepare_s: float
    """Seconds in which rank 0 collates and plans; the others wait."""
    optimizer_s: float
    """Seconds of rank 0's optimizer; longer ones of other ranks delay their next step."""
    timeline: Timeline


def predict_measured(
    stages: Sequence[Placed],
    times: Mapping[str, LayerTimes],
    messages: Sequence[LinkMessages],
    trained: Mapping[int, TrainedParameters],
    *,
    runtime: RuntimeCosts,
    prepare_s: float,
    num_microbatches: int,
) -> MeasuredStep:
    """Simulate a step of the engine in which every microbatch passes through every stage.

    Args:
        stages: placed, each on one rank.
        times: of each stage, its layers alone.
        messages: between stages, those of one rank too.
        trained: trained parameters by rank.
        prepare_s: of one microbatch on rank 0.
        num_microbatches: of the step.
    """
    flow, durations, link_s = measured_step(stages, times, messages, runtime)
    prepared_s = prepare_s * num_microbatches
    optimizer_s = {
        r: trained.get(r, TrainedParameters()).seconds(runtime) for r in {stage.ranks[0] for stage in stages}
    }
    late_s = {r: max(0.0, own - optimizer_s[0] - prepared_s) for r, own in optimizer_s.items()}
    schedule = build_schedule(stages, [flow] * num_microbatches)
    timeline = simulate(schedule, durations, link_s)
    if any(late_s.values()):
        timeline = simulate(schedule, _delayed(durations, timeline, late_s, num_microbatches), link_s)
    return MeasuredStep(
        iteration_s=prepared_s + runtime.step_s + timeline.makespan_s + optimizer_s[0],
        prepare_s=prepared_s,
        optimizer_s=optimizer_s[0],
        timeline=timeline,
    )


def _delayed(
    durations: Mapping[str, LayerTimes], timeline: Timeline, late_s: Mapping[int, float], num_microbatches: int
) -> dict[str, Sequence[LayerTimes]]:
    """Delay ranks that are late: add the part that no wait hides to their first forward."""
    delayed: dict[str, Sequence[LayerTimes]] = {name: [own] * num_microbatches for name, own in durations.items()}
    begun: set[int] = set()
    for event in timeline.events:
        if event.rank not in begun and event.kind is ActionKind.F:
            begun.add(event.rank)
            first = durations[event.stage]
            first = replace(first, forward_s=first.forward_s + max(0.0, late_s[event.rank] - event.start_s))
            delayed[event.stage] = [first, *delayed[event.stage][1:]]
    return delayed
