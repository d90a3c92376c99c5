"""A plan's step, simulated again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan

from mmcompile.errors import PlanError
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.step_replay import replay, stage_groups

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
TEXT = Part(name="language_model", layers=12, stages=3)


def test_a_chain_of_equal_stages_takes_the_textbook_time() -> None:
    with_links = hand_plan((TEXT,), num_microbatches=8)
    stage = with_links.stages[0].prediction
    seconds = (8 + 3 - 1) * stage.times.total_s
    assert replay(with_links).iteration_s >= seconds
    free = replace(with_links, links=tuple(replace(link, num_bytes=0) for link in with_links.links))
    assert replay(free).iteration_s == pytest.approx(seconds, rel=1e-3)
    assert replay(free).bubble == pytest.approx(2 / 10, abs=1e-3)


def test_memory_peaks_are_the_plans() -> None:
    plan = hand_plan((VISION, TEXT), num_microbatches=8)
    peaks = [curve.peak_bytes for curve in replay(plan).memory()]
    assert peaks == [stage.prediction.total_bytes for stage in plan.stages]
    gpipe = [curve.peak_bytes for curve in replay(plan, schedule="gpipe").memory()]
    assert gpipe[0] == peaks[0] and all(one > two for one, two in zip(gpipe[1:], peaks[1:], strict=True))


def test_causes_add_up_to_the_idle_time() -> None:
    plan = hand_plan((VISION, replace(TEXT, stages=2)), num_microbatches=8)
    step = replay(plan, loads={"language_model": [1.0, 2.0] * 4})
    for share in step.bubbles():
        numbers = [n for n, group in enumerate(step.groups) if group.stages[0].name.startswith(share.chain)]
        idle = sum(step.idle(number) for number in numbers) / len(numbers)
        assert share.warm_up + share.stages + share.microbatches + share.links == pytest.approx(idle)


def test_heavier_microbatches_take_longer() -> None:
    plan = hand_plan((VISION, TEXT), num_microbatches=4)
    plain, heavy = replay(plan), replay(plan, loads={"language_model": [1.0, 1.0, 1.0, 3.0]})
    assert heavy.iteration_s > plain.iteration_s
    assert replay(plan, loads={"language_model": [1.0] * 4}).iteration_s == plain.iteration_s


def test_more_microbatches_and_what_the_optimizer_adds() -> None:
    plan = hand_plan((TEXT,), num_microbatches=4)
    assert replay(plan, num_microbatches=16).bubble < replay(plan).bubble
    slower = replace(plan, predicted=replace(plan.predicted, reduce_s=0.5))
    assert replay(slower).iteration_s == pytest.approx(replay(plan).iteration_s + 0.5)


def test_stages_that_share_ranks_are_one_group() -> None:
    plan = hand_plan((VISION, replace(TEXT, tp=2)))
    shared = replace(
        plan,
        chains=(
            replace(plan.chains[0], stages=(replace(plan.chains[0].stages[0], ranks=(1, 2)),)),
            plan.chains[1],
        ),
    )
    groups = stage_groups(shared)
    assert [group.name for group in groups] == [
        "vision_tower.0 + language_model.0",
        "language_model.1",
        "language_model.2",
    ]
    assert replay(shared).iteration_s > replay(plan).iteration_s


def test_a_plan_without_links_is_refused() -> None:
    plan = replace(hand_plan((VISION, TEXT)), links=(), strategy="replicated")
    with pytest.raises(PlanError, match="4 stages and no links between them.*by replicated"):
        replay(plan)
    assert replay(replace(hand_plan((replace(TEXT, stages=1),)), links=())).bubble == 0


def test_replicas_stand_for_one() -> None:
    def seconds(plan: Plan) -> float:
        return replay(plan).iteration_s

    assert seconds(hand_plan((VISION, replace(TEXT, dp=4)), cluster="8x8xH100")) == pytest.approx(
        seconds(hand_plan((VISION, TEXT), cluster="8x8xH100")), rel=1e-2
    )
