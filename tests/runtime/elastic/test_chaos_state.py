"""State that is saved while nodes fail, and lost; and ends of training that no node is to blame for."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.elastic_model import BROKEN, Data, batches
from support.processes.elastic_checks import LEASE, STEP_S, Chaos, check, check_saved, quick, strike
from support.processes.elastic_jobs import Run

from mmcompile.data.batches import MapBatches
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.control.events import EventKind, EventReader

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [
        ("saving", 0, 4),
        pytest.param("gathering", 0, 4, marks=SLOW),
        pytest.param("gathering", 3, 4, marks=SLOW),
        pytest.param("saving", 0, 6, marks=SLOW),
        pytest.param("gathering", 2, 6, marks=SLOW),
    ],
)
def test_killed_while_saving(chaos: Chaos, tmp_path: Path, point: str, rank: int, step: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", save_every=2), point, rank=rank, step=step)
    events = check(chaos, run, left=4)
    assert checkpoint.read(tmp_path / "checkpoint").trainer.step == run.num_steps
    assert not list(tmp_path.glob("checkpoint.*")), "what was half written is gone"
    if step < run.num_steps:
        quick(run, events)


@pytest.mark.parametrize("rank", range(5))
@SLOW
def test_killed_after_the_last_step(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    check(chaos, strike(Run(folder=str(tmp_path), kind="five"), "before-finish", rank=rank), left=4)


def test_lost_state_comes_back_from_the_checkpoint(chaos: Chaos, tmp_path: Path) -> None:
    """Both nodes that hold the first layers are lost; steps done after the checkpoint are done again."""
    run = Run(folder=str(tmp_path), kind="five", save_every=3, max_restarts=1, step_s=STEP_S, deadline_s=LEASE)
    run = strike(run, "reduced", rank=1, step=6)
    run = strike(run, "superseded", rank=3, generation=1)
    events = check(chaos, run, left=5, steps=[1, 2, 3, 4, 5, 4, 5, 6])
    (back,) = [event for event in events if event.kind is EventKind.ROLLED_BACK]
    assert back.step == 3
    assert "no node holds language_model" in (back.cause or "")


@SLOW
def test_all_nodes_die_and_come_back(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(
        folder=str(tmp_path), kind="five", num_steps=8, save_every=2, max_restarts=1, step_s=STEP_S, deadline_s=LEASE
    )
    run = strike(run, "backward", rank=0, step=6)
    for rank in (1, 2, 3, 4):
        run = strike(run, "superseded", rank=rank, generation=1)
    check(chaos, run, left=5, steps=[1, 2, 3, 4, 5, 5, 6, 7, 8])


@SLOW
def test_lost_state_while_saving_comes_back_from_the_checkpoint_before(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(
        folder=str(tmp_path), kind="five", num_steps=8, save_every=2, max_restarts=1, step_s=STEP_S, deadline_s=LEASE
    )
    run = strike(run, "saving", rank=0, step=4)
    for rank in (1, 3):
        run = strike(run, "superseded", rank=rank, generation=1)
    check(chaos, run, left=5, steps=[1, 2, 3, 4, 3, 4, 5, 6, 7, 8])


@SLOW
def test_lost_state_before_the_first_checkpoint(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), "reduced", rank=1, step=4)
    run = strike(run, "superseded", rank=3, generation=1)
    answer = chaos.do(run)
    assert "no node holds language_model" in answer.error
    assert "there is no checkpoint" in answer.error
    assert answer.steps == (1, 2, 3)


def test_too_few_nodes_save_what_they_hold(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), "backward", rank=4, step=3)
    run = strike(run, "backward", rank=1, step=6)
    answer = chaos.do(run)
    assert "3 nodes are left and 4 are needed" in answer.error
    assert answer.steps == (1, 2, 3, 4, 5)
    check_saved(chaos, run, answer)


@SLOW
def test_a_node_dies_while_the_state_is_saved_at_last(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="six"), "backward", rank=5, step=3)
    run = strike(run, "superseded", rank=4, generation=1)
    run = strike(run, "committed", rank=2, step=5)
    # The first two nodes hold everything between them.
    run = strike(run, "gathering", rank=2)
    answer = chaos.do(run)
    assert "2 nodes are left and 4 are needed" in answer.error
    assert answer.steps == (1, 2, 3, 4, 5)
    check_saved(chaos, run, answer)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("broken", f"sample {BROKEN} of the Broken failed: OSError: no such image: {BROKEN}.png"),
        pytest.param("unjoined", "KeyError: 'conversation'", marks=SLOW),
    ],
)
def test_bad_data_ends_training(chaos: Chaos, tmp_path: Path, data: Data, error: str) -> None:
    answer = chaos.do(Run(folder=str(tmp_path), kind="five", data=data))
    assert error in answer.error
    events = list(EventReader(tmp_path / "events.jsonl").read())
    assert not [event for event in events if event.kind is EventKind.DETECTED], "no node is to blame"
    order = batches("map")
    assert isinstance(order, MapBatches)
    first = next(step for step in range(1, 9) if BROKEN in order.indices(step))
    assert first > 1
    assert answer.steps == tuple(range(1, first))


@SLOW
def test_what_no_node_can_compute_ends_training(chaos: Chaos, tmp_path: Path) -> None:
    """A token that is no word: it looks like a node that fails, and then like the next one."""
    run = Run(folder=str(tmp_path), kind="five", data="poisoned", max_restarts=8, max_attempts=3)
    answer = chaos.do(run)
    # By then, nodes were faster to come back than to be lost, or they were not.
    ends = ("3 generations in a row without a committed step", "are left and 4 are needed")
    assert any(end in answer.error for end in ends), answer.error
    causes = [
        event.cause or "" for event in EventReader(tmp_path / "events.jsonl").read() if event.kind is EventKind.DETECTED
    ]
    assert sum("IndexError: index out of range" in cause for cause in causes) >= 2
    assert answer.steps == (1, 2)


@SLOW
def test_replicas_that_drift_apart_end_training(chaos: Chaos, tmp_path: Path) -> None:
    answer = chaos.do(Run(folder=str(tmp_path), kind="five", drifts=True))
    assert "replicas of layer" in answer.error
    assert answer.steps == (1, 2, 3, 4, 5, 6)
    events = list(EventReader(tmp_path / "events.jsonl").read())
    assert not [event for event in events if event.kind is EventKind.DETECTED], "no node is to blame"
