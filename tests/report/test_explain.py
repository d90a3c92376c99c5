"""One stage or layer in words: the numbers are the plan's, the what-ifs the simulator's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan

from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.explain import explain
from mmcompile.report.moves import boundary_moves, equal_shares, move_layers
from mmcompile.report.step_replay import replay

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
TEXT = Part(name="language_model", layers=12, stages=3, tp=2)


@pytest.fixture
def plan() -> Plan:
    return hand_plan((VISION, TEXT), num_microbatches=8)


def test_a_stage(plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("explain_stage.txt", str(explain(plan, "language_model.1")))


def test_a_layer(plan: Plan, golden: Callable[[str, str], None]) -> None:
    golden("explain_layer.txt", str(explain(plan, "model.language_model.layers.5")))


def test_a_frozen_stage(plan: Plan) -> None:
    text = str(explain(plan, "vision_tower.0"))
    assert "no backward" in text and "100% frozen" in text and "the chain begins here" in text
    assert "what if" not in text, "a single stage has no neighbour in its chain"


def test_layers_by_any_name(plan: Plan) -> None:
    for name in ("model.language_model.layers.5", "language_model.5", "*language_model.layers.5"):
        assert explain(plan, name).layer == "model.language_model.layers.5"
    with pytest.raises(ConfigError, match="matches 2 layers, name one"):
        explain(plan, "*.layers.5")


def test_what_does_not_exist(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"among the stages vision_tower\.0, language_model\.0\.\.2: .*did you mean"):
        explain(plan, "model.language_model.layer.5")


def test_a_moved_cut_keeps_all_work(plan: Plan) -> None:
    stage = plan.stage("language_model.1")
    to_before, to_after = boundary_moves(plan, stage, equal_shares(plan))
    assert (to_before.layers, to_before.target) == (("model.language_model.layers.4",), "language_model.0")
    assert (to_after.layers, to_after.target) == (("model.language_model.layers.7",), "language_model.2")
    assert to_before.change > 0, "equal stages are best"
    assert to_before.over_bytes == 0


def test_a_better_cut_is_found_to_be_better() -> None:
    """Three layers beside one: giving the cut back what the search would have done is faster."""
    plan = hand_plan((replace(TEXT, layers=4, stages=2),), num_microbatches=8)
    there = move_layers(plan, plan.stage("language_model.0"), 1, 1, equal_shares(plan))
    assert there is not None and there.change > 0.2
    assert move_layers(plan, plan.stage("language_model.0"), 0, 1, equal_shares(plan)) is None, "nothing is emptied"


def test_moving_to_a_stage_of_another_kind_is_not_simple() -> None:
    plan = hand_plan((VISION, TEXT))
    chains = list(plan.chains)
    first, *rest = chains[1].stages
    chains[1] = replace(chains[1], stages=(replace(first, has_backward=False), *rest))
    links = tuple(replace(link, gradient=()) for link in plan.links)
    other = replace(plan, chains=tuple(chains), links=links)
    assert not [move for move in explain(other, "language_model.1").moves if move.target == "language_model.0"]


def test_idle_time_is_the_simulators(plan: Plan) -> None:
    step = replay(plan)
    for number, group in enumerate(step.groups):
        busy_s = plan.num_microbatches * sum(stage.prediction.times.total_s for stage in group.stages)
        assert step.idle(number) == pytest.approx(1 - busy_s / step.timeline.makespan_s)
        assert explain(plan, group.stages[0].name).idle == step.idle(number)
