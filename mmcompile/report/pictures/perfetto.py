"""A step as a trace that Perfetto and `chrome://tracing` open.

Every rank is a process, every stage of it a thread; predicted ranks stand in processes of their own below the measured
ones. Messages in flight overlap what their rank computes, so they are asynchronous events.

Source: the Trace Event Format of Chromium (times in microseconds).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mmcompile.files import write_atomic
from mmcompile.planner.schedule.simulate import Event

PREDICTED_PID = 100_000
"""First process id of predicted ranks."""

TraceRecord = dict[str, object]


def chrome_trace(measured: Sequence[Event], predicted: Sequence[Event] = ()) -> dict[str, object]:
    """Return events as the JSON object of the Trace Event Format; msgspec or json can write it.

    Args:
        measured: events of a real step; their first start becomes time 0.
        predicted: events of the simulator for the same step.
    """
    records = [*_group("measured", measured, 0), *_group("predicted", predicted, PREDICTED_PID)]
    return {"traceEvents": records, "displayTimeUnit": "ms"}


def write_chrome_trace(
    path: str | os.PathLike[str], measured: Sequence[Event], predicted: Sequence[Event] = ()
) -> Path:
    """Write `chrome_trace` to a file. Raises OutputError if it cannot be written."""
    return write_atomic(path, msgspec.json.encode(chrome_trace(measured, predicted)))


def _group(label: str, events: Sequence[Event], first_pid: int) -> Iterator[TraceRecord]:
    origin = min((event.start_s for event in events), default=0.0)
    threads = {key: tid for tid, key in enumerate(dict.fromkeys((event.rank, event.stage) for event in events))}
    for rank in sorted({event.rank for event in events}):
        pid = first_pid + rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{label} rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (rank, stage), tid in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": first_pid + rank, "tid": tid, "args": {"name": stage}}
    for index, event in enumerate(events):
        yield from _records(event, first_pid + event.rank, threads[event.rank, event.stage], origin, f"{label}-{index}")


def _records(event: Event, pid: int, tid: int, origin: float, identity: str) -> Iterator[TraceRecord]:
    start, end = ((seconds - origin) * 1e6 for seconds in (event.start_s, event.end_s))
    record: TraceRecord = {
        "name": f"{event.kind} {event.microbatch}",
        "cat": str(event.kind),
        "pid": pid,
        "tid": tid,
        "ts": start,
        "args": {"stage": event.stage, "microbatch": event.microbatch},
    }
    if event.kind.is_send:
        yield record | {"ph": "b", "id": identity}
        yield record | {"ph": "e", "id": identity, "ts": end}
    else:
        yield record | {"ph": "X", "dur": end - start}
