"""A step plan becomes units and edges of placed stages, and those a schedule."""

from __future__ import annotations

import pytest

from mmcompile.batching.schedule_units import num_slots, units_of
from mmcompile.batching.step_plan import MicrobatchPlan, RowExchange, StepPlan
from mmcompile.errors import PlanError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import CrossEdge, Flow, FlowEdge, schedule_units

STAGES = (
    PlacedStage(name="vision.0#0", ranks=(0,), depth=2, program="vision.0", tower="vision"),
    PlacedStage(name="vision.0#1", ranks=(1,), depth=2, program="vision.0", tower="vision", replica=1),
    PlacedStage(name="lm.0", ranks=(2,), depth=1, tower="lm"),
    PlacedStage(name="lm.1", ranks=(3,), depth=0, tower="lm"),
)
VISION = Flow(stages=("vision.0",), edges=(), backward=("vision.0",))
LANGUAGE = Flow(
    stages=("lm.0", "lm.1"), edges=(FlowEdge(source="lm.0", target="lm.1", gradient=True),), backward=("lm.0", "lm.1")
)


def microbatch(index: int, flow: Flow, tower: str, replica: int = 0, slot: int = 0, lag: int = 0) -> MicrobatchPlan:
    return MicrobatchPlan(
        index=index,
        samples=(index,),
        pattern="p",
        sizes={},
        flow=flow,
        inputs=(),
        links=(),
        tower=tower,
        replica=replica,
        slot=slot,
        lag=lag,
        number=slot + 2 * lag,
    )


def exchange(source: int, target: int, name: str = "features", gradient: bool = True) -> RowExchange:
    return RowExchange(
        source=source,
        target=target,
        producer="vision.0",
        consumer="lm.0",
        name=name,
        target_name=name,
        rows=((0, 1),),
        into=((0, 1),),
        samples=(0,),
        gradient=gradient,
    )


PLAN = StepPlan(
    step=1,
    num_samples=4,
    microbatches=(
        microbatch(0, VISION, "vision"),
        microbatch(1, VISION, "vision", lag=1),
        microbatch(2, VISION, "vision", replica=1),
        microbatch(3, LANGUAGE, "lm"),
        microbatch(4, LANGUAGE, "lm", slot=1),
    ),
    exchanges=(
        exchange(0, 3),
        exchange(0, 3, "deep", gradient=False),
        exchange(1, 4, gradient=False),
        exchange(2, 3),
    ),
)


def test_replicas_and_lags() -> None:
    units, edges = units_of(PLAN, STAGES)
    assert [(u.number, u.slot, u.backward_slot, u.flow.stages) for u in units] == [
        (0, 0, 0, ("vision.0#0",)),
        (2, 0, 1, ("vision.0#0",)),
        (0, 0, 0, ("vision.0#1",)),
        (0, 0, 0, ("lm.0", "lm.1")),
        (1, 1, 1, ("lm.0", "lm.1")),
    ]
    assert edges == (
        CrossEdge(source=("vision.0#0", 0), target=("lm.0", 0), gradient=True),
        CrossEdge(source=("vision.0#0", 2), target=("lm.0", 1), gradient=False),
        CrossEdge(source=("vision.0#1", 0), target=("lm.0", 0), gradient=True),
    )
    assert num_slots(PLAN) == 2
    text = str(schedule_units(STAGES, units, edges, num_slots=2))
    assert "rank 1: 1F0 1SEND_F0>2 1RECV_B0<2 1B0" in text
    assert "0F2 0SEND_F2>2.1" in text


def test_a_stage_that_a_replica_lacks_is_refused() -> None:
    with pytest.raises(PlanError, match="names stage lm.0; replica 0 of tower 'vision' has vision.0"):
        units_of(StepPlan(step=1, num_samples=1, microbatches=(microbatch(0, LANGUAGE, "vision"),)), STAGES)
    with pytest.raises(PlanError, match="replica 2 of tower 'vision' has none"):
        units_of(StepPlan(step=1, num_samples=1, microbatches=(microbatch(0, VISION, "vision", 2),)), STAGES)


def test_a_step_without_microbatches_has_no_slot() -> None:
    assert num_slots(StepPlan(step=1, num_samples=0, microbatches=())) == 0
