"""Schedules over a DAG of stages: order, text, freedom from deadlock, microbatches held, parity with torch on chains."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import pytest
from support.oracles.check_schedule import check_schedule
from support.plans.plan_flows import ToyStage, chain, random_case
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from mmcompile.config import ScheduleKind
from mmcompile.errors import PlanError
from mmcompile.planner.schedule.schedule import (
    Action,
    ActionKind,
    Flow,
    FlowEdge,
    Schedule,
    build_schedule,
    in_flight,
)

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def compute_order(schedule: Schedule, rank: int) -> list[str]:
    """Computations of a rank, without the stage's number."""
    return [f"{a.kind}{a.microbatch}" for a in schedule.ranks[rank] if a.kind.is_compute]


def most_held(schedule: Schedule, flows: list[Flow], stage: int, rank: int) -> int:
    """The most microbatches between their forward and the end of their backward, of those that have a backward."""
    held = most = 0
    for action in schedule.ranks[rank]:
        if action.stage == stage and schedule.stages[stage] in flows[action.microbatch].backward:
            held += (action.kind is ActionKind.F) - (action.kind in (ActionKind.B, ActionKind.W))
            most = max(most, held)
    return most


def one_f_one_b(warm_up: int, microbatches: int) -> list[str]:
    """1F1B as defined: `warm_up` forwards, then a forward and a backward in turn, then the backwards left over."""
    warm_up = min(warm_up, microbatches)
    order = [f"F{m}" for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        order += [f"F{m}", f"B{m - warm_up}"]
    return order + [f"B{m}" for m in range(microbatches - warm_up, microbatches)]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 4), (4, 9), (8, 24)])
def test_a_chain_runs_1f1b(stages: int, microbatches: int) -> None:
    toys, flow = chain(stages)
    schedule = build_schedule(toys, [flow] * microbatches)
    check_schedule(schedule, [flow] * microbatches)
    for rank in range(stages):
        assert compute_order(schedule, rank) == one_f_one_b(stages - 1 - rank, microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (3, 2), (4, 4), (4, 9), (5, 24)])
def test_a_chain_runs_each_kind_as_defined(stages: int, microbatches: int) -> None:
    toys, flow = chain(stages)
    for kind in KINDS:
        schedule = build_schedule(toys, [flow] * microbatches, kind)
        check_schedule(schedule, [flow] * microbatches)
        for rank in range(stages):
            depth = stages - 1 - rank
            expected = {
                "gpipe": [f"{part}{m}" for part in "FB" for m in range(microbatches)],
                "1f1b": one_f_one_b(depth, microbatches),
                "eager-1f1b": one_f_one_b(2 * depth, microbatches),
                "zb-h1": split(one_f_one_b(depth, microbatches)),
            }
            assert compute_order(schedule, rank) == expected[kind]
            assert most_held(schedule, [flow] * microbatches, rank, rank) == in_flight(kind, depth, microbatches)


def split(order: list[str]) -> list[str]:
    """B as I and W."""
    return [part for name in order for part in ([name] if name[0] == "F" else ["I" + name[1:], "W" + name[1:]])]


def test_a_chain_runs_gpipe_in_the_order_of_torch() -> None:
    toys, flow = chain(3)
    schedule = build_schedule(toys, [flow] * 4, "gpipe")
    torch_order = ScheduleGPipe(SimpleNamespace(num_stages=3), 4).pipeline_order  # type: ignore[arg-type]
    assert torch_order is not None
    for rank in range(3):
        theirs = [str(action).removeprefix(str(rank)) for action in torch_order[rank] if action is not None]
        assert compute_order(schedule, rank) == [action for action in theirs if "REDUCE" not in action]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (5, 9)])
