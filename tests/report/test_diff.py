"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan
from support.plans.template_jobs import even_template
from support.plans.with_recompute import with_recompute

from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.report.diff import diff_plans

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
TEXT = Part(name="language_model", layers=12, stages=3)


def other(plan: Plan) -> Plan:
    return replace(
        with_recompute(plan, "full"),
        predicted=replace(plan.predicted, iteration_s=1.0, bubble=0.25, gap=0.0),
    )


def test_equal_plans_do_not_differ() -> None:
    difference = diff_plans(hand_plan((VISION, TEXT)), hand_plan((VISION, TEXT)))
    assert difference.is_empty and str(difference) == "no difference"


def test_everything_that_differs_is_named_with_signs(golden: Callable[[str, str], None]) -> None:
    before = hand_plan((VISION, TEXT))
    after = other(hand_plan((replace(VISION, dp=2), replace(TEXT, stages=4, tp=2)), cluster="4x8xH100"))
    golden("diff.txt", str(diff_plans(before, after)))


def test_a_figure_back_is_the_figure_reversed() -> None:
    one, two = hand_plan((VISION, TEXT)), other(hand_plan((VISION, replace(TEXT, stages=4))))
    there, back = diff_plans(one, two), diff_plans(two, one)
    assert [(figure.before, figure.after) for figure in there.figures] == [
        (figure.after, figure.before) for figure in back.figures
    ]
    assert "iteration 1.25 s -> 1.00 s (-20.0%)" in str(there)
    assert "iteration 1.00 s -> 1.25 s (+25.0%)" in str(back)
    assert "bubble 21.0% -> 25.0% (+4.0 points)" in str(there)


def test_moved_layers_are_all_that_changed_their_stage() -> None:
    moved = diff_plans(hand_plan((TEXT,)), hand_plan((replace(TEXT, stages=4),))).moved
    assert [str(run) for run in moved] == [
        "language_model layer 3: language_model.0 -> language_model.1",
        "language_model layers 6..7: language_model.1 -> language_model.2",
        "language_model layers 9..11: language_model.2 -> language_model.3",
    ]


def test_a_chain_that_one_plan_lacks() -> None:
    audio = Part(name="audio_tower", layers=4, stages=2)
    text = str(diff_plans(hand_plan((VISION, TEXT)), hand_plan((VISION, audio, TEXT))))
    assert "audio_tower: - -> tp 1 cp 1 pp 2 dp 1 on 2 ranks" in text


def test_long_lists_are_counted() -> None:
    text = str(
        diff_plans(hand_plan((replace(TEXT, stages=1, layers=40),)), hand_plan((replace(TEXT, stages=40, layers=40),)))
    )
    assert "and 27 more" in text


def resilience(sizes: range, fault_tolerance: int = 1) -> Resilience:
    return Resilience(
        fault_tolerance=fault_tolerance,
        templates=tuple(even_template(size, 12) for size in sizes),
        num_nodes=8,
        devices_per_node=1,
        num_microbatches=32,
        layer_bytes={"language_model": (1 << 20,) * 12},
    )


def templates(before: Resilience | None, after: Resilience | None) -> list[str]:
    """What differs between plans that have nothing else different."""
    plan = hand_plan((VISION, TEXT))
    found = diff_plans(replace(plan, resilience=before), replace(plan, resilience=after))
    assert found == replace(diff_plans(plan, plan), templates=found.templates)
    assert found.is_empty == (before == after)
    return [str(one) for one in found.templates]


def test_templates_that_differ_are_told_in_words() -> None:
    one = resilience(range(2, 7))
    assert templates(one, one) == []
    two = templates(one, resilience(range(2, 5), fault_tolerance=2))
    assert two == [
        "fault tolerance: 1 -> 2",
        "nodes: any 4..8 nodes can be used in full; below 4 training stops -> any 6..8 nodes can be used in full; below 6 "
        "training stops",
        "5 nodes: 5 stages of 1 device, slowest 3.00 s, 9.00 s to fill -> -",
        "6 nodes: 6 stages of 1 device, slowest 2.00 s, 10.0 s to fill -> -",
    ]


def test_a_plan_that_gets_templates() -> None:
    text = templates(None, resilience(range(2, 4)))
    assert text[:2] == [
        "fault tolerance: - -> 1",
        "nodes: - -> any 4..8 nodes can be used in full; below 4 training stops",
    ]
    assert "state to copy: - -> 12.0 MiB" in text
    assert text[-1] == "3 nodes: - -> 3 stages of 1 device, slowest 4.00 s, 8.00 s to fill"


def test_templates_of_equal_figures_differ_by_their_first_other_stage() -> None:
    one = resilience(range(3, 4))
    (template,) = one.templates
    first, second, third = template.stages
    moved = replace(template, stages=(replace(first, last=3), replace(second, first=3), third))
    (text,) = templates(one, replace(one, templates=(moved,)))
    figures = "3 stages of 1 device, slowest 4.00 s, 8.00 s to fill"
    assert text == f"3 nodes: {figures}: language_model[0:4]@0 -> {figures}: language_model[0:3]@0"


def test_a_difference_too_small_to_tell_is_none() -> None:
    one = resilience(range(3, 4))
    (template,) = one.templates
    assert template.fill_s == pytest.approx(8)
    plan = hand_plan((VISION, TEXT))
    other = replace(one, templates=(replace(template, fill_s=template.fill_s + 1e-9),))
    assert diff_plans(replace(plan, resilience=one), replace(plan, resilience=other)).is_empty
