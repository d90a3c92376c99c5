"""Real processes that fail at exact moments: every step is committed once, and the sum is right."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes.control_jobs import MICROBATCHES, Act, Job, run_job, value
from support.processes.spawn_ranks import JobProcess

from mmcompile.runtime.control.events import EventKind, EventReader, RunEvent, recoveries
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.messages import PROTOCOL_VERSION
from mmcompile.runtime.monitoring.fail_points import FaultAction, Strike

THREE = {"a": 1, "b": 1, "c": 1}
FOUR = {**THREE, "d": 1}
SLOW_S = 0.02
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs() -> Iterator[JobProcess]:
    with JobProcess() as process:
        yield process


def strike(folder: Path, point: str, action: str, *, rank: int | None = None, **where: int) -> Strike:
    """A fault that strikes once."""
    marker = str(folder / f"struck-{point}-{rank}")
    return Strike(point=point, action=FaultAction(action), rank=rank, marker=marker, **where)


def check(jobs: JobProcess, job: Job, *, survivors: int) -> list[RunEvent]:
    """Run a job and check everything that holds for all; returns its events."""
    answer = jobs.call(run_job, job)
    folder = Path(job.folder)
    events = list(EventReader(folder / "events.jsonl").read())
    assert answer["success"], [event for event in events if event.cause][-3:]
    committed = [event for event in events if event.kind is EventKind.COMMITTED]
    assert [event.step for event in committed] == list(range(1, job.num_steps + 1))
    ids = [number for event in committed for number in event.microbatches or ()]
    assert sorted(ids) == list(range(MICROBATCHES * job.num_steps))
    started = [event.generation for event in events if event.kind is EventKind.PREPARE]
    assert started == sorted(set(started))
    results = [json.loads(path.read_text()) for path in folder.glob("result-*")]
    assert len(results) >= survivors
    assert {result["sum"] for result in results} == {sum(map(value, ids))}
    log = Log.open(folder / "coordinator.log")
    log.close()
    assert log.history.committed == job.num_steps
    assert log.history.cursor == json.dumps({"step": job.num_steps})
    return events


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", ["before-step", "after-reduce", "after-commit"])
def test_killed_in_a_step(jobs: JobProcess, tmp_path: Path, point: str, rank: int) -> None:
    job = Job(folder=str(tmp_path), nodes=THREE, strikes=(strike(tmp_path, point, "kill", rank=rank, step=4),))
    (recovery,) = recoveries(check(jobs, job, survivors=2))
    assert "SIGKILL" in recovery.cause
    assert recovery.num_attempts == 1
    assert recovery.total_s < 2.0


@pytest.mark.parametrize(
    "point", ["prepared", pytest.param("connected", marks=SLOW), pytest.param("copied", marks=SLOW), "active"]
)
def test_killed_while_the_first_generation_is_made(jobs: JobProcess, tmp_path: Path, point: str) -> None:
    strikes = (strike(tmp_path, point, "kill", rank=1, generation=1),)
    check(jobs, Job(folder=str(tmp_path), nodes=THREE, strikes=strikes, max_restarts=1), survivors=2)


@pytest.mark.parametrize("point", ["superseded", "prepared", "connected", "copied", "active"])
def test_killed_while_another_failure_is_recovered(jobs: JobProcess, tmp_path: Path, point: str) -> None:
    second = 1 if point == "superseded" else 2
    strikes = (
        strike(tmp_path, "before-reduce", "kill", rank=3, step=4),
        strike(tmp_path, point, "kill", rank=1, generation=second),
    )
    found = recoveries(check(jobs, Job(folder=str(tmp_path), nodes=FOUR, strikes=strikes), survivors=2))
    assert sum(recovery.num_attempts for recovery in found) in (1, 2)
    assert sum(recovery.total_s for recovery in found) < 2.0, "a wait reached its timeout"


def test_two_killed_at_once(jobs: JobProcess, tmp_path: Path) -> None:
    strikes = tuple(strike(tmp_path, "before-reduce", "kill", rank=rank, step=4) for rank in (0, 2))
    check(jobs, Job(folder=str(tmp_path), nodes=FOUR, strikes=strikes), survivors=2)


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("exit", "ended with exit code 7"),
        ("segfault", "SIGSEGV"),
        ("exception", "InjectedFault: fault injected at before-reduce"),
        ("stop", "was silent for"),
        ("gil", "was silent for"),
    ],
)
def test_other_ways_to_fail(jobs: JobProcess, tmp_path: Path, action: str, cause: str) -> None:
    job = Job(folder=str(tmp_path), nodes=THREE, strikes=(strike(tmp_path, "before-reduce", action, rank=1, step=4),))
    (recovery,) = recoveries(check(jobs, job, survivors=2))
    assert cause in recovery.cause


def test_a_slow_worker_is_no_failure(jobs: JobProcess, tmp_path: Path) -> None:
    slow = replace(strike(tmp_path, "before-reduce", "sleep", rank=1, step=4), seconds=2.0)
    events = check(jobs, Job(folder=str(tmp_path), nodes=THREE, strikes=(slow,)), survivors=3)
    assert not [event for event in events if event.kind is EventKind.DETECTED]


@pytest.mark.parametrize("how", ["worker", "agent"])
def test_a_node_with_notice_leaves_after_its_step(jobs: JobProcess, tmp_path: Path, how: str) -> None:
    job = Job(folder=str(tmp_path), nodes=THREE, num_steps=20, step_s=SLOW_S)
    if how == "worker":
        job = replace(job, strikes=(strike(tmp_path, "before-reduce", "term", rank=1, step=4),))
    else:
        job = replace(job, acts=(Act(after='"step":4', do="drain", node="b"),))
    events = check(jobs, job, survivors=2)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]
    assert "must go" in recoveries(events)[0].cause


def test_workers_of_a_node_die_together(jobs: JobProcess, tmp_path: Path) -> None:
    strikes = (strike(tmp_path, "before-reduce", "kill", rank=1, step=4),)
    check(jobs, Job(folder=str(tmp_path), nodes={"a": 2, "b": 2}, strikes=strikes), survivors=2)


def test_a_killed_node_comes_back(jobs: JobProcess, tmp_path: Path) -> None:
    strikes = (strike(tmp_path, "before-reduce", "kill", rank=0, step=4),)
    job = Job(folder=str(tmp_path), nodes=THREE, strikes=strikes, max_restarts=1, num_steps=20, step_s=SLOW_S)
    assert len(recoveries(check(jobs, job, survivors=3))) == 2


def test_a_node_joins(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="add", node="z"),)
    job = Job(folder=str(tmp_path), nodes={"a": 1, "b": 1}, acts=acts, num_steps=20, step_s=SLOW_S)
    events = check(jobs, job, survivors=3)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]


def test_an_agent_takes_its_workers_with_it(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_agent", node="b"),)
    check(jobs, Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=20, step_s=SLOW_S), survivors=2)


def test_a_stopped_node_that_wakes_up_is_kept_out(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="stop_node", node="b"), Act(after="replayed", do="cont_node", node="b"))
    job = Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=60, step_s=SLOW_S, max_restarts=1)
    events = check(jobs, job, survivors=3)
    assert [event.cause for event in events if event.kind is EventKind.REFUSED and "given up" in (event.cause or "")]


@pytest.mark.parametrize("record", ["prepared", "activated", "committed", "ended"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_coordinator_killed_around_a_record(jobs: JobProcess, tmp_path: Path, record: str, side: str) -> None:
    step = {"step": 4} if record == "committed" else {}
    strikes = (strike(tmp_path, f"{side}-log-{record}", "kill", **step),)
    events = check(jobs, Job(folder=str(tmp_path), nodes=THREE, strikes=strikes), survivors=3)
    if record == "committed":
        assert not [event for event in events if event.kind is EventKind.DETECTED], (
            "it resumes without a new generation"
        )


def test_coordinator_and_a_node_killed(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_coordinator"), Act(after="restarted", do="kill_agent", node="c"))
    check(jobs, Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=30, step_s=SLOW_S), survivors=2)


def test_coordinator_stopped_for_longer_than_the_lease(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (
        Act(after='"step":3', do="stop_coordinator"),
        Act(after='"step":3', do="cont_coordinator", pause_s=2.5),
    )
    job = Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=20, step_s=SLOW_S)
    events = check(jobs, job, survivors=3)
    assert not [event for event in events if event.kind is EventKind.DETECTED], "nobody was lost"


def test_store_killed(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_store"), Act(after='"step":6', do="kill_agent", node="b"))
    check(jobs, Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=20, step_s=SLOW_S), survivors=2)


def test_strangers_are_refused_and_training_goes_on(jobs: JobProcess, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="strangers"),)
    job = Job(folder=str(tmp_path), nodes=THREE, acts=acts, num_steps=20, step_s=SLOW_S)
    events = check(jobs, job, survivors=3)
    assert not [event for event in events if event.kind is EventKind.DETECTED]
    reasons = "\n".join(event.cause or "" for event in events if event.kind is EventKind.REFUSED)
    for text in (
        "does not know the secret",
        f"protocol {PROTOCOL_VERSION + 1}, the coordinator speaks {PROTOCOL_VERSION}",
        "Hello before the proof",
        "a message of 2147483648 bytes",
        "a message of 5000 bytes, the limit is 4096",
        "malformed message",
    ):
        assert text in reasons, reasons


@pytest.mark.slow
def test_fifty_recoveries_cost_nothing_that_stays(jobs: JobProcess, tmp_path: Path) -> None:
    strikes = (Strike(point="after-reduce", action=FaultAction.EXIT, rank=2),)
    job = Job(folder=str(tmp_path), nodes=THREE, strikes=strikes, max_restarts=25, num_steps=120, step_s=0.03)
    events = check(jobs, job, survivors=2)
    assert sum(event.kind is EventKind.ACTIVE for event in events) >= 50
    survivors = 0
    for path in tmp_path.glob("result-*"):
        usage = json.loads(path.read_text())["usage"]
        if len(usage) >= 50:
            survivors += 1
            files, threads = zip(*usage, strict=True)
            for counts in (files, threads):
                assert max(counts[-10:]) <= max(counts[:10]), counts
    assert survivors == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_faults(jobs: JobProcess, tmp_path: Path, seed: int) -> None:
    """Many faults anywhere, of workers, agents and the coordinator; two nodes stay out of it."""
    draw = random.Random(seed)
    points = (
        "superseded",
        "prepared",
        "connected",
        "copied",
        "active",
        "before-reduce",
        "after-reduce",
        "after-commit",
    )
    kinds = ("kill", "kill", "exit", "exception", "stop", "gil")
    strikes = [
        replace(
            strike(tmp_path, draw.choice(points), draw.choice(kinds), rank=draw.randrange(2, 6)),
            marker=str(tmp_path / f"struck-{number}"),
            generation=None,
            step=None,
        )
        for number in range(12)
    ]
    records = ("prepared", "activated", "committed")
    strikes += [
        strike(tmp_path, f"{draw.choice(('before', 'after'))}-log-{draw.choice(records)}", "kill") for _ in range(2)
    ]
    nodes = dict.fromkeys("abcdef", 1)
    job = Job(
        folder=str(tmp_path),
        nodes=nodes,
        strikes=tuple(strikes),
        num_steps=60,
        step_s=SLOW_S,
        max_restarts=20,
        max_attempts=40,
        timeout_s=60,
    )
    check(jobs, job, survivors=2)
