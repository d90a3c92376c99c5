"""Bytes over a simulated step: hand-made steps, and the microbatches in flight that the schedules state."""

from __future__ import annotations

from typing import get_args

import pytest
from support.plans.plan_flows import ToyStage, chain, random_case

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.schedule.schedule import Schedule, build_schedule, in_flight
from mmcompile.planner.schedule.simulate import simulate
from mmcompile.report.step_replay import memory_curve

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
UNIT = LayerTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (4, 2), (4, 9), (3, 12)])
def test_peaks_of_a_chain_are_the_microbatches_in_flight(kind: ScheduleKind, stages: int, microbatches: int) -> None:
    toys, flow = chain(stages)
    schedule = build_schedule(toys, [flow] * microbatches, kind)
    timeline = simulate(schedule, dict.fromkeys(flow.stages, UNIT))
    saved = {name: [10 + index] * microbatches for index, name in enumerate(flow.stages)}
    fixed = {name: 1000 * index for index, name in enumerate(flow.stages)}
    curves = memory_curve(schedule, timeline, saved, fixed)
    for index, (toy, curve) in enumerate(zip(toys, curves, strict=True)):
        assert curve.rank == index
        assert curve.peak_bytes == 1000 * index + in_flight(kind, toy.depth, microbatches) * (10 + index)
        assert curve.points[0] == (0.0, 1000 * index)
        assert curve.points[-1][1] == 1000 * index
        times = [seconds for seconds, _ in curve.points]
        assert times == sorted(times) and times[-1] <= timeline.makespan_s


def test_a_backward_in_two_parts_frees_with_the_weight_gradient() -> None:
    schedule = Schedule.parse("stages: a\nrank 0: 0F0 0F1 0I0 0I1 0W0 0W1")
    saved = {"a": [10, 10]}
    (curve,) = memory_curve(schedule, simulate(schedule, {"a": UNIT}), saved, {"a": 100})
    assert curve.points == ((0, 100), (0, 110), (1, 120), (5, 110), (6, 100))
    assert curve.peak_bytes == 120


def test_microbatches_may_differ_and_the_worst_counts() -> None:
    toys, flow = chain(1)
    schedule = build_schedule(toys, [flow] * 3)
    saved = {"s0": [3, 50, 7]}
    (curve,) = memory_curve(schedule, simulate(schedule, {"s0": UNIT}), saved, {"s0": 1})
    assert curve.points == ((0, 1), (0, 4), (3, 1), (3, 51), (6, 1), (6, 8), (9, 1))
    assert curve.peak_bytes == 51


def test_without_a_backward_nothing_is_kept() -> None:
    toys, flow = chain(2, backward=False)
    schedule = build_schedule(toys, [flow] * 4)
    saved = dict.fromkeys(flow.stages, [10] * 4)
    curves = memory_curve(schedule, simulate(schedule, dict.fromkeys(flow.stages, UNIT)), saved, {"s0": 5, "s1": 6})
    assert [curve.points for curve in curves] == [((0.0, 5),), ((0.0, 6),)]


def test_stages_of_one_rank_add_up() -> None:
    stages = [ToyStage(name=f"s{i}", ranks=(0,), depth=1 - i) for i in range(2)]
    _, flow = chain(2)
    schedule = build_schedule(stages, [flow] * 2)
    saved = {"s0": [1] * 2, "s1": [10] * 2}
    (curve,) = memory_curve(
        schedule, simulate(schedule, dict.fromkeys(flow.stages, UNIT)), saved, {"s0": 100, "s1": 1000}
    )
    assert [num_bytes for _, num_bytes in curve.points] == [1100, 1101, 1111, 1101, 1100, 1101, 1111, 1101, 1100]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(15))
def test_all_is_freed_and_never_more_held_than_stated(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    schedule = build_schedule(stages, flows, kind)
    names = [stage.name for stage in stages]
    timeline = simulate(schedule, dict.fromkeys(names, UNIT))
    saved = dict.fromkeys(names, [1] * len(flows))
    for curve in memory_curve(schedule, timeline, saved, dict.fromkeys(names, 0)):
        assert min(num_bytes for _, num_bytes in curve.points) == 0 == curve.points[-1][1]
        mine = [stage for stage in stages if stage.ranks == (curve.rank,)]
        assert curve.peak_bytes <= sum(in_flight(kind, stage.depth, len(flows)) for stage in mine)
