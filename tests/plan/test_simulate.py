"""The simulator: closed forms, links, and the published measurements of Cornstarch."""

from __future__ import annotations

from statistics import median

import pytest
from plan_flows import chain, random_case

from mmcompile.errors import VerifyError
from mmcompile.plan.schedule import ActionKind, Flow, FlowEdge, Schedule, build_schedule
from mmcompile.plan.simulate import StageDuration, simulate

MICROBATCHES = 24


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 5), (4, 4), (4, 24), (6, 8)])
def test_equal_stages_take_n_plus_s_minus_1_turns(stages: int, microbatches: int) -> None:
    toys, flow = chain(stages)
    times = {toy.name: StageDuration(forward_s=2.0, input_grad_s=3.0) for toy in toys}
    timeline = simulate(build_schedule(toys, [flow] * microbatches), times)
    assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * 5.0)
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.busy_s == pytest.approx([5.0 * microbatches] * stages)


def test_a_slow_stage_sets_the_pace() -> None:
    # Oobleck's critical path: all stages once, the slowest for the rest.
    toys, flow = chain(3)
    times = {f"s{i}": StageDuration(forward_s=f, input_grad_s=2 * f) for i, f in enumerate((1.0, 1.0, 4.0))}
    timeline = simulate(build_schedule(toys, [flow] * 10), times)
    assert timeline.makespan_s == pytest.approx((1 + 1) * 3.0 + 10 * 12.0)


def test_links_delay_and_messages_queue_one_behind_another() -> None:
    toys, flow = chain(2, backward=False)
    times = {"s0": StageDuration(forward_s=1.0, input_grad_s=0.0), "s1": StageDuration(forward_s=1.0, input_grad_s=0.0)}
    timeline = simulate(build_schedule(toys, [flow] * 3), times, {("s0", "s1"): 2.0})
    sends = [(e.start_s, e.end_s) for e in timeline.events if e.kind is ActionKind.SEND_F]
    assert sends == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)]
    assert timeline.makespan_s == 8.0
    assert timeline.busy_s == (3.0, 3.0)


