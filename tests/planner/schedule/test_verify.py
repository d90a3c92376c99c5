"""The checker refuses what is wrong, says where, and prints the grid."""

from __future__ import annotations

import random

import pytest
from support.oracles.check_schedule import check_schedule, format_grid
from support.plans.plan_flows import random_case

from mmcompile.config import ScheduleKind
from mmcompile.errors import VerifyError
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, Schedule, build_schedule

GOOD = """\
stages: a b
rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1
rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0
"""


def flow_ab() -> Flow:
    edge = FlowEdge(source="a", target="b", gradient=True)
    return Flow(stages=("a", "b"), edges=(edge,), backward=("a", "b"))


def test_a_good_schedule_passes() -> None:
    check_schedule(Schedule.parse(GOOD), [flow_ab()] * 2)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("0F0 0SEND_F0>1", "0SEND_F0>1 0F0", "rank 0, step 0, action 0SEND_F0>1: 0F0 must come first"),
        ("1RECV_F0<0 1F0", "1F0 1RECV_F0<0", "rank 1, step 0, action 1F0: 1RECV_F0<0 must come first"),
        ("1F0 1B0", "1B0 1F0", "rank 1, step 1, action 1B0: 1F0 must come first"),
        ("0RECV_B0<1 0B0", "0B0 0RECV_B0<1", "rank 0, step 4, action 0B0: 0RECV_B0<1 must come first"),
        (
            "0F0 0SEND_F0>1 ",
            "0RECV_B0<1 0F0 0SEND_F0>1 ",
            "rank 0, step 5, action 0RECV_B0<1: 0RECV_B0<1 stands here twice",
        ),
        ("1F1 1B1", "1F1 1F2 1B1", "rank 1, step 6, action 1F2: 1F2 stands here but no flow asks for it"),
        (
            "0F0 0SEND_F0>1 0F1 0SEND_F1>1",
            "0F0 0F1 0SEND_F1>1 0SEND_F0>1",
            "the next message from stage 0 is of microbatch 1",
        ),
        ("rank 1: 1RECV_F0<0", "rank 1: 0B0 1RECV_F0<0", "stage a also runs on rank 0"),
        (" 1SEND_B1>0", "", "the schedule lacks 1SEND_B1>0 (1 actions)"),
    ],
)
def test_each_broken_rule_is_named(good: str, bad: str, message: str) -> None:
    assert good in GOOD
    with pytest.raises(VerifyError) as caught:
        check_schedule(Schedule.parse(GOOD.replace(good, bad)), [flow_ab()] * 2)
    assert message in str(caught.value)


SPLIT = """\
stages: a b
rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0I0 0RECV_B1<1 0I1 0W0 0W1
rank 1: 1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1RECV_F1<0 1F1 1I1 1SEND_B1>0 1W1
"""


def test_a_backward_in_two_parts_passes_and_so_does_a_mix() -> None:
    check_schedule(Schedule.parse(SPLIT), [flow_ab()] * 2)
    check_schedule(Schedule.parse(SPLIT.replace("1I1 1SEND_B1>0 1W1", "1B1 1SEND_B1>0")), [flow_ab()] * 2)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("1I0 1SEND_B0>0 1W0", "1W0 1I0 1SEND_B0>0", "rank 1, step 2, action 1W0: 1I0 must come first"),
        ("1I0 1SEND_B0>0", "1SEND_B0>0 1I0", "rank 1, step 2, action 1SEND_B0>0: 1I0 must come first"),
        ("1F0 1I0", "1I0 1F0", "rank 1, step 1, action 1I0: 1F0 must come first"),
        ("0RECV_B0<1 0I0", "0I0 0RECV_B0<1", "rank 0, step 4, action 0I0: 0RECV_B0<1 must come first"),
        (" 0W1", "", "the schedule lacks 0W1 (1 actions)"),
        (" 0W1", " 0W1 0B1", "action 0B1: 0B1 stands here but no flow asks for it"),
        (" 1I1 ", " 1B1 ", "action 1B1: 1B1 stands here but no flow asks for it"),
    ],
)
def test_each_broken_rule_of_split_backwards_is_named(good: str, bad: str, message: str) -> None:
    assert good in SPLIT
    with pytest.raises(VerifyError) as caught:
        check_schedule(Schedule.parse(SPLIT.replace(good, bad)), [flow_ab()] * 2)
    assert message in str(caught.value)


def test_a_split_backward_inside_a_rank_waits_for_the_input_gradient_after_it() -> None:
    text = "stages: a b\nrank 0: 0F0 1F0 {}"
    check_schedule(Schedule.parse(text.format("1I0 0I0 1W0 0W0")), [flow_ab()])
    with pytest.raises(VerifyError, match="action 0I0: 1I0 must come first"):
        check_schedule(Schedule.parse(text.format("0I0 1I0 1W0 0W0")), [flow_ab()])


def test_a_deadlock_prints_the_grid_with_the_place_marked() -> None:
    text = GOOD.replace("0F1 0SEND_F1>1 0RECV_B0<1 0B0", "0RECV_B0<1 0B0 0F1 0SEND_F1>1").replace(
        "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0"
    )
    with pytest.raises(VerifyError) as caught:
        check_schedule(Schedule.parse(text), [flow_ab()] * 2)
    assert str(caught.value) == (
        "schedule breaks at rank 0, step 2, action 0RECV_B0<1: no rank can move: deadlock\n"
        "          rank 0        rank 1\n"
        "step    0 0F0           1RECV_F0<0\n"
        "step    1 0SEND_F0>1    1F0\n"
        "step    2 0RECV_B0<1 *  1RECV_F1<0  <-- * no rank can move: deadlock\n"
        "step    3 0B0           1F1\n"
        "step    4 0F1           1B0\n"
        "step    5 0SEND_F1>1    1SEND_B0>0\n"
        "step    6 0RECV_B1<1    1B1\n"
        "step    7 0B1           1SEND_B1>0"
    )


def test_the_grid_without_a_mark_shows_every_step() -> None:
    assert len(format_grid(Schedule.parse(GOOD)).splitlines()) == 9


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("seed", range(40))
def test_a_lost_action_never_passes(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    schedule = build_schedule(stages, flows, kind)
    rng = random.Random(seed)
    rank = rng.choice([index for index, actions in enumerate(schedule.ranks) if actions])
    actions = list(schedule.ranks[rank])
    del actions[rng.randrange(len(actions))]
    ranks = tuple(tuple(actions) if index == rank else kept for index, kept in enumerate(schedule.ranks))
    with pytest.raises(VerifyError):
        check_schedule(Schedule(stages=schedule.stages, ranks=ranks), flows)
