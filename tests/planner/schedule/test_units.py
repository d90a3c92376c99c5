"""Steps in which towers compute samples in microbatches of their own: order, messages, freedom from deadlock, time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import networkx as nx
import pytest
from support.oracles.check_schedule import check_schedule, check_units
from support.plans.plan_flows import ToyStage, chain
from support.plans.plan_towers import TowerCase, random_towers

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.errors import PlanError, VerifyError
from mmcompile.planner.schedule.schedule import (
    Action,
    ActionKind,
    CrossEdge,
    Flow,
    FlowEdge,
    Schedule,
    Unit,
    build_schedule,
    schedule_units,
)
from mmcompile.planner.schedule.simulate import simulate

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
ByNumber = dict[str, dict[int, LayerTimes]]


def scheduled(case: TowerCase, kind: ScheduleKind = "1f1b") -> Schedule:
    return schedule_units(case.stages, case.units, case.edges, kind, num_slots=case.num_slots)


def random_durations(seed: int, case: TowerCase) -> ByNumber:
    rng = random.Random(seed)
    found: ByNumber = {stage.name: {} for stage in case.stages}
    for unit in case.units:
        for name in unit.flow.stages:
            found[name][unit.number] = LayerTimes(
                forward_s=rng.random(), input_grad_s=rng.random(), weight_grad_s=rng.random()
            )
    return found


def random_links(seed: int, case: TowerCase) -> dict[tuple[str, str], float]:
    rng = random.Random(seed)
    names = [stage.name for stage in case.stages]
    return {(one, two): rng.random() for one in names for two in names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(60))
def test_no_towers_or_places_of_samples_deadlock(kind: ScheduleKind, seed: int) -> None:
    case = random_towers(seed, most_lag=seed % 3)
    schedule = scheduled(case, kind)
    check_units(schedule, case.units, case.edges)
    assert Schedule.parse(str(schedule)) == schedule
    times = random_durations(seed, case)
    timeline = simulate(schedule, times, random_links(seed, case))
    assert sum(timeline.busy_s) == pytest.approx(
        sum(
            times[name][unit.number].forward_s
            + (times[name][unit.number].backward_s if name in unit.flow.backward else 0.0)
            for unit in case.units
            for name in unit.flow.stages
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(60))
def test_messages_of_two_stages_are_in_the_same_order_on_both_sides(kind: ScheduleKind, seed: int) -> None:
    schedule = scheduled(random_towers(seed, most_lag=3), kind)
    sent: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
    received: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_send:
                sent.setdefault((action.stage, action.peer), []).append((action.microbatch, action.other))
            elif action.kind.is_receive:
                received.setdefault((action.peer, action.stage), []).append((action.other, action.microbatch))
    assert sent == received


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_a_lag_of_one_receives_nothing_early(kind: ScheduleKind, seed: int) -> None:
    for actions in scheduled(random_towers(seed, most_lag=1), kind).ranks:
        for action, after in pairwise(actions):
            if action.kind.is_receive:
                assert (after.stage, after.microbatch) == (action.stage, action.microbatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_the_makespan_is_the_longest_path_of_all_dependencies(kind: ScheduleKind, seed: int) -> None:
    case = random_towers(seed, most_lag=2)
    times, link_s = random_durations(seed, case), random_links(seed, case)
    schedule = scheduled(case, kind)
    assert simulate(schedule, times, link_s).makespan_s == pytest.approx(longest_path_s(case, schedule, times, link_s))


def longest_path_s(
    case: TowerCase, schedule: Schedule, times: ByNumber, link_s: Mapping[tuple[str, str], float]
) -> float:
    """By the graph of computations: the order of each rank, and, by the units alone, what each needs; messages queue.

    A node is a computation, weighed by its seconds, or the way of a message, weighed by those of its link.
    """
    graph: nx.DiGraph = nx.DiGraph()
    seconds: dict[object, float] = {"start": 0.0}
    names = schedule.stages
    split = {(a.stage, a.microbatch) for actions in schedule.ranks for a in actions if a.kind is ActionKind.I}
    for actions in schedule.ranks:
        before: object = "start"
        for action in actions:
            if not action.kind.is_compute:
                continue
            duration = times[names[action.stage]][action.microbatch]
            node = (names[action.stage], str(action.kind), action.microbatch)
            seconds[node] = {
                ActionKind.F: duration.forward_s,
                ActionKind.B: duration.backward_s,
                ActionKind.I: duration.input_grad_s,
                ActionKind.W: duration.weight_grad_s,
            }[action.kind]
            graph.add_edge(before, node)
            before = node

    def gradient(side: tuple[str, int]) -> object:
        return side[0], "I" if (names.index(side[0]), side[1]) in split else "B", side[1]

    rank = {stage.name: stage.ranks[0] for stage in case.stages}
    inside = [
        CrossEdge(source=(edge.source, unit.number), target=(edge.target, unit.number), gradient=edge.gradient)
        for unit in case.units
        for edge in unit.flow.edges
    ]
    for edge in (*inside, *case.edges):
        ways: list[tuple[tuple[str, int], tuple[str, int], object, object]] = [
            (edge.source, edge.target, (edge.source[0], "F", edge.source[1]), (edge.target[0], "F", edge.target[1]))
        ]
        if edge.gradient:
            ways.append((edge.target, edge.source, gradient(edge.target), gradient(edge.source)))
        for sender, receiver, made, needed in ways:
            if rank[sender[0]] == rank[receiver[0]]:
                graph.add_edge(made, needed)
            else:
                message = ("message", sender, receiver)
                seconds[message] = link_s[sender[0], receiver[0]]
                graph.add_edges_from([(made, message), (message, needed)])
    for before, after in queued(schedule):
        graph.add_edge(before, after)
    assert nx.is_directed_acyclic_graph(graph)
    ends: dict[object, float] = {}
    for node in nx.topological_sort(graph):
        ends[node] = seconds[node] + max((ends[previous] for previous in graph.predecessors(node)), default=0.0)
    return max(end for node, end in ends.items() if node == "start" or node[0] != "message")  # type: ignore[index]


def queued(schedule: Schedule) -> list[tuple[object, object]]:
    """Messages of two stages that follow one another."""
    channels: dict[tuple[int, int | None], list[object]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind.is_send and action.peer is not None:
                sender = (schedule.stages[action.stage], action.microbatch)
                receiver = (schedule.stages[action.peer], action.other)
                channels.setdefault((action.stage, action.peer), []).append(("message", sender, receiver))
    return [pair for messages in channels.values() for pair in pairwise(messages)]


def two_towers(*parts: tuple[int, int], language: int, num_slots: int) -> TowerCase:
    """One encoder stage `e` that feeds the language model's `l`: parts (slot, lag) of the encoder's microbatches."""
    stages = [ToyStage(name="e", ranks=(0,), depth=1), ToyStage(name="l", ranks=(1,), depth=0)]
    flows = {name: Flow(stages=(name,), edges=(), backward=(name,)) for name in "el"}
    units = [
        Unit(number=slot + lag * num_slots, slot=slot, backward_slot=slot + lag, flow=flows["e"]) for slot, lag in parts
    ]
    units += [Unit(number=slot, slot=slot, backward_slot=slot, flow=flows["l"]) for slot in range(language)]
    edges = [
        CrossEdge(source=("e", slot + lag * num_slots), target=("l", slot + lag), gradient=True) for slot, lag in parts
    ]
    return TowerCase(stages=stages, units=units, edges=edges, num_slots=num_slots)


def test_deferred_samples_are_forwarded_with_the_others_and_differentiated_a_slot_later() -> None:
    case = two_towers((0, 0), (0, 1), (1, 0), language=2, num_slots=2)
    assert str(scheduled(case)) == (
        "stages: e l\n"
        "rank 0: 0F0 0SEND_F0>1 0F2 0SEND_F2>1.1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B2<1.1 0B2 0RECV_B1<1 0B1\n"
        "rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0.2 1RECV_F1<0 1F1 1B1 1SEND_B1>0.2 1SEND_B1>0"
    )


def test_a_message_for_a_later_slot_is_received_before_those_sent_after_it() -> None:
    case = two_towers((0, 2), (1, 0), language=3, num_slots=3)
    schedule = scheduled(case, "gpipe")
    assert "rank 1: 1F0 1RECV_F2<0.6 1RECV_F1<0 1F1 1F2 " in str(schedule)
    check_units(schedule, case.units, case.edges)
    late = str(schedule).replace("1RECV_F2<0.6 1RECV_F1<0 1F1 1F2", "1RECV_F1<0 1F1 1RECV_F2<0.6 1F2")
    with pytest.raises(
        VerifyError, match="action 1RECV_F1<0: the next message from stage 0 is of microbatch 6 to microbatch 2"
    ):
        check_units(Schedule.parse(late), case.units, case.edges)


GOOD = two_towers((0, 0), (0, 1), (1, 0), language=2, num_slots=2)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("1RECV_F1<0.2 1RECV_F1<0 1F1", "1RECV_F1<0.2 1F1 1RECV_F1<0", "action 1F1: 1RECV_F1<0 must come first"),
        (
            "1RECV_F1<0.2 1RECV_F1<0",
            "1RECV_F1<0 1RECV_F1<0.2",
            "the next message from stage 0 is of microbatch 2 to micro",
        ),
        ("0RECV_B2<1.1 0B2", "0B2 0RECV_B2<1.1", "action 0B2: 0RECV_B2<1.1 must come first"),
        (" 0SEND_F2>1.1", "", "the schedule lacks 0SEND_F2>1.1 (1 actions)"),
        (" 0SEND_F2>1.1", " 0SEND_F2>1", "0SEND_F2>1 stands here but no flow asks for it"),
        ("1B1 1SEND_B1>0.2", "1SEND_B1>0.2 1B1", "action 1SEND_B1>0.2: 1B1 must come first"),
        ("0F2 0SEND_F2>1.1", "0SEND_F2>1.1 0F2", "action 0SEND_F2>1.1: 0F2 must come first"),
    ],
)
def test_each_broken_rule_is_named(good: str, bad: str, message: str) -> None:
    text = str(scheduled(GOOD))
    assert good in text
    with pytest.raises(VerifyError) as caught:
        check_units(Schedule.parse(text.replace(good, bad)), GOOD.units, GOOD.edges)
    assert message in str(caught.value)


def test_a_peer_microbatch_of_the_same_number_may_be_spelled_out() -> None:
    schedule = Schedule.parse(str(scheduled(GOOD)).replace("0SEND_F0>1 ", "0SEND_F0>1.0 "))
    check_units(schedule, GOOD.units, GOOD.edges)
    assert simulate(schedule, random_durations(0, GOOD)) == simulate(scheduled(GOOD), random_durations(0, GOOD))


def test_towers_on_one_rank_hand_over_without_messages() -> None:
    case = replace(GOOD, stages=[ToyStage(name="e", ranks=(0,), depth=1), ToyStage(name="l", ranks=(0,), depth=0)])
    schedule = scheduled(case)
    assert str(schedule) == "stages: e l\nrank 0: 0F0 0F2 1F0 1B0 0B0 0F1 1F1 1B1 0B2 0B1"
    check_units(schedule, case.units, case.edges)
    with pytest.raises(VerifyError, match="action 1F1: 0F1 must come first"):
        check_units(Schedule.parse(str(schedule).replace("0F1 1F1", "1F1 0F1")), case.units, case.edges)
    with pytest.raises(VerifyError, match="action 0B2: 1B1 must come first"):
        check_units(Schedule.parse(str(schedule).replace("1B1 0B2", "0B2 1B1")), case.units, case.edges)


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_that_all_stages_compute_together_are_units_without_edges(kind: ScheduleKind) -> None:
    stages, flow = chain(3)
    units = [Unit(number=m, slot=m, backward_slot=m, flow=flow) for m in range(4)]
    schedule = build_schedule(stages, [flow] * 4, kind)
    assert schedule == schedule_units(stages, units, (), kind, num_slots=4)
    check_units(schedule, units, ())
    check_schedule(schedule, [flow] * 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_one_replica_and_no_lag_is_the_order_of_flows(kind: ScheduleKind, seed: int) -> None:
    # The same step, told as one flow a microbatch and as a unit of each tower.
    rng = random.Random(seed)
    count, encoder, num_slots = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6)
    stages, flow = chain(encoder + count)
    cut = encoder - 1
    parts = [
        Flow(stages=flow.stages[:encoder], edges=flow.edges[:cut], backward=flow.backward[:encoder]),
        Flow(stages=flow.stages[encoder:], edges=flow.edges[encoder:], backward=flow.backward[encoder:]),
    ]
    units = [Unit(number=m, slot=m, backward_slot=m, flow=part) for m in range(num_slots) for part in parts]
    ends = flow.stages[cut], flow.stages[encoder]
    edges = [CrossEdge(source=(ends[0], m), target=(ends[1], m), gradient=True) for m in range(num_slots)]
    assert schedule_units(stages, units, edges, kind, num_slots=num_slots) == build_schedule(
        stages, [flow] * num_slots, kind
    )


@pytest.mark.parametrize("text", ["1SEND_F3>2.5", "2RECV_F5<1.3", "2SEND_B13>1.0", "1RECV_B3<2.14"])
def test_actions_with_the_peers_microbatch_round_trip(text: str) -> None:
    action = Action.parse(text)
    assert str(action) == text
    assert action.other == int(text.rpartition(".")[2]) != action.microbatch


@pytest.mark.parametrize("text", ["1SEND_F3.5", "1SEND_F3>2.", "1F3.5", "2RECV_F5>1.3"])
def test_bad_actions_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def unit(number: int, stages: str, slots: tuple[int, int], *, backward: bool = True) -> Unit:
    names = tuple(stages.split())
    flow = Flow(
        stages=names,
        edges=tuple(FlowEdge(source=a, target=b, gradient=backward) for a, b in pairwise(names)),
        backward=names if backward else (),
    )
    return Unit(number=number, slot=slots[0], backward_slot=slots[1], flow=flow)


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ((("s0", 0), ("s9", 0)), "an edge between microbatches names stage 's9'; stages are s0, s1, s2"),
        ((("s0", 3), ("s1", 0)), "names microbatch 3 of s0, which has none of that number"),
        ((("s1", 0), ("s0", 0)), "edge s1 -> s0 goes from depth 1 to 2; it must fall"),
        (
            (("s0", 1), ("s1", 0)),
            "edge s0 -> s1 leads from a microbatch of slots 1, 1 to one of slots 0, 0: forward earlier",
        ),
        ((("s0", 0), ("s1", 1)), "slots 0, 0 to one of slots 1, 1: forward earlier, or backward later"),
        ((("s0", 2), ("s1", 1)), "edge s0 -> s1 carries gradient, but one of them runs no backward"),
    ],
)
def test_edges_that_cannot_be_are_refused(edge: tuple[tuple[str, int], tuple[str, int]], message: str) -> None:
    stages, _ = chain(3)
    units = [
        unit(0, "s0", (0, 0)),
        unit(1, "s0", (1, 1)),
        unit(2, "s0", (0, 1), backward=False),
        unit(0, "s1 s2", (0, 0)),
        unit(1, "s1 s2", (1, 1)),
    ]
    with pytest.raises(PlanError) as caught:
        schedule_units(stages, units, [CrossEdge(source=edge[0], target=edge[1], gradient=True)], num_slots=2)
    assert message in str(caught.value)


def test_numbers_of_one_stage_differ_and_edges_end_in_units() -> None:
    schedule = scheduled(GOOD)
    with pytest.raises(VerifyError, match="stage e has two microbatches 0; numbers must differ"):
        check_units(schedule, [*GOOD.units, GOOD.units[0]], GOOD.edges)
    missing = CrossEdge(source=("e", 7), target=("l", 0), gradient=False)
    with pytest.raises(VerifyError, match="of which one is not computed"):
        check_units(schedule, GOOD.units, [*GOOD.edges, missing])


def test_durations_of_microbatches_that_a_stage_does_not_compute_may_be_missing() -> None:
    schedule, times = scheduled(GOOD), random_durations(0, GOOD)
    listed = {
        name: [each.get(m, LayerTimes(forward_s=9.0, input_grad_s=9.0)) for m in range(3)]
        for name, each in times.items()
    }
    assert simulate(schedule, listed) == simulate(schedule, times)
    with pytest.raises(PlanError, match="stage e has no duration of microbatch 2, which the schedule has"):
        simulate(schedule, {**times, "e": {m: times["e"][m] for m in (0, 1)}})


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_action_never_passes(seed: int) -> None:
    case = random_towers(seed, most_lag=2)
    schedule = scheduled(case, "zb-h1" if seed % 2 else "1f1b")
    rng = random.Random(seed)
    rank = rng.choice([index for index, actions in enumerate(schedule.ranks) if actions])
    actions = list(schedule.ranks[rank])
    del actions[rng.randrange(len(actions))]
    ranks = tuple(tuple(actions) if index == rank else kept for index, kept in enumerate(schedule.ranks))
    with pytest.raises(VerifyError):
        check_units(Schedule(stages=schedule.stages, ranks=ranks), case.units, case.edges)
