"""Nodes that come and go, coordinator and store that fail, data of other kinds, and all of it at random."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.elastic_model import Data
from support.processes.control_jobs import Act
from support.processes.elastic_checks import (
    IN_A_STEP,
    LEASE,
    STEP_S,
    Chaos,
    check,
    check_outcome,
    check_saved,
    last_generation,
    quick,
    strike,
)
from support.processes.elastic_jobs import Run

from mmcompile.runtime.control.events import EventKind, recoveries

SLOW = pytest.mark.slow


@pytest.mark.parametrize("how", ["worker", pytest.param("agent", marks=SLOW)])
def test_a_node_with_notice_leaves_after_its_step(chaos: Chaos, tmp_path: Path, how: str) -> None:
    run = Run(folder=str(tmp_path), kind="five")
    if how == "worker":
        run = strike(run, "backward", "term", rank=3, step=4)
    else:
        run = replace(run, num_steps=10, step_s=STEP_S, acts=(Act(after='"step":4', do="drain", node="b"),))
    events = check(chaos, run, left=4)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]
    (recovery,) = recoveries(events)
    assert "must go" in recovery.cause
    quick(run, events)


def test_a_node_joins(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="add", node="z"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, acts=acts)
    events = check(chaos, run, left=6)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]
    _, plan = last_generation(tmp_path)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [2, 2, 2]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=SLOW)])
def test_a_killed_node_comes_back(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, max_restarts=1, deadline_s=LEASE)
    run = strike(run, "reduced", rank=rank, step=4)
    assert len(recoveries(check(chaos, run, left=5))) == 2


@SLOW
def test_down_to_the_least_and_up_again(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="seven", num_steps=60, step_s=STEP_S / 2)
    lost = "bdf"
    acts = [Act(after=f'"step":{4 * number + 3}', do="kill_agent", node=node) for number, node in enumerate(lost)]
    acts += [Act(after=f'"step":{5 * number + 20}', do="add", node=node) for number, node in enumerate(lost)]
    events = check(chaos, replace(run, acts=tuple(acts)), left=7)
    assert len(recoveries(events)) == 6


def test_coordinator_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_coordinator"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, acts=acts)
    events = check(chaos, run, left=5)
    assert [event for event in events if event.kind is EventKind.RESUMED]
    assert not [event for event in events if event.kind is EventKind.DETECTED], "nobody was lost"


@pytest.mark.parametrize("record", ["prepared", "activated", "committed", "ended"])
@pytest.mark.parametrize("side", ["before", "after"])
@SLOW
def test_coordinator_killed_around_a_record(chaos: Chaos, tmp_path: Path, record: str, side: str) -> None:
    run = Run(folder=str(tmp_path), kind="five")
    check(chaos, strike(run, f"{side}-log-{record}", step=4 if record == "committed" else None), left=5)


@pytest.mark.parametrize("record", ["prepared", "activated"])
@pytest.mark.parametrize("side", ["before", "after"])
@SLOW
def test_coordinator_killed_while_a_failure_is_recovered(chaos: Chaos, tmp_path: Path, record: str, side: str) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), "backward", rank=3, step=4)
    events = check(chaos, strike(run, f"{side}-log-{record}", generation=2), left=4)
    assert len(recoveries(events)) == 1


@SLOW
def test_coordinator_and_a_node_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_coordinator"), Act(after="restarted", do="kill_agent", node="c"))
    check(chaos, Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, acts=acts), left=4)


@SLOW
def test_store_and_an_agent_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_store"), Act(after='"step":6', do="kill_agent", node="b"))
    run = Run(folder=str(tmp_path), kind="five", num_steps=10, step_s=STEP_S, acts=acts)
    quick(run, check(chaos, run, left=4))


@pytest.mark.parametrize(("data", "point"), [("mixed", "backward"), ("stream", "committed")])
@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=SLOW)])
def test_other_data(chaos: Chaos, tmp_path: Path, data: Data, point: str, rank: int) -> None:
    """Microbatches without images, which come up while training; and data that is read on from where it was."""
    run = strike(Run(folder=str(tmp_path), kind="five", data=data), point, rank=rank, step=5)
    check(chaos, run, left=4)


@SLOW
@pytest.mark.parametrize("seed", range(4))
def test_random_faults(chaos: Chaos, tmp_path: Path, seed: int) -> None:
    """Faults of workers and the coordinator anywhere; nodes come back. Where a layer is lost, the checkpoint has it."""
    draw = random.Random(seed)
    run = Run(
        folder=str(tmp_path),
        kind="seven",
        num_steps=30,
        save_every=2,
        step_s=STEP_S,
        deadline_s=LEASE,
        max_restarts=20,
        max_attempts=40,
        timeout_s=240,
    )
    actions = ("kill", "kill", "kill", "exit", "exception", "stop", "gil")
    for _ in range(6):
        point = draw.choice((*IN_A_STEP, "gathering"))
        run = strike(run, point, draw.choice(actions), rank=draw.randrange(7), step=draw.randrange(4, 30))
    for _ in range(4):
        point = draw.choice(("superseded", "prepared", "connected", "copied", "active"))
        run = strike(run, point, draw.choice(actions), rank=draw.randrange(7), generation=draw.randrange(2, 8))
    run = strike(run, draw.choice(("sending", "receiving")), draw.choice(actions))
    for record in ("prepared", "activated"):
        run = strike(run, f"{draw.choice(('before', 'after'))}-log-{record}", generation=draw.randrange(2, 8))
    answer = chaos.do(run)
    if answer.error:
        # Fewer than four nodes were left for a moment.
        assert "are left and 4 are needed" in answer.error, answer.error
        check_saved(chaos, run, answer)
    else:
        check_outcome(chaos, run, answer)