def test_a_chain_runs_in_the_order_of_torch(stages: int, microbatches: int) -> None:
    toys, flow = chain(stages)
    schedule = build_schedule(toys, [flow] * microbatches)
    # torch reads nothing of the stage but their number before the first step.
    torch_order = Schedule1F1B(SimpleNamespace(num_stages=stages), microbatches).pipeline_order  # type: ignore[arg-type]
    assert torch_order is not None
    for rank in range(stages - 1):
        theirs = [str(action).removeprefix(str(rank)) for action in torch_order[rank] if action is not None]
        assert compute_order(schedule, rank) == [action for action in theirs if "REDUCE" not in action]
    # torch's printed order numbers the last stage's forwards from 1; its kinds alternate as ours do.
    last = [str(action)[1] for action in torch_order[stages - 1] if action is not None]
    ours = [action[0] for action in compute_order(schedule, stages - 1)]
    assert ours == [kind for kind in last if kind in "FB"]


def test_sends_and_receives_stand_beside_what_they_serve() -> None:
    toys, flow = chain(3)
    text = str(build_schedule(toys, [flow] * 3))
    assert text == (
        "stages: s0 s1 s2\n"
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0RECV_B2<1 0B2\n"
        "rank 1: 1RECV_F0<0 1F0 1SEND_F0>2 1RECV_F1<0 1F1 1SEND_F1>2 1RECV_B0<2 1B0 1SEND_B0>0 1RECV_F2<0 1F2 "
        "1SEND_F2>2 1RECV_B1<2 1B1 1SEND_B1>0 1RECV_B2<2 1B2 1SEND_B2>0\n"
        "rank 2: 2RECV_F0<1 2F0 2B0 2SEND_B0>1 2RECV_F1<1 2F1 2B1 2SEND_B1>1 2RECV_F2<1 2F2 2B2 2SEND_B2>1"
    )


def test_two_encoders_warm_up_by_their_longest_path_and_a_frozen_one_only_runs_forward() -> None:
    stages = [
        ToyStage(name="vision.0", ranks=(0,), depth=3),
        ToyStage(name="vision.1", ranks=(1,), depth=2),
        ToyStage(name="audio.0", ranks=(2,), depth=2),
        ToyStage(name="language_model.0", ranks=(3,), depth=1),
        ToyStage(name="language_model.1", ranks=(4,), depth=0),
    ]
    edges = (
        FlowEdge(source="vision.0", target="vision.1", gradient=False),
        FlowEdge(source="vision.1", target="language_model.0", gradient=True),
        FlowEdge(source="audio.0", target="language_model.0", gradient=True),
        # Features of the encoder that enter the middle of the language model.
        FlowEdge(source="vision.1", target="language_model.1", gradient=True),
        FlowEdge(source="language_model.0", target="language_model.1", gradient=True),
    )
    names = tuple(stage.name for stage in stages)
    flow = Flow(stages=names, edges=edges, backward=names[1:])
    schedule = build_schedule(stages, [flow] * 5)
    check_schedule(schedule, [flow] * 5)
    assert compute_order(schedule, 0) == [f"F{m}" for m in range(5)]
    assert compute_order(schedule, 1) == compute_order(schedule, 2) == one_f_one_b(2, 5)
    assert compute_order(schedule, 4) == one_f_one_b(0, 5)


def test_everything_on_one_rank_needs_no_warm_up_and_no_messages() -> None:
    stages = [ToyStage(name=f"s{i}", ranks=(0,), depth=2 - i) for i in range(3)]
    _, flow = chain(3)
    schedule = build_schedule(stages, [flow] * 2)
    check_schedule(schedule, [flow] * 2)
    assert str(schedule.ranks[0][0]) == "0F0"
    assert " ".join(map(str, schedule.ranks[0])) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"


def test_gradients_leave_before_the_weights_are_done() -> None:
    toys, flow = chain(2)
    assert str(build_schedule(toys, [flow] * 2, "zb-h1")) == (
        "stages: s0 s1\n"
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0I0 0W0 0RECV_B1<1 0I1 0W1\n"
        "rank 1: 1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1RECV_F1<0 1F1 1I1 1SEND_B1>0 1W1"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(150))
