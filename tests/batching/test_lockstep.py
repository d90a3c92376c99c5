"""Replicas that share parameters are planned in lockstep, or the step is refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmcompile.batching.lockstep import check_lockstep
from mmcompile.batching.step_plan import MicrobatchPlan
from mmcompile.codegen.program import PatternPrograms, PreparedMicrobatch, StageProgram
from mmcompile.errors import BatchError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import Flow

STAGES = ("lm.0", "lm.1")
PLACED = tuple(
    PlacedStage(
        name=f"{name}#{replica}",
        program=name,
        ranks=(2 * index + replica,),
        depth=1 - index,
        replica=replica,
        sharing=(2 * index, 2 * index + 1),
    )
    for index, name in enumerate(STAGES)
    for replica in range(2)
)


def program(name: str, *gathered: str) -> StageProgram:
    return StageProgram(
        stage=name, pattern="p", source="", inputs=(), outputs=(), parameters=(), buffers=(), gathered=gathered,
        is_loss=name == "lm.1", has_backward=True,
    )  # fmt: skip


def prepared(*gathered: str) -> PreparedMicrobatch:
    programs = {"lm.0": program("lm.0", *gathered), "lm.1": program("lm.1", "c")}
    return PreparedMicrobatch(
        programs=PatternPrograms(pattern="p", programs=programs, per_token=True), sizes={}, values={}, link_shapes={}
    )


PREPARED = prepared("a", "b")


def microbatch(replica: int, slot: int = 0, *, weight: float = 0.5, lag: int = 0) -> MicrobatchPlan:
    return MicrobatchPlan(
        index=2 * slot + replica,
        samples=(10 * slot + replica,),
        pattern="p",
        sizes={},
        flow=Flow(stages=STAGES, edges=(), backward=STAGES),
        inputs=(),
        links=(),
        loss_weight=weight,
        replica=replica,
        slot=slot,
        lag=lag,
        number=slot + 2 * lag,
    )


BOTH = [microbatch(replica, slot) for slot in range(2) for replica in range(2)]


def test_equal_work_passes() -> None:
    check_lockstep(BOTH, [PREPARED] * 4, PLACED)
    mute = [replace(each, loss_weight=0.0) if each.slot else each for each in BOTH]
    check_lockstep(mute, [PREPARED] * 4, PLACED)


def test_replicas_that_hold_all_parameters_need_none_of_it() -> None:
    check_lockstep(BOTH[:3], [PREPARED] * 3, [replace(stage, sharing=()) for stage in PLACED])


def test_a_replica_without_samples_is_named() -> None:
    with pytest.raises(
        BatchError, match="replicas of lm.0 .* microbatch 1, replica 0 has sample 10, and replica 1 has none;"
    ):
        check_lockstep(BOTH[:3], [PREPARED] * 3, PLACED)
    late = [*BOTH[:2], microbatch(0, 1), microbatch(1, 1, lag=1)]
    with pytest.raises(BatchError, match="microbatch 1, replica 0 has sample 10, and replica 1 has none;"):
        check_lockstep(late, [PREPARED] * 4, PLACED)


@pytest.mark.parametrize(
    ("gathered", "words"),
    [
        (("a",), "does not use b,"),
        ((), "does not use a and 1 others,"),
        (("a", "b", "z"), "uses z too,"),
        (("b", "a"), "uses parameters in another order,"),
    ],
)
def test_other_parameters_are_named(gathered: tuple[str, ...], words: str) -> None:
    other = prepared(*gathered)
    with pytest.raises(
        BatchError, match=f"in microbatch 1, replica 1 with sample 11 {words} and replica 0 has sample 10; give"
    ):
        check_lockstep(BOTH, [PREPARED, PREPARED, PREPARED, other], PLACED)


def test_another_backward_is_named() -> None:
    mute = [*BOTH[:3], microbatch(1, 1, weight=0.0)]
    with pytest.raises(
        BatchError, match="replicas of lm.1 .* replica 1 with sample 11 has no token to learn from, and"
    ):
        check_lockstep(mute, [PREPARED] * 4, PLACED)
    forward = [*BOTH[:3], replace(BOTH[3], flow=Flow(stages=STAGES, edges=(), backward=("lm.1",)))]
    with pytest.raises(BatchError, match="replicas of lm.0 .* replica 1 with sample 11 runs no backward, and"):
        check_lockstep(forward, [PREPARED] * 4, PLACED)
