"""Chrome traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmcompile.planner.schedule.simulate import Event
from mmcompile.report.pictures.perfetto import PREDICTED_PID, chrome_trace, write_chrome_trace


def _records(measured: tuple[Event, ...], predicted: tuple[Event, ...] = ()) -> list[dict[str, Any]]:
    records = chrome_trace(measured, predicted)["traceEvents"]
    assert isinstance(records, list)
    return records


def test_every_computation_is_a_slice_in_microseconds(events: tuple[Event, ...]) -> None:
    slices = [record for record in _records(events) if record["ph"] == "X"]
    computed = [event for event in events if event.kind in ("F", "B")]
    assert len(slices) == len(computed)
    for record, event in zip(slices, computed, strict=True):
        assert record["pid"] == event.rank
        assert record["args"] == {"stage": event.stage, "microbatch": event.microbatch}
        assert record["ts"] == pytest.approx(event.start_s * 1e6)
        assert record["dur"] == pytest.approx((event.end_s - event.start_s) * 1e6)


def test_slices_of_one_thread_do_not_overlap(events: tuple[Event, ...]) -> None:
    """Viewers nest what overlaps; messages do, so they are asynchronous."""
    ends: dict[tuple[int, int], float] = {}
    for record in sorted((r for r in _records(events) if r["ph"] == "X"), key=lambda r: r["ts"]):
        thread = (record["pid"], record["tid"])
        assert record["ts"] >= ends.get(thread, 0.0) - 1e-6
        ends[thread] = record["ts"] + record["dur"]


def test_messages_begin_and_end_once(events: tuple[Event, ...]) -> None:
    records = _records(events)
    begun = {record["id"]: record["ts"] for record in records if record["ph"] == "b"}
    ended = {record["id"]: record["ts"] for record in records if record["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == sum(event.kind.is_send for event in events)
    assert all(begun[name] <= ended[name] for name in begun)


def test_predicted_ranks_are_processes_of_their_own(events: tuple[Event, ...]) -> None:
    names = {r["pid"]: r["args"]["name"] for r in _records(events, events) if r["name"] == "process_name"}
    assert names == {r: f"measured rank {r}" for r in range(5)} | {
        PREDICTED_PID + r: f"predicted rank {r}" for r in range(5)
    }


def test_file_is_json(events: tuple[Event, ...], tmp_path: Path) -> None:
    written = write_chrome_trace(tmp_path / "runs" / "trace.json", events)
    assert json.loads(written.read_text()) == chrome_trace(events)
