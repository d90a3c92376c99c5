"""Runs in virtual time: small traces worked out by hand, and the books balanced over random ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.plans.template_jobs import even_job, timed_job, timed_template

from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.replay.replay_run import ReplayConstants, SystemReplay, TimeKind, save_interval_s
from mmcompile.planner.resilience.replay.restart_baselines import RedundantRun, RestartRun, fastest_grid
from mmcompile.planner.resilience.replay.spot_trace import SpotTrace, TraceChange
from mmcompile.planner.resilience.replay.systems import TemplateRun, replay_trace

KNOWN = ReplayConstants(
    creation_s=0.0,
    reconfigure_s=2.0,
    bytes_per_s=100.0,
    restart_s=20.0,
    store_bytes_per_s=240.0,
    rendezvous_s=30.0,
    redundancy_slowdown=1.5,
)

NEVER = 1e6


def job_of_pairs(fault_tolerance: int = 0) -> Job:
    """Pipelines of two or three nodes, 1200 bytes of state, 8 microbatches; two pairs make a step in 9 s, one in 17 s."""
    templates = (timed_template(2, 1.0, 2.0), timed_template(3, 1.0, 1.5))
    return timed_job(templates, fault_tolerance=fault_tolerance, num_microbatches=8)


def trace_of(duration_s: float, *changes: tuple[float, tuple[int, ...], tuple[int, ...]]) -> SpotTrace:
    return SpotTrace(
        name="by hand",
        duration_s=duration_s,
        changes=tuple(TraceChange(time_s=time_s, added=added, removed=removed) for time_s, added, removed in changes),
    )


def spans(found: SystemReplay) -> list[tuple[float, float, TimeKind]]:
    return [(span.start_s, span.end_s, span.spent) for span in found.spans]


def test_templates_repeat_the_step_that_was_cut_off() -> None:
    """Five nodes are a pair and a triple; 4 goes at 12 s, and 3 keeps two of the six layers that its new part needs."""
    run = TemplateRun(job_of_pairs(), 10, KNOWN, NEVER)
    found = run.play(trace_of(40, (0, (0, 1, 2, 3, 4), ()), (12, (), (4,))))
    assert spans(found) == [
        (0, 8.5, TimeKind.USEFUL),  # 3 microbatches in the pair, 5 in the triple: max(1 + 3 * 2, 1 + 5 * 1.5)
        (8.5, 12, TimeKind.REPEATED),
        (12, 18, TimeKind.PAUSED),  # 2 + 400 / 100
        (18, 36, TimeKind.USEFUL),
        (36, 40, TimeKind.USEFUL),
    ]
    assert found.samples == 3 * 80
    assert (found.lost_samples, found.num_pauses) == (0, 1)


def test_templates_stop_and_come_back() -> None:
    """Below four nodes the state is saved and training stops; with four it starts from there."""
    run = TemplateRun(job_of_pairs(fault_tolerance=1), 10, KNOWN, NEVER)
    found = run.play(trace_of(100, (0, (0, 1, 2, 3), ()), (10, (), (3,)), (30, (4,), ())))
    assert spans(found)[:5] == [
        (0, 9, TimeKind.USEFUL),
        (9, 10, TimeKind.REPEATED),
        (10, 15, TimeKind.SAVING),
        (15, 30, TimeKind.STOPPED),
        (30, 55, TimeKind.PAUSED),
    ]
    assert found.lost_samples == 0
    assert found.samples == 80 + 80 * (45 // 9)


def test_templates_join_at_the_end_of_a_step() -> None:
    run = TemplateRun(job_of_pairs(), 10, KNOWN, NEVER)
    found = run.play(trace_of(60, (0, (0, 1), ()), (20, (2, 3), ())))
    assert spans(found)[:4] == [
        (0, 17, TimeKind.USEFUL),
        (17, 34, TimeKind.USEFUL),
        (34, 42, TimeKind.PAUSED),  # six layers to each of two nodes, 2 + 600 / 100
        (42, 60, TimeKind.USEFUL),
    ]


def test_lost_state_goes_back_to_the_last_checkpoint() -> None:
    """One pair, and one of it goes: everything since the start is trained again."""
    run = TemplateRun(job_of_pairs(), 10, KNOWN, NEVER)
    found = run.play(trace_of(100, (0, (0, 1), ()), (40, (), (1,)), (50, (2,), ())))
    assert found.lost_samples == 160
    assert spans(found)[:4] == [
        (0, 34, TimeKind.REPEATED),
        (34, 40, TimeKind.REPEATED),
        (40, 50, TimeKind.STOPPED),
        (50, 75, TimeKind.PAUSED),
    ]
    assert found.samples == 80


def test_restarting_loses_what_was_not_saved() -> None:
    """Saved at 54 s (the first step end after 50 s) in 5 s; the loss at 80 s undoes two steps and costs 20 + 5 s."""
    run = RestartRun(job_of_pairs(), 10, KNOWN, 50.0)
    found = run.play(trace_of(125, (0, (0, 1, 2, 3, 4), ()), (80, (), (4, 3))))
    assert fastest_grid(run.job, 5) == fastest_grid(run.job, 4)
    assert spans(found) == [
        (0, 54, TimeKind.USEFUL),
        (54, 59, TimeKind.SAVING),
        (59, 77, TimeKind.REPEATED),
        (77, 80, TimeKind.REPEATED),
        (80, 105, TimeKind.PAUSED),
        (105, 118, TimeKind.USEFUL),
        (118, 125, TimeKind.USEFUL),
    ]
    assert found.lost_samples == 160


def test_restarting_takes_new_nodes_at_a_checkpoint() -> None:
    run = RestartRun(job_of_pairs(), 10, KNOWN, 30.0)
    found = run.play(trace_of(100, (0, (0, 1), ()), (5, (2,), ()), (6, (3,), ())))
    assert spans(found)[:4] == [
        (0, 34, TimeKind.USEFUL),
        (34, 39, TimeKind.SAVING),
        (39, 64, TimeKind.PAUSED),
        (64, 100, TimeKind.USEFUL),
    ]


def test_redundant_computation_stands_in_for_one_neighbour() -> None:
    """A pair with a hole takes twice as long for a microbatch; when the other node goes too, its pipeline is given up."""
    run = RedundantRun(job_of_pairs(), 10, KNOWN, NEVER)
    found = run.play(trace_of(200, (0, (0, 1, 2, 3), ()), (20, (), (1,)), (100, (), (0,))))
    whole, holed, alone = 1.5 * 9, 1.5 * (1 + 2 * 8), 1.5 * 17
    assert spans(found) == [
        (0, whole, TimeKind.USEFUL),
        (whole, 20, TimeKind.REPEATED),
        (20, 50, TimeKind.PAUSED),
        (50, 50 + holed, TimeKind.USEFUL),
        (50 + holed, 100, TimeKind.REPEATED),
        (100, 130, TimeKind.PAUSED),
        (130, 130 + 2 * alone, TimeKind.USEFUL),
        (130 + 2 * alone, 200, TimeKind.USEFUL),
    ]
    assert found.useful_share == pytest.approx(1 / 1.5)


def test_redundant_computation_restarts_when_no_pipeline_is_left() -> None:
    run = RedundantRun(job_of_pairs(), 10, KNOWN, NEVER)
    found = run.play(trace_of(100, (0, (0, 1), ()), (30, (), (1,)), (40, (2,), ()), (80, (), (0, 2))))
    assert found.lost_samples == 80
    assert spans(found)[-1] == (80, 100, TimeKind.STOPPED)


def random_trace(rng: random.Random) -> SpotTrace:
    live = [*range(rng.randint(4, 10))]
    total = len(live)
    changes: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(0.0, tuple(live), ())]
    time_s = 0.0
    for _ in range(20):
        time_s += rng.choice([1.0, 40.0, 400.0]) * rng.random()
        gone = tuple(rng.sample(live, min(len(live), rng.choice([0, 1, 1, 2]))))
        come = tuple(range(total, total + rng.choice([0, 0, 1, 2])))
        total += len(come)
        live = [node for node in live if node not in gone] + list(come)
        changes.append((time_s, come, gone))
    return trace_of(time_s + 100, *changes)


@pytest.mark.parametrize("seed", range(12))
def test_the_books_balance(seed: int) -> None:
    rng = random.Random(seed)
    fault_tolerance = rng.randint(0, 2)
    job = even_job(range(2, 7), fault_tolerance=fault_tolerance)
    trace = random_trace(rng)
    constants = replace(ReplayConstants(), creation_s=rng.choice([0.0, 45.0]))
    found = replay_trace(job, trace, microbatch_samples=4, constants=constants)
    for one in found.systems:
        assert one.spans[0].start_s == 0 and one.spans[-1].end_s == pytest.approx(trace.duration_s)
        assert all(a.end_s == b.start_s for a, b in zip(one.spans, one.spans[1:], strict=False))
        assert sum(one.seconds(spent) for spent in TimeKind) == pytest.approx(trace.duration_s)
        assert 0 <= one.useful <= 1
        assert one.samples % (job.num_microbatches * 4) == 0
        assert sum(rate for _, rate in one.curve(50)) / 50 == pytest.approx(one.samples_per_s)
    if all(len(change.removed) <= fault_tolerance for change in trace.changes):
        assert found.systems[0].lost_samples == 0
    assert replay_trace(job, trace, microbatch_samples=4, constants=constants) == found


def test_youngs_interval() -> None:
    trace = trace_of(800, (0, (0, 1, 2, 3), ()), (10, (), (0,)), (20, (), (1, 2)))
    assert save_interval_s(trace, 4.0) == (2 * 4 * 400) ** 0.5