def test_no_dag_map_or_participation_deadlocks(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    schedule = build_schedule(stages, flows, kind)
    check_schedule(schedule, flows)
    assert Schedule.parse(str(schedule)) == schedule
    assert build_schedule(stages, flows, kind) == schedule
    # Nothing is left out and nothing is run twice, whatever the checker thinks.
    ran = Counter(str(action) for actions in schedule.ranks for action in actions if action.kind.is_compute)
    parts = "IW" if kind == "zb-h1" else "B"
    assert ran == Counter(
        f"{name[1:]}{part}{microbatch}"
        for microbatch, flow in enumerate(flows)
        for part, names in (("F", flow.stages), *((part, flow.backward) for part in parts))
        for name in names
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_a_stage_never_holds_more_microbatches_than_stated(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    schedule = build_schedule(stages, flows, kind)
    for index, stage in enumerate(stages):
        assert most_held(schedule, flows, index, stage.ranks[0]) <= in_flight(kind, stage.depth, len(flows))


@pytest.mark.parametrize(
    ("kind", "held"), [("gpipe", [9, 9, 9]), ("1f1b", [4, 1, 9]), ("eager-1f1b", [7, 1, 9]), ("zb-h1", [4, 1, 9])]
)
def test_microbatches_in_flight(kind: ScheduleKind, held: list[int]) -> None:
    assert [in_flight(kind, depth, 9) for depth in (3, 0, 20)] == held


def test_a_step_without_images_leaves_the_encoder_alone() -> None:
    stages, flow = chain(3)
    text_only = Flow(stages=flow.stages[1:], edges=flow.edges[1:], backward=flow.backward[1:])
    schedule = build_schedule(stages, [text_only] * 3)
    check_schedule(schedule, [text_only] * 3)
    assert schedule.ranks[0] == ()
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["2F0", "1B13", "2I0", "12W3", "1SEND_F3>2", "2RECV_F3<1", "2SEND_B3>1", "1RECV_B3<2"])
def test_actions_round_trip(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2F0>1", "1SEND_F3", "1SEND_F3<2", "2RECV_F3>1", "2X0", "1F0 1F1"])
def test_bad_actions_are_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action; write 2F0, 2B0, 2I0, 2W0, 1SEND_F3>2"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0", "a schedule begins with 'stages: NAME ...', got 'rank 0: 0F0'"),
        ("stages: a\nrank 1: 0F0", "rank 0"),
    ],
)
def test_bad_schedules_are_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule.parse(text)


def flow_of(stages: str, edges: str, backward: str) -> Flow:
    """`flow_of("a b", "a>b", "b")`; an edge written with >> carries gradient."""
    pairs = [(edge.replace(">>", ">").split(">"), ">>" in edge) for edge in edges.split()]
    return Flow(
        stages=tuple(stages.split()),
        edges=tuple(FlowEdge(source=ends[0], target=ends[1], gradient=gradient) for ends, gradient in pairs),
        backward=tuple(backward.split()),
    )


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (flow_of("s0 s9", "", ""), "a flow names stage 's9'; stages are s0, s1"),
        (flow_of("s0", "", "s1"), "a flow has a backward of s1 but no forward; its stages are s0"),
        (flow_of("s0", "s0>s1", ""), "a flow has an edge s0 -> s1 outside its stages s0"),
        (flow_of("s0 s1", "s0>>s1", "s1"), "edge s0 -> s1 carries gradient, but one of them runs no backward"),
        (flow_of("s0 s1", "s1>s0", ""), "edge s1 -> s0 goes from depth 0 to 1; it must fall"),
    ],
)
def test_flows_that_cannot_be_are_refused(flow: Flow, message: str) -> None:
    stages, _ = chain(2)
    with pytest.raises(PlanError) as caught:
        build_schedule(stages, [flow])
    assert message in str(caught.value)


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="stage a runs on ranks \\(0, 1\\); a schedule wants one rank a stage"):
        build_schedule([ToyStage(name="a", ranks=(0, 1), depth=0)], [])


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_stages_messages_follow_the_microbatches(kind: ScheduleKind) -> None:
    stages, flows = random_case(7)
    schedule = build_schedule(stages, flows, kind)
    for actions in schedule.ranks:
        by_channel: dict[tuple[int, ActionKind, int | None], list[int]] = {}
        for action in actions:
            by_channel.setdefault((action.stage, action.kind, action.peer), []).append(action.microbatch)
        for microbatches in by_channel.values():
            assert all(first < second for first, second in pairwise(microbatches))
