"""Why ranks are idle: cases made so that the cause is known, and sums that must hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import get_args

import pytest
from support.plans.plan_flows import ToyStage, chain, random_case

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.plan.plan_record import BubbleShare
from mmcompile.planner.schedule.bubbles import Case, attribute, equal_microbatches, equal_stages
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, build_schedule
from mmcompile.planner.schedule.simulate import Durations, simulate

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def unit(factor: float = 1.0) -> LayerTimes:
    return LayerTimes(forward_s=factor, input_grad_s=factor, weight_grad_s=factor)


def of_chain(
    durations: Durations,
    microbatches: int,
    links: Mapping[tuple[str, str], float] | None = None,
    kind: ScheduleKind = "1f1b",
) -> BubbleShare:
    """A chain of as many stages as there are durations."""
    toys, flow = chain(len(durations))
    (share,) = attribute(toys, [flow] * microbatches, durations, links, chains={"line": flow.stages}, kind=kind)
    return share


def both_ways(stages: int, seconds: float) -> dict[tuple[str, str], float]:
    pairs = [(f"s{i}", f"s{i + 1}") for i in range(stages - 1)]
    return {ends: seconds for source, target in pairs for ends in ((source, target), (target, source))}


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager-1f1b"])
def test_an_ideal_chain_only_warms_up(kind: ScheduleKind) -> None:
    share = of_chain({f"s{i}": unit() for i in range(4)}, 9, kind=kind)
    assert share.chain == "line"
    assert share.warm_up == pytest.approx(3 / 12)
    assert [share.stages, share.microbatches, share.links] == pytest.approx([0, 0, 0], abs=1e-12)


def test_links_alone() -> None:
    durations = {f"s{i}": unit() for i in range(3)}
    toys, flow = chain(3)
    makespan_s = simulate(build_schedule(toys, [flow] * 6), durations, both_ways(3, 0.5)).makespan_s
    share = of_chain(durations, 6, both_ways(3, 0.5))
    assert share.warm_up == pytest.approx(2 * 3 / makespan_s)
    assert share.links == pytest.approx((makespan_s - 8 * 3) / makespan_s)
    assert [share.stages, share.microbatches] == pytest.approx([0, 0], abs=1e-12)


def test_a_slow_stage_alone() -> None:
    # Stages of 3, 3 and 6 s: the step takes 3 + 3 + 8 * 6; equal ones of 4 s would take (8 + 2) * 4.
    share = of_chain({"s0": unit(1.0), "s1": unit(1.0), "s2": unit(2.0)}, 8)
    idle, warm_up = 1 - 8 * 12 / (3 * 54), 2 * 4 / 54
    assert share.warm_up == pytest.approx(warm_up)
    assert share.stages == pytest.approx(idle - warm_up)
    assert [share.microbatches, share.links] == pytest.approx([0, 0], abs=1e-12)


def test_uneven_microbatches_alone() -> None:
    # Every other microbatch is three times as long, the same in all stages.
    each = [unit(0.5), unit(1.5)] * 4
    toys, flow = chain(3)
    durations = {f"s{i}": each for i in range(3)}
    makespan_s = simulate(build_schedule(toys, [flow] * 8), durations).makespan_s
    share = of_chain(durations, 8)
    assert share.warm_up == pytest.approx(2 * 3 / makespan_s)
    assert share.microbatches == pytest.approx((makespan_s - 10 * 3) / makespan_s)
    assert share.microbatches > 0.05
    assert [share.stages, share.links] == pytest.approx([0, 0], abs=1e-12)


def two_chains() -> tuple[list[ToyStage], Flow, dict[str, tuple[str, ...]]]:
    """A frozen encoder of one stage before a language model of two."""
    stages = [ToyStage(name=name, ranks=(rank,), depth=2 - rank) for rank, name in enumerate(("e.0", "l.0", "l.1"))]
    edges = (
        FlowEdge(source="e.0", target="l.0", gradient=False),
        FlowEdge(source="l.0", target="l.1", gradient=True),
    )
    flow = Flow(stages=("e.0", "l.0", "l.1"), edges=edges, backward=("l.0", "l.1"))
    return stages, flow, {"encoder": ("e.0",), "language_model": ("l.0", "l.1")}


def test_a_frozen_encoder_of_the_right_size_is_no_imbalance() -> None:
    stages, flow, chains = two_chains()
    durations = {"e.0": LayerTimes(forward_s=3.0, input_grad_s=0.0), "l.0": unit(), "l.1": unit()}
    for share in attribute(stages, [flow] * 8, durations, chains=chains):
        assert share.warm_up > 0.1
        assert [share.stages, share.microbatches, share.links] == pytest.approx([0, 0, 0], abs=1e-12)


def test_the_idle_chain_and_not_the_slow_one_waits_for_slower_stages() -> None:
    stages, flow, chains = two_chains()
    small = {"e.0": LayerTimes(forward_s=0.3, input_grad_s=0.0), "l.0": unit(), "l.1": unit()}
    encoder, language = attribute(stages, [flow] * 16, small, chains=chains)
    assert encoder.stages > 0.7
    assert language.stages == pytest.approx(0, abs=1e-12)
    large = {**small, "e.0": LayerTimes(forward_s=9.0, input_grad_s=0.0)}
    encoder, language = attribute(stages, [flow] * 16, large, chains=chains)
    assert encoder.stages == pytest.approx(0, abs=1e-12)
    assert language.stages > 0.4


def test_microbatches_without_images_count_as_uneven() -> None:
    stages, flow, chains = two_chains()
    text = Flow(stages=flow.stages[1:], edges=flow.edges[1:], backward=flow.backward)
    # As much of the encoder as of the others in all, but in half of the microbatches.
    durations = {"e.0": LayerTimes(forward_s=6.0, input_grad_s=0.0), "l.0": unit(), "l.1": unit()}
    flows = [flow] * 4 + [text] * 4
    encoder, language = attribute(stages, flows, durations, chains=chains)
    assert language.microbatches > 0.1
    assert encoder.stages == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_shares_are_never_negative_and_add_up_to_the_idle_share(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    rng = random.Random(seed)
    durations = {
        stage.name: [
            LayerTimes(forward_s=rng.random(), input_grad_s=rng.random(), weight_grad_s=rng.choice([0.0, 1.0]))
            for _ in flows
        ]
        for stage in stages
    }
    edges = {(edge.source, edge.target) for flow in flows for edge in flow.edges}
    links = {ends: rng.random() for source, target in sorted(edges) for ends in ((source, target), (target, source))}
    chains = {
        "first": [stage.name for stage in stages[: len(stages) // 2 + 1]],
        "all": [stage.name for stage in stages],
    }
    timeline = simulate(build_schedule(stages, flows, kind), durations, links)
    for share in attribute(stages, flows, durations, links, chains=chains, kind=kind):
        ranks = {stage.ranks[0] for stage in stages if stage.name in chains[share.chain]}
        idle = 1 - sum(timeline.busy_s[rank] for rank in ranks) / (len(ranks) * timeline.makespan_s)
        causes = (share.warm_up, share.stages, share.microbatches, share.links)
        assert min(causes) >= 0
        assert sum(causes) == pytest.approx(idle, abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_work_only_moves(seed: int) -> None:
    stages, flows = random_case(seed)
    rng = random.Random(seed)
    durations = {
        stage.name: [LayerTimes(forward_s=rng.random(), input_grad_s=rng.random()) for _ in flows] for stage in stages
    }
    case = Case(stages=stages, flows=flows, durations=durations, kind="1f1b")
    steady = equal_microbatches(case)
    busy, evened, equal = (
        simulate(build_schedule(stages, each.flows), each.durations).busy_s
        for each in (case, steady, equal_stages(steady))
    )
    assert evened == pytest.approx(busy)
    assert equal == pytest.approx([sum(busy) / len(busy)] * len(busy))


def test_a_step_without_time_has_no_bubbles() -> None:
    nothing = LayerTimes(forward_s=0.0, input_grad_s=0.0)
    share = of_chain({"s0": nothing, "s1": nothing}, 3)
    assert share == BubbleShare(chain="line", warm_up=0.0, stages=0.0, microbatches=0.0, links=0.0)
    toys, flow = chain(2)
    assert attribute(toys, [], {"s0": unit(), "s1": [unit()]}, chains={"line": flow.stages})[0] == share


def test_a_stage_without_work_among_busy_ones_is_an_imbalance() -> None:
    share = of_chain({"s0": unit(), "s1": LayerTimes(forward_s=0.0, input_grad_s=0.0)}, 8)
    assert share.stages == pytest.approx(0.5 - 1.5 / 24)
    assert share.warm_up == pytest.approx(1.5 / 24)
