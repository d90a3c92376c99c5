"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hand_plan import Part, hand_plan

from mmcompile.plan.plan import Plan
from mmcompile.report.diff import diff_plans

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
TEXT = Part(name="language_model", layers=12, stages=3)


def other(plan: Plan) -> Plan:
    return replace(
        plan,
        recompute="full",
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
