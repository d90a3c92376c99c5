"""Reading spot traces: the three formats, written by hand here."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcompile.errors import ConfigError
from mmcompile.planner.resilience.replay.spot_trace import TimeUnit, TraceChange, read_trace


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_named_events(tmp_path: Path) -> None:
    path = write(tmp_path, "0,add,node1\n0,add,node2\n60000,remove,node1\n60000,add,node3\n90500,remove,node3\n")
    trace = read_trace(path)
    assert trace.changes == (
        TraceChange(time_s=0, added=(0, 1), removed=()),
        TraceChange(time_s=60, added=(2,), removed=(0,)),
        TraceChange(time_s=90.5, added=(), removed=(2,)),
    )
    assert (trace.duration_s, trace.max_nodes, trace.num_added, trace.num_removed) == (90.5, 2, 1, 2)


def test_dated_counts_are_sorted(tmp_path: Path) -> None:
    path = write(tmp_path, "2021-12-11, 23:59:30, 3\n2021-12-12, 00:01:30, 2\n2021-12-12, 00:00:30, 5\n")
    trace = read_trace(path, seed=3)
    assert [(change.time_s, len(change.added), len(change.removed)) for change in trace.changes] == [
        (0, 3, 0),
        (60, 2, 0),
        (120, 0, 3),
    ]
    assert set(trace.changes[2].removed) < set(range(5))
    assert read_trace(path, seed=3) == trace


@pytest.mark.parametrize(("unit", "second"), [("hours", 3600), ("seconds", 1)])
def test_corners_of_a_step_plot(tmp_path: Path, unit: TimeUnit, second: float) -> None:
    trace = read_trace(write(tmp_path, "0.000,0\n0.030,0\n0.030,9\n2.5,9\n2.5,7\n"), unit=unit)
    assert [(change.time_s, len(change.added), len(change.removed)) for change in trace.changes] == [
        (0, 0, 0),
        (0.03 * second, 9, 0),
        (2.5 * second, 0, 2),
    ]


def test_delayed_nodes(tmp_path: Path) -> None:
    """Node b is there 45 s after it was asked for, c goes before that, d would come after the end."""
    text = "0,add,a\n10000,add,b\n20000,add,c\n50000,remove,c\n60000,remove,a\n80000,add,d\n100000,remove,b\n"
    trace = read_trace(write(tmp_path, text)).delayed(45)
    assert trace.changes == (
        TraceChange(time_s=0, added=(0,), removed=()),
        TraceChange(time_s=55, added=(1,), removed=()),
        TraceChange(time_s=60, added=(), removed=(0,)),
        TraceChange(time_s=100, added=(), removed=(1,)),
    )


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("", None, "is empty"),
        ("0;add;x\n", None, "begins with '0;add;x'; wanted milliseconds,add"),
        ("0,add,x\n5,7\n", None, "line 2: '5,7' is unlike"),
        ("5,add,x\n\n4,add,y\n", None, "line 3: time 4 ms is before"),
        ("0,add,x\n4,add,x\n", None, "line 2: x is added twice"),
        ("0,add,x\n4,remove,y\n", None, "line 2: y is removed and is not there"),
        ("0,8\n5,7\n", None, "name the unit"),
        ("0,add,x\n4,remove,x\n", "hours", "says its unit itself"),
        ("0,8\n", "hours", "ends when it begins"),
    ],
)
def test_messages(tmp_path: Path, text: str, unit: TimeUnit | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, text), unit=unit)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read trace"):
        read_trace(tmp_path / "none.csv")
