"""The simulator: closed forms, links, longest paths, brute force over all orders of tiny pipelines."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from typing import get_args

import networkx as nx
import pytest
from support.plans.plan_flows import ToyStage, chain, random_case

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.errors import PlanError, VerifyError
from mmcompile.planner.schedule.schedule import Action, ActionKind, Flow, FlowEdge, Schedule, build_schedule, in_flight
from mmcompile.planner.schedule.simulate import Durations, Timeline, simulate

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def equal(names: list[str], forward_s: float, input_grad_s: float, weight_grad_s: float = 0.0) -> Durations:
    duration = LayerTimes(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
    return dict.fromkeys(names, duration)


def step(
    stages: int, microbatches: int, kind: ScheduleKind, duration: tuple[float, float, float], link_s: float = 0.0
) -> Timeline:
    """A chain of equal stages."""
    toys, flow = chain(stages)
    pairs = {ends: link_s for e in flow.edges for ends in ((e.source, e.target), (e.target, e.source))}
    return simulate(build_schedule(toys, [flow] * microbatches, kind), equal(list(flow.stages), *duration), pairs)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 2), (4, 4), (4, 24), (6, 8)])
def test_equal_stages_take_n_plus_s_minus_1_turns(kind: ScheduleKind, stages: int, microbatches: int) -> None:
    timeline = step(stages, microbatches, kind, (2.0, 2.0, 1.0))
    assert timeline.makespan_s == (microbatches + stages - 1) * 5.0
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.busy_s == (5.0 * microbatches,) * stages


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 2), (4, 4), (4, 24), (6, 8)])
@pytest.mark.parametrize("duration", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 1.0, 0.0)])
def test_split_backwards_idle_a_weight_gradient_less_at_each_hop(
    stages: int, microbatches: int, duration: tuple[float, float, float]
) -> None:
    forward_s, input_grad_s, weight_grad_s = duration
    idle_s = step(stages, microbatches, "zb-h1", duration).makespan_s - microbatches * sum(duration)
    before_s = step(stages, microbatches, "1f1b", duration).makespan_s - microbatches * sum(duration)
    assert idle_s == (stages - 1) * (forward_s + input_grad_s)
    assert before_s - idle_s == (stages - 1) * weight_grad_s
    if duration == (1.0, 1.0, 1.0):
        assert idle_s == pytest.approx(before_s * 2 / 3)


@pytest.mark.parametrize("link_s", [0.5, 1.0])
def test_a_deeper_warm_up_hides_links(link_s: float) -> None:
    # 1F1B waits for two links each round; with twice the warm-up they are paid in the fill and the drain alone.
    slow, hidden = (step(4, 32, kind, (1.0, 1.0, 0.0), link_s).makespan_s for kind in ("1f1b", "eager-1f1b"))
    assert hidden == (32 + 3) * 2.0 + 2 * 3 * link_s
    assert slow > hidden + 8 * link_s


def test_a_slow_stage_sets_the_pace() -> None:
    # Oobleck's critical path: all stages once, the slowest for the rest.
    toys, flow = chain(3)
    times = {f"s{i}": LayerTimes(forward_s=f, input_grad_s=2 * f) for i, f in enumerate((1.0, 1.0, 4.0))}
    timeline = simulate(build_schedule(toys, [flow] * 10), times)
    assert timeline.makespan_s == pytest.approx((1 + 1) * 3.0 + 10 * 12.0)


def test_links_delay_and_messages_queue_one_behind_another() -> None:
    toys, flow = chain(2, backward=False)
    schedule = build_schedule(toys, [flow] * 3)
    timeline = simulate(schedule, equal(["s0", "s1"], 1.0, 0.0), {("s0", "s1"): 2.0, ("s0", "elsewhere"): 9.0})
    sends = [(e.start_s, e.end_s) for e in timeline.events if e.kind is ActionKind.SEND_F]
    assert sends == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)]
    assert timeline.makespan_s == 8.0
    assert timeline.busy_s == (3.0, 3.0)


def test_independent_encoders_run_at_the_same_time() -> None:
    stages, _ = chain(3)
    stages = [type(stages[0])(name=stage.name, ranks=stage.ranks, depth=int(stage.name != "s2")) for stage in stages]
    edges = tuple(FlowEdge(source=name, target="s2", gradient=False) for name in ("s0", "s1"))
    flow = Flow(stages=("s0", "s1", "s2"), edges=edges, backward=("s2",))
    times = {**equal(["s0", "s1"], 5.0, 0.0), **equal(["s2"], 1.0, 1.0)}
    assert simulate(build_schedule(stages, [flow]), times).makespan_s == pytest.approx(7.0)


def test_microbatches_may_differ() -> None:
    toys, flow = chain(2, backward=False)
    each = [LayerTimes(forward_s=seconds, input_grad_s=0.0) for seconds in (1.0, 5.0, 1.0)]
    timeline = simulate(build_schedule(toys, [flow] * 3), {"s0": each, **equal(["s1"], 2.0, 0.0)})
    forwards = [(e.start_s, e.end_s) for e in timeline.events if e.stage == "s1" and e.kind is ActionKind.F]
    assert forwards == [(1.0, 3.0), (6.0, 8.0), (8.0, 10.0)]
    assert timeline.busy_s == (7.0, 6.0)


def test_missing_durations_are_named() -> None:
    toys, flow = chain(2)
    schedule = build_schedule(toys, [flow] * 3)
    with pytest.raises(PlanError, match="stage s1 has no durations; there are some for s0"):
        simulate(schedule, equal(["s0"], 1.0, 1.0))
    short = [LayerTimes(forward_s=1.0, input_grad_s=1.0)] * 2
    with pytest.raises(PlanError, match="stage s1 has durations of 2 microbatches, the schedule has 3"):
        simulate(schedule, {**equal(["s0"], 1.0, 1.0), "s1": short})


def random_durations(seed: int, names: list[str], microbatches: int) -> dict[str, list[LayerTimes]]:
    rng = random.Random(seed)
    return {
        name: [
            LayerTimes(forward_s=rng.random(), input_grad_s=rng.random(), weight_grad_s=rng.random())
            for _ in range(microbatches)
        ]
        for name in names
    }


def random_links(seed: int, flows: list[Flow]) -> dict[tuple[str, str], float]:
    rng = random.Random(seed)
    edges = sorted({(edge.source, edge.target) for flow in flows for edge in flow.edges})
    return {ends: rng.random() for source, target in edges for ends in ((source, target), (target, source))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_no_rank_does_two_things_at_once_and_nothing_runs_before_its_inputs(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    times = random_durations(seed, [stage.name for stage in stages], len(flows))
    link_s = random_links(seed, flows)
    schedule = build_schedule(stages, flows, kind)
    timeline = simulate(schedule, times, link_s)
    assert simulate(schedule, times, link_s, record=False) == Timeline(
        events=(), makespan_s=timeline.makespan_s, busy_s=timeline.busy_s
    )
    computing = [event for event in timeline.events if event.kind.is_compute]
    for rank in range(len(timeline.busy_s)):
        mine = sorted((e.start_s, e.end_s) for e in computing if e.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    when = {(e.stage, e.kind, e.microbatch): e for e in computing}
    rank_of = {stage.name: stage.ranks for stage in stages}
    gradient = ActionKind.I if kind == "zb-h1" else ActionKind.B
    for microbatch, flow in enumerate(flows):
        for edge in flow.edges:
            crosses = rank_of[edge.source] != rank_of[edge.target]
            way_s = link_s[edge.source, edge.target] if crosses else 0.0
            made = when[edge.source, ActionKind.F, microbatch].end_s
            assert made + way_s <= when[edge.target, ActionKind.F, microbatch].start_s + 1e-12
            if edge.gradient:
                way_s = link_s[edge.target, edge.source] if crosses else 0.0
                made = when[edge.target, gradient, microbatch].end_s
                assert made + way_s <= when[edge.source, gradient, microbatch].start_s + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_the_makespan_is_the_longest_path(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed)
    times = random_durations(seed, [stage.name for stage in stages], len(flows))
    link_s = random_links(seed, flows)
    schedule = build_schedule(stages, flows, kind)
    assert simulate(schedule, times, link_s).makespan_s == pytest.approx(longest_path_s(schedule, times, link_s))


def longest_path_s(
    schedule: Schedule, times: Mapping[str, list[LayerTimes]], link_s: Mapping[tuple[str, str], float]
) -> float:
    """By the graph of all actions: each waits for the one before it on its rank, for its message, for its channel."""
    graph: nx.DiGraph = nx.DiGraph()
    channels: dict[tuple[int, int | None], list[str]] = {}
    for rank, actions in enumerate(schedule.ranks):
        before = f"rank {rank}"
        for action in actions:
            name, text = schedule.stages[action.stage], str(action)
            duration = times[name][action.microbatch]
            part = {
                ActionKind.F: duration.forward_s,
                ActionKind.B: duration.backward_s,
                ActionKind.I: duration.input_grad_s,
                ActionKind.W: duration.weight_grad_s,
            }
            # A node is the moment an action is over for its rank; an edge's weight the least time between two moments.
            graph.add_edge(before, text, seconds=part.get(action.kind, 0.0))
            before = text
            if action.kind.is_send:
                assert action.peer is not None
                way_s = link_s[name, schedule.stages[action.peer]]
                receive = f"{action.peer}RECV_{text.split('_')[1][0]}{action.microbatch}<{action.stage}"
                under_way = f"{text} begins"
                graph.add_edge(text, under_way, seconds=0.0)
                graph.add_edge(under_way, receive, seconds=way_s)
                queue = channels.setdefault((action.stage, action.peer), [])
                if queue:
                    graph.add_edge(queue[-1], under_way, seconds=way_s)
                queue.append(under_way)
    return nx.dag_longest_path_length(graph, weight="seconds")


def test_a_folded_pipeline_flows_both_ways() -> None:
    # Four stages there and back over two ranks: backwards mirror forwards instead of each microbatch waiting for the last.
    stages = [ToyStage(name=f"s{i}", ranks=(i % 2,), depth=3 - i) for i in range(4)]
    _, flow = chain(4)
    schedule = build_schedule(stages, [flow] * 8, "gpipe")
    forward = simulate(schedule, equal(list(flow.stages), 1.0, 0.0)).makespan_s
    assert forward <= 8 * 2 + 3
    assert simulate(schedule, equal(list(flow.stages), 1.0, 1.0)).makespan_s <= 2 * forward


@pytest.mark.parametrize("seed", range(60))
def test_split_backwards_are_never_slower(seed: int) -> None:
    stages, flows = random_case(seed)
    times = random_durations(seed, [stage.name for stage in stages], len(flows))
    link_s = random_links(seed, flows)
    whole, parts = (
        simulate(build_schedule(stages, flows, kind), times, link_s).makespan_s for kind in ("1f1b", "zb-h1")
    )
    assert parts <= whole + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_no_step_is_shorter_than_its_busiest_rank_or_its_longest_microbatch(kind: ScheduleKind, seed: int) -> None:
    stages, flows = random_case(seed, participate=False)
    times = random_durations(seed, [stage.name for stage in stages], len(flows))
    timeline = simulate(build_schedule(stages, flows, kind), times)
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-12
    assert sum(timeline.busy_s) == pytest.approx(
        sum(
            times[name][m].forward_s + (times[name][m].backward_s if name in flow.backward else 0.0)
            for m, flow in enumerate(flows)
            for name in flow.stages
        )
    )
    for microbatch, flow in enumerate(flows):
        alone = simulate(
            build_schedule(stages, [flow], kind), {name: each[microbatch:] for name, each in times.items()}
        )
        assert alone.makespan_s <= timeline.makespan_s + 1e-12


def orders(parts: str, microbatches: int, most: int) -> Iterator[tuple[str, ...]]:
    """All orders of a stage: each part by ascending microbatch, parts of a microbatch in turn, at most `most` held."""

    def extend(done: tuple[int, ...], order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if done[-1] == microbatches:
            yield order
            return
        for index, part in enumerate(parts):
            limit = min(microbatches, done[-1] + most) if index == 0 else done[index - 1]
            if done[index] < limit:
                counts = (*done[:index], done[index] + 1, *done[index + 1 :])
                yield from extend(counts, (*order, f"{part}{done[index]}"))

    yield from extend((0,) * len(parts), ())


def reordered(schedule: Schedule, by_rank: tuple[tuple[str, ...], ...]) -> Schedule:
    """The same actions in other orders of computations (one stage a rank); messages stay beside what they serve."""
    ranks: list[tuple[Action, ...]] = []
    for actions, order in zip(schedule.ranks, by_rank, strict=True):
        groups: dict[str, list[Action]] = {}
        received: list[Action] = []
        for action in actions:
            if action.kind.is_receive:
                received.append(action)
            elif action.kind.is_compute:
                groups[f"{action.kind}{action.microbatch}"] = [*received, action]
                received = []
            else:
                groups[next(reversed(groups))].append(action)
        ranks.append(tuple(action for name in order for action in groups[name]))
    return Schedule(stages=schedule.stages, ranks=tuple(ranks))


def within(schedule: Schedule, durations: Durations) -> float:
    """Makespan; infinite for a deadlock."""
    try:
        return simulate(schedule, durations, record=False).makespan_s
    except VerifyError:
        return float("inf")


@pytest.mark.parametrize(("kind", "parts"), [("1f1b", "FB"), ("zb-h1", "FIW")])
@pytest.mark.parametrize("duration", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 2.0, 0.5)])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (2, 5), (3, 3)])
def test_no_order_of_equal_stages_is_faster_within_the_same_memory(
    kind: ScheduleKind, parts: str, duration: tuple[float, float, float], stages: int, microbatches: int
) -> None:
    toys, flow = chain(stages)
    durations = equal(list(flow.stages), *duration)
    ours = build_schedule(toys, [flow] * microbatches, kind)
    every = product(*(orders(parts, microbatches, in_flight(kind, toy.depth, microbatches)) for toy in toys))
    best_s = min(within(reordered(ours, by_rank), durations) for by_rank in every)
    assert simulate(ours, durations).makespan_s == best_s


def test_a_deadlock_is_reported() -> None:
    schedule = Schedule.parse("stages: a b\nrank 0: 0RECV_B0<1 0F0\nrank 1: 1RECV_F0<0 1F0")
    with pytest.raises(VerifyError, match="deadlocks: rank 0 at step 0 \\(0RECV_B0<1\\), rank 1 at step 0"):
        simulate(schedule, equal(["a", "b"], 1.0, 1.0))
