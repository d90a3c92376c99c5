"""Nodes that fail at exact moments, of a step and of a recovery: nothing is lost, and nothing waits for its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes.control_jobs import Act
from support.processes.elastic_checks import (
    IN_A_STEP,
    LEASE,
    STEP_S,
    Chaos,
    check,
    last_generation,
    quick,
    strike,
)
from support.processes.elastic_jobs import Run

from mmcompile.runtime.control.events import EventKind, recoveries

SLOW = pytest.mark.slow


def cases(core: Sequence[tuple[str, int]], points: Sequence[str], ranks: Sequence[int]) -> list[object]:
    """All points with all ranks; those that are not core are slow."""
    slow = [(point, rank) for point in points for rank in ranks if (point, rank) not in core]
    return [*core, *(pytest.param(point, rank, marks=SLOW) for point, rank in slow)]


@SLOW
def test_the_pipelines_do_not_matter(chaos: Chaos, tmp_path: Path) -> None:
    """The reference runs on two unlike pipelines; here are three."""
    run = Run(folder=str(tmp_path), kind="six")
    events = check(chaos, run, left=6)
    _, plan = last_generation(tmp_path)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [2, 2, 2]
    assert not [event for event in events if event.kind is EventKind.DETECTED]


@pytest.mark.parametrize(
    ("point", "rank"),
    cases(
        [("receive", 4), ("backward", 1), ("reducing", 3), ("committed", 0)],
        IN_A_STEP,
        range(5),
    ),
)
def test_killed_in_a_step(chaos: Chaos, tmp_path: Path, point: str, rank: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), point, rank=rank, step=4)
    events = check(chaos, run, left=4)
    (recovery,) = recoveries(events)
    assert "SIGKILL" in recovery.cause
    assert recovery.num_attempts == 1
    quick(run, events)
    replayed = [event.step for event in events if event.kind is EventKind.REPLAYED]
    assert replayed == [4 if point in IN_A_STEP[:5] else 5]


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("stop", "was silent for"),
        pytest.param("exception", "InjectedFault: fault injected at backward", marks=SLOW),
        pytest.param("exit", "ended with exit code 7", marks=SLOW),
        pytest.param("segfault", "SIGSEGV", marks=SLOW),
        pytest.param("gil", "was silent for", marks=SLOW),
    ],
)
def test_other_ways_to_fail(chaos: Chaos, tmp_path: Path, action: str, cause: str) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", deadline_s=LEASE), "backward", action, rank=3, step=4)
    (recovery,) = recoveries(check(chaos, run, left=4))
    assert cause in recovery.cause
    assert recovery.total_s < LEASE


@SLOW
def test_a_slow_worker_is_no_failure(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", deadline_s=LEASE), "backward", "sleep", rank=3, step=4)
    events = check(chaos, run, left=5)
    assert not [event for event in events if event.kind is EventKind.DETECTED]


def test_a_stopped_node_that_wakes_up_is_kept_out(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="stop_node", node="b"), Act(after="replayed", do="cont_node", node="b"))
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, deadline_s=LEASE, acts=acts)
    events = check(chaos, run, left=4)
    assert [event.cause for event in events if event.kind is EventKind.REFUSED and "given up" in (event.cause or "")]


@SLOW
def test_a_stopped_node_that_never_wakes_up(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="stop_node", node="b"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, deadline_s=LEASE, acts=acts)
    check(chaos, run, left=4)


def test_a_pipeline_dies_as_a_whole(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="six"), "backward", rank=3, step=4)
    run = strike(run, "superseded", rank=2, generation=1)
    quick(run, check(chaos, run, left=4))


@pytest.mark.parametrize(
    "ranks",
    [(0, 3), pytest.param((1, 5), marks=SLOW), pytest.param((2, 4), marks=SLOW), pytest.param((1, 2), marks=SLOW)],
)
def test_two_die_at_once_in_different_pipelines(chaos: Chaos, tmp_path: Path, ranks: tuple[int, int]) -> None:
    run = Run(folder=str(tmp_path), kind="six")
    for rank in ranks:
        run = strike(run, "before-step", rank=rank, step=4)
    quick(run, check(chaos, run, left=4))


@SLOW
def test_an_idle_node_steps_in(chaos: Chaos, tmp_path: Path) -> None:
    """Five nodes are two pipelines of two; the fifth waits, and knows nothing of what trains."""
    run = strike(Run(folder=str(tmp_path), kind="six"), "backward", rank=1, step=3)
    run = strike(run, "backward", rank=2, step=5)
    events = check(chaos, run, left=4)
    assert len(recoveries(events)) == 2
    quick(run, events)


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=SLOW)])
def test_workers_of_a_node_die_together(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="wide"), "backward", rank=rank, step=4)
    quick(run, check(chaos, run, left=2))


@pytest.mark.parametrize(
    ("point", "rank"),
    cases(
        [("sending", -1), ("receiving", -1), ("said-ready", 4)],
        ("superseded", "prepared", "connected", "copied", "said-ready", "active"),
        (0, 3, 4),
    ),
)
def test_killed_while_another_failure_is_recovered(chaos: Chaos, tmp_path: Path, point: str, rank: int) -> None:
    """The first one, in the middle of the pipeline of three, makes others send layers."""
    run = strike(Run(folder=str(tmp_path), kind="seven"), "backward", rank=5, step=4)
    generation = None if rank < 0 else 1 if point == "superseded" else 2
    run = strike(run, point, rank=None if rank < 0 else rank, generation=generation)
    quick(run, check(chaos, run, left=5))


@pytest.mark.parametrize("point", ["prepared", "connected", "copied", "active"])
@SLOW
def test_killed_while_the_first_generation_is_made(chaos: Chaos, tmp_path: Path, point: str) -> None:
    run = strike(
        Run(folder=str(tmp_path), kind="five", max_restarts=1, step_s=STEP_S, deadline_s=LEASE),
        point,
        rank=1,
        generation=1,
    )
    check(chaos, run, left=5)
