"""A step drawn in characters."""

from __future__ import annotations

from collections.abc import Callable

from support.plans.hand_plan import Part, hand_plan

from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.planner.schedule.simulate import Event
from mmcompile.report.pictures.text_timeline import text_timeline
from mmcompile.report.simulation import compare, summarize, timeline_text
from mmcompile.report.step_replay import replay

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
TEXT = Part(name="language_model", layers=12, stages=3)


def event(rank: int, kind: ActionKind, microbatch: int, start_s: float, end_s: float) -> Event:
    return Event(rank=rank, stage=f"s.{rank}", kind=kind, microbatch=microbatch, start_s=start_s, end_s=end_s)


def test_each_slice_shows_what_takes_most_of_it() -> None:
    events = [
        event(0, ActionKind.F, 11, 0.0, 2.0),
        event(0, ActionKind.I, 11, 5.0, 7.0),
        event(0, ActionKind.W, 11, 7.0, 8.0),
        event(1, ActionKind.F, 0, 2.0, 3.6),
        event(1, ActionKind.B, 0, 3.6, 10.0),
        event(1, ActionKind.SEND_F, 0, 0.0, 10.0),
    ]
    first, second, *_ = text_timeline(events, ["a", "bb"], width=10).splitlines()
    assert first == "a  11···bbw··"
    assert second == "bb ··00aaaaaa"


def test_a_step_without_computation_is_idle() -> None:
    assert text_timeline([], ["a"], width=12).splitlines()[0] == "a " + 12 * "·"


def test_simulated_figures(golden: Callable[[str, str], None]) -> None:
    step = replay(hand_plan((VISION, TEXT), num_microbatches=6))
    golden("simulation.txt", f"{summarize(step)}\n\n{timeline_text(step)}")


def test_schedules_side_by_side(golden: Callable[[str, str], None]) -> None:
    plan = hand_plan((VISION, TEXT), num_microbatches=6)
    kinds = ("1f1b", "gpipe", "eager-1f1b", "zb-h1")
    golden("schedules.txt", compare([summarize(replay(plan, schedule=kind)) for kind in kinds]))


def test_what_does_not_fit_is_said() -> None:
    plan = hand_plan((Part(name="language_model", layers=400, stages=2),), num_microbatches=4)
    figures = summarize(replay(plan))
    assert not figures.fits and "does not fit: " in str(figures) and "does not fit" in compare([figures])
    assert figures.to_json()["fits"] is False


def test_heavy_microbatches_hold_more() -> None:
    plan = hand_plan((TEXT,), num_microbatches=4)
    loads = {"language_model": [1.0, 1.0, 3.0, 1.0]}
    assert summarize(replay(plan, loads=loads)).peak_bytes > summarize(replay(plan)).peak_bytes


def test_many_groups_are_counted() -> None:
    step = replay(hand_plan((Part(name="language_model", layers=40, stages=40),)))
    assert "and 16 more groups of ranks" in timeline_text(step)
    assert "and 16 more" in str(summarize(step))
