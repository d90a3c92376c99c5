"""The text of a plan: complete for small ones, forty lines for any."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan
from support.plans.template_jobs import even_template
from support.plans.with_recompute import with_recompute

from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import BubbleShare, Rejected, StagePrediction
from mmcompile.planner.plan.stage_rows import folded, rank_ranges
from mmcompile.planner.resilience.resilience import Resilience

Golden = Callable[[str, str], None]

VISION = Part(name="vision_tower", layers=6, stages=1, trains=False)
AUDIO = Part(name="audio_tower", layers=4, stages=2, layer_s=0.003)
TEXT = Part(name="language_model", layers=80, stages=20, tp=2)


def test_a_small_plan(golden: Golden) -> None:
    golden("small.txt", str(hand_plan((VISION, replace(TEXT, layers=8, stages=2, tp=1)), num_microbatches=8)))


def test_runs_of_equal_stages_are_one_row(golden: Golden) -> None:
    plan = hand_plan((replace(VISION, dp=4), TEXT))
    golden("folded.txt", str(plan))


def test_three_modalities_with_everything(golden: Golden) -> None:
    video = Part(name="video_tower", layers=12, stages=3, layer_s=0.002)
    plan = hand_plan((VISION, AUDIO, video, replace(TEXT, dp=2)), cluster="32x8xH100", num_microbatches=32)
    golden(
        "modalities.txt",
        str(
            replace(
                with_recompute(plan, "selective"),
                microbatch_samples=8.0,
                data="10000 samples of mixed.jsonl",
                costs="measured on A100-80G (bfloat16), 3 of 4 layer kinds",
                schedule="zb-h1",
                attention="bitfield",
                predicted=replace(plan.predicted, reduce_s=0.04),
                notes=("the worst microbatch has 3 times the mean patches; memory holds it",),
            )
        ),
    )


def test_one_stage(golden: Golden) -> None:
    plan = hand_plan((Part(name="model", layers=1, stages=1),), cluster="local", num_microbatches=1)
    assert "1 stage on 1 of" in str(plan)
    assert "it is a single layer" not in str(plan), "alone, it is even with itself"


def crowded() -> Plan:
    """Every stage differs, every section is long."""
    names = [Part(name=f"encoder{index}", layers=9, stages=3, layer_s=0.001 * index) for index in range(5)]
    plan = hand_plan((*names, Part(name="language_model", layers=400, stages=200)), cluster="64x8xH100")
    chains = tuple(
        replace(
            chain,
            stages=tuple(
                replace(stage, prediction=slower(stage.prediction, 1 + 0.07 * (stage.depth * 37 % 11)))
                for stage in chain.stages
            ),
        )
        for chain in plan.chains
    )
    return replace(
        plan,
        chains=chains,
        rejected=plan.rejected * 20,
        notes=("a note",) * 20,
        shared_values=plan.shared_values * 20,
        predicted=replace(plan.predicted, reduce_s=0.1),
    )


def slower(prediction: StagePrediction, factor: float) -> StagePrediction:
    return replace(prediction, forward_s=prediction.forward_s * factor)


def test_forty_lines_whatever_the_size() -> None:
    lines = str(crowded()).splitlines()
    assert len(lines) <= 40
    starts = {line.split()[0] for line in lines if line and line[0].isalpha()}
    assert {"predicted", "bottlenecks", "cuts", "rejected", "notes", "links", "shared"} <= starts
    assert any(re.search(r"\(and \d+ more\)$", line) for line in lines)
    assert sum("alike: hidden" in line for line in lines) >= 1, "links along a chain are one line"
    assert not [line for line in lines if line != line.rstrip()]


def with_templates(plan: Plan, num_sizes: int) -> Plan:
    return replace(
        plan,
        resilience=Resilience(
            fault_tolerance=1,
            templates=tuple(even_template(size, 64) for size in range(2, 2 + num_sizes)),
            num_nodes=3 + num_sizes,
            devices_per_node=1,
            num_microbatches=64,
            layer_bytes={"language_model": (100,) * 64},
        ),
    )


def labels(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line and line[0].isalpha()}


def test_templates_of_a_small_plan_are_all_shown(golden: Golden) -> None:
    plan = hand_plan((VISION, replace(TEXT, layers=8, stages=2, tp=1)), num_microbatches=8)
    golden("templates.txt", str(with_templates(plan, 3)))
    assert not labels(str(plan)) & {"resilience", "templates"}


@pytest.mark.parametrize("num_sizes", [1, 2, 60])
def test_templates_share_the_forty_lines(num_sizes: int) -> None:
    text = str(with_templates(crowded(), num_sizes))
    assert len(text.splitlines()) <= 40
    assert {"resilience", "templates", "cuts", "rejected", "notes", "links", "shared"} <= labels(text)
    most = 3 + num_sizes
    counts = f"any 4..{most} nodes" if num_sizes > 1 else "4 nodes"
    assert f"\nresilience   fault tolerance 1: {counts} can be used in full; below 4 training stops\n" in text
    if num_sizes == 60:
        assert f"{most - 2} nodes: 61 stages" in text or "2..61 nodes (60 sizes): 2..61 stages" in text


@pytest.mark.parametrize("count", [10, 30])
def test_many_chains_stay_within_forty_lines(count: int) -> None:
    parts = [Part(name=f"encoder{index}", layers=2, stages=2) for index in range(count)]
    lines = str(hand_plan((*parts, TEXT), cluster="64x8xH100")).splitlines()
    assert len(lines) <= 40 and f"{count + 1} chains, too many to draw" in lines
    assert any(re.fullmatch(r"and \d+ more chains?", line) for line in lines)


def test_folding_keeps_every_stage_once() -> None:
    plan = crowded()
    for rows in (1, 6, 10, 1000):
        folds = folded(plan.chains, rows)
        assert [stage for fold in folds for stage in fold] == list(plan.stages)
    assert len(folded(plan.chains, 1000)) == len(plan.stages)
    assert len(folded(plan.chains, 10)) == len(plan.chains)


def test_ranks_read_as_ranges() -> None:
    assert rank_ranges((0,)) == "0"
    assert rank_ranges((3, 1, 2, 8)) == "1-3,8"
    assert rank_ranges(range(0, 64, 8)) == "0,8,..,56"
    assert rank_ranges(rank for node in range(0, 64, 16) for rank in range(node, node + 8)) == "0-7,16-23,..,48-55"
    assert rank_ranges((0, 2, 4, 7, 9)) == "0,2 and 3 more"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (
            {"warm_up": 0.4},
            "language_model spends 40% of its time filling and draining the pipeline; more microbatches than 8",
        ),
        ({"stages": 0.3}, "waiting for slower stages; cut language_model more evenly"),
        ({"microbatches": 0.2}, "waiting because microbatches differ; balance samples"),
        ({"links": 0.2}, "waiting for messages under way; the largest message is language_model.0 -> language_model.1"),
        ({}, "less than 1% anywhere"),
    ],
)
def test_the_largest_cause_of_idle_time_comes_with_advice(shares: dict[str, float], expected: str) -> None:
    plan = hand_plan((replace(TEXT, layers=8, stages=2),), num_microbatches=8)
    share = BubbleShare(
        **{"chain": "language_model", "warm_up": 0.0, "stages": 0.0, "microbatches": 0.0, "links": 0.0, **shares}
    )
    assert expected in str(replace(plan, predicted=replace(plan.predicted, bubbles=(share,))))


def test_memory_that_is_short_comes_with_advice() -> None:
    full = Part(name="language_model", layers=64, stages=2)
    text = str(hand_plan((full,), num_microbatches=8))
    assert "fullest: language_model.0, 40.0 GiB of 74.5 GiB (54%), mostly optimizer state; 46% is free" in text
    held = str(hand_plan((replace(full, layer_bytes=2**29),), num_microbatches=8))
    assert "(107%), mostly optimizer state; spread it over more stages" in held
    deep = hand_plan((replace(full, layers=288, stages=9),), num_microbatches=16)
    assert "mostly activations of 9 in flight; recompute more (--recompute full)" in str(deep)
    assert "take fewer samples a microbatch" in str(with_recompute(deep, "full"))


def test_nothing_else_is_said_without_something_to_say() -> None:
    plan = hand_plan((TEXT,))
    bare = replace(plan, links=(), shared_values=(), cuts=(), rejected=(), notes=())
    starts = {line.split()[0] for line in str(bare).splitlines() if line}
    assert not starts & {"cuts", "rejected", "notes", "links", "shared"}
    lost = replace(bare, rejected=(Rejected(what="two stages", reason="do not fit"),))
    assert str(lost).splitlines()[-1] == "rejected     two stages: do not fit"