def test_independent_encoders_run_at_the_same_time() -> None:
    stages, _ = chain(3)
    stages = [type(stages[0])(name=stage.name, ranks=stage.ranks, depth=int(stage.name != "s2")) for stage in stages]
    edges = tuple(FlowEdge(source=name, target="s2", gradient=False) for name in ("s0", "s1"))
    flow = Flow(stages=("s0", "s1", "s2"), edges=edges, backward=("s2",))
    times = {name: StageDuration(forward_s=5.0, input_grad_s=0.0) for name in ("s0", "s1")}
    times["s2"] = StageDuration(forward_s=1.0, input_grad_s=1.0)
    assert simulate(build_schedule(stages, [flow]), times).makespan_s == pytest.approx(7.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_does_two_things_at_once_and_nothing_runs_before_its_inputs(seed: int) -> None:
    stages, flows = random_case(seed)
    times = {stage.name: StageDuration(forward_s=1.0 + i, input_grad_s=2.0 + i) for i, stage in enumerate(stages)}
    timeline = simulate(build_schedule(stages, flows), times)
    computing = [event for event in timeline.events if event.kind in (ActionKind.F, ActionKind.B)]
    for rank in range(len(timeline.busy_s)):
        mine = sorted((e.start_s, e.end_s) for e in computing if e.rank == rank)
        assert all(end <= start for (_, end), (start, _) in zip(mine, mine[1:], strict=False))
    when = {(e.stage, e.kind, e.microbatch): e for e in computing}
    for microbatch, flow in enumerate(flows):
        for edge in flow.edges:
            source = when[edge.source, ActionKind.F, microbatch]
            assert source.end_s <= when[edge.target, ActionKind.F, microbatch].start_s
            if edge.gradient:
                gradient = when[edge.target, ActionKind.B, microbatch]
                assert gradient.end_s <= when[edge.source, ActionKind.B, microbatch].start_s


def test_a_deadlock_is_reported() -> None:
    schedule = Schedule.parse("stages: a b\nrank 0: 0RECV_B0<1 0F0\nrank 1: 1RECV_F0<0 1F0")
    times = {name: StageDuration(forward_s=1.0, input_grad_s=1.0) for name in "ab"}
    with pytest.raises(VerifyError, match="deadlocks: rank 0 at step 0 \\(0RECV_B0<1\\), rank 1 at step 0"):
        simulate(schedule, times)


# Cornstarch, Tables 3 (medium language model) and 11 (large): (encoder forward, language model forward, encoder back-
# ward, language model backward) [ms] of a stage and (encoder, language model) stages (Table 9), split with and then
# without knowing what is frozen; throughput with over without. Table 10 contradicts Table 9's counts and is left out.
PUBLISHED = {
    "M VLM-S": ((49.06, 27.46, 0.12, 43.03), (1, 6), (26.49, 28.13, 0.16, 51.32), (1, 3), 6.47 / 5.30),
    "M VLM-M": ((75.04, 28.15, 0.27, 51.30), (2, 5), (45.90, 45.26, 0.16, 84.89), (3, 4), 5.15 / 3.73),
    "M ALM-S": ((57.25, 81.73, 0.38, 157.12), (1, 6), (57.79, 81.94, 0.38, 157.14), (1, 5), 1.94 / 1.94),
    "M ALM-M": ((176.80, 82.19, 0.64, 157.51), (1, 6), (93.39, 98.25, 0.34, 189.11), (4, 4), 1.96 / 1.70),
    "M VLM-L": ((101.02, 34.67, 0.20, 63.77), (4, 5), (70.42, 67.03, 0.15, 127.34), (5, 3), 3.17 / 2.06),
    "M ALM-L": ((308.16, 100.20, 0.73, 188.50), (2, 4), (145.97, 121.21, 0.33, 235.23), (5, 5), 1.98 / 1.69),
    "L VLM-S": ((52.54, 88.58, 0.10, 171.72), (1, 5), (85.83, 106.26, 0.10, 171.38), (5, 3), 2.39 / 2.10),
    "L VLM-M": ((249.38, 88.95, 0.49, 171.68), (1, 5), (132.16, 113.64, 0.26, 213.58), (1, 5), 2.29 / 1.85),
    "L VLM-L": ((481.44, 106.53, 0.74, 215.06), (1, 4), (246.22, 146.62, 0.38, 287.14), (2, 4), 1.76 / 1.81),
    "L ALM-S": ((76.84, 286.16, 0.24, 596.40), (1, 5), (78.80, 285.07, 0.24, 594.31), (1, 5), 0.72 / 0.73),
    "L ALM-M": ((197.21, 287.37, 0.45, 597.47), (1, 5), (101.97, 359.27, 0.24, 743.91), (1, 3), 0.72 / 0.62),
    "L ALM-L": ((319.31, 286.31, 0.50, 596.50), (1, 5), (177.29, 356.06, 0.27, 742.80), (2, 4), 0.71 / 0.61),
}
# What another simulator, written independently, makes of the same numbers.
INDEPENDENT = {
    **{"M VLM-S": 1.00, "M VLM-M": 1.54, "M ALM-S": 0.97, "M ALM-M": 1.14, "M VLM-L": 1.68, "M ALM-L": 1.21},
    **{"L VLM-S": 1.04, "L VLM-M": 1.23, "L VLM-L": 0.95, "L ALM-S": 1.00, "L ALM-M": 1.15, "L ALM-L": 1.20},
}


def iteration_ms(times: tuple[float, float, float, float], counts: tuple[int, int]) -> float:
    """An encoder's equal stages, then the language model's, 1F1B."""
    encoder, language = counts
    toys, flow = chain(encoder + language)
    durations = {
        toy.name: StageDuration(forward_s=times[0], input_grad_s=times[2])
        if index < encoder
        else StageDuration(forward_s=times[1], input_grad_s=times[3])
        for index, toy in enumerate(toys)
    }
    return simulate(build_schedule(toys, [flow] * MICROBATCHES), durations).makespan_s


def simulated_ratio(row: str) -> float:
    aware, aware_counts, unaware, unaware_counts, _ = PUBLISHED[row]
    return iteration_ms(unaware, unaware_counts) / iteration_ms(aware, aware_counts)


@pytest.mark.parametrize("row", PUBLISHED)
def test_replay_agrees_with_an_independent_simulator_to_rounding(row: str) -> None:
    assert simulated_ratio(row) == pytest.approx(INDEPENDENT[row], abs=0.006)


def test_replay_is_within_three_percent_of_the_published_ratios_in_the_median() -> None:
    errors = [abs(simulated_ratio(row) / published[-1] - 1) for row, published in PUBLISHED.items()]
    assert median(errors) < 0.035
    # The largest, 18%, is a row that contradicts itself: one encoder stage takes 49.06 ms with and 26.49 ms without.
    assert max(errors) < 0.20
