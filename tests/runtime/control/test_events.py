"""The event log, recoveries in it, and fail points."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.events import EventKind, EventLog, EventReader, RunEvent, recoveries
from mmcompile.runtime.control.log import Committed, Ended, History, RolledBack
from mmcompile.runtime.monitoring.fail_points import VARIABLE, InjectedFault, fail_point


def events_of(*moments: tuple[EventKind, float]) -> list[RunEvent]:
    return [
        RunEvent(kind=kind, generation=2, monotonic_s=moment, wall_s=0.0, cause=f"{kind} at {moment}")
        for kind, moment in moments
    ]


ATTEMPT = (EventKind.PREPARE, EventKind.PREPARED, EventKind.RENDEZVOUS, EventKind.READY, EventKind.ACTIVE)


def test_a_recovery_and_its_parts() -> None:
    moments = zip(ATTEMPT, (1.0, 3.0, 6.0, 10.0, 10.5), strict=True)
    (found,) = recoveries(
        events_of((EventKind.COMMITTED, 0.0), (EventKind.DETECTED, 0.5), *moments, (EventKind.COMMITTED, 12.0))
    )
    assert (found.plan_s, found.leave_s, found.connect_s, found.copy_s, found.replay_s) == (0.5, 2.0, 3.0, 4.5, 1.5)
    assert found.total_s == 11.5
    assert (found.num_attempts, found.cause) == (1, "detected at 0.5")


def test_a_superseded_attempt_counts_from_the_first_failure() -> None:
    first = ((EventKind.DETECTED, 0.0), (EventKind.PREPARE, 1.0), (EventKind.PREPARED, 2.0), (EventKind.DETECTED, 5.0))
    second = zip(ATTEMPT, (6.0, 7.0, 8.0, 9.0, 9.0), strict=True)
    (found,) = recoveries(events_of(*first, *second, (EventKind.COMMITTED, 10.0)))
    assert (found.num_attempts, found.plan_s, found.total_s) == (2, 6.0, 10.0)


def test_a_phase_whose_end_was_never_told() -> None:
    first = zip(ATTEMPT, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True)
    second = zip(ATTEMPT[:3], (7.0, 8.0, 9.0), strict=True)
    (found,) = recoveries(
        events_of((EventKind.DETECTED, 0.0), *first, (EventKind.DETECTED, 6.0), *second, (EventKind.COMMITTED, 12.0))
    )
    assert (found.plan_s, found.leave_s, found.connect_s, found.copy_s, found.replay_s) == (7.0, 1.0, 1.0, 3.0, 0.0)
    assert found.total_s == 12.0


def test_a_start_is_no_recovery_and_one_that_did_not_end_is_none() -> None:
    start = zip(ATTEMPT, (0.0, 1.0, 2.0, 3.0, 4.0), strict=True)
    assert recoveries(events_of(*start, (EventKind.COMMITTED, 5.0), (EventKind.DETECTED, 6.0))) == ()


def test_a_log_goes_on_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog(path)
    log.add(RunEvent(kind=EventKind.COMMITTED, generation=1, step=1, microbatches=(3, 4), cause="x" * 5000))
    log.close()
    path.write_bytes(path.read_bytes() + b'{"kind":"comm')
    log = EventLog(path)
    history = History(generation=1, committed=1).after(Committed(generation=1, step=2, microbatches=(5,), cursor=None))
    log.complete(history)
    log.complete(history)
    log.close()
    first, second = EventReader(path).read()
    assert (first.step, first.microbatches, len(first.cause or "")) == (1, (3, 4), 2000)
    assert (second.kind, second.step, second.microbatches) == (EventKind.COMMITTED, 2, (5,))
    assert second.wall_s >= first.wall_s


def test_what_a_coordinator_died_before_it_said_is_said_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events")
    history = History(generation=1)
    for step in (1, 2, 3):
        history = history.after(Committed(generation=1, step=step, microbatches=(step,), cursor=None))
        log.add(RunEvent(kind=EventKind.COMMITTED, generation=1, step=step))
    history = history.after(RolledBack(step=1, cursor=None))
    log.complete(history)
    log.complete(history)
    history = history.after(Ended(reason="the disk is full", success=False))
    log.complete(history)
    log.complete(history)
    log.close()
    *_, back, end = EventReader(tmp_path / "events").read()
    assert len(EventReader(tmp_path / "events").read()) == 5
    assert (back.kind, back.step) == (EventKind.ROLLED_BACK, 1)
    assert (end.kind, end.cause) == (EventKind.ENDED, "the disk is full")


def test_fail_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    fail_point("here")
    marker = tmp_path / "struck"
    monkeypatch.setenv(VARIABLE, f'[{{"point":"here","action":"exception","rank":1,"step":2,"marker":"{marker}"}}]')
    fail_point("elsewhere", rank=1, step=2)
    fail_point("here", rank=0, step=2)
    fail_point("here", step=2)
    with pytest.raises(InjectedFault, match="fault injected at here"):
        fail_point("here", rank=1, step=2)
    fail_point("here", rank=1, step=2)
    monkeypatch.setenv(VARIABLE, '[{"point":"here","action":"explode"}]')
    with pytest.raises(ConfigError, match="MMCOMPILE_FAIL must be a JSON list of faults"):
        fail_point("here")
