"""Traces of spot instances: the times at which nodes were added and removed. Three text formats are read."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from mmcompile.errors import ConfigError

TimeUnit = Literal["hours", "seconds"]
_SECONDS = {"hours": 3600.0, "seconds": 1.0}
_EVENT = re.compile(r"(\d+), *(add|remove), *(\S+)")
_DATED = re.compile(r"(\d{4}-\d\d-\d\d, *\d\d:\d\d:\d\d), *(\d+)")
_COUNT = re.compile(r"(\d+(?:\.\d*)?), *(\d+)")
_FORMS = "milliseconds,add|remove,node / YYYY-MM-DD, HH:MM:SS, count / time,count"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceChange:
    """Nodes added and removed at one time; a removed node's number is never used again."""

    time_s: float
    added: tuple[int, ...]
    removed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotTrace:
    """Trace of a cluster's nodes: changes in order of time, the first at 0 s."""

    name: str
    changes: tuple[TraceChange, ...]
    duration_s: float

    @property
    def num_added(self) -> int:
        """Number of nodes added after the start."""
        return sum(len(change.added) for change in self.changes if change.time_s > 0)

    @property
    def num_removed(self) -> int:
        """Number of nodes removed."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes alive at one time."""
        live, most = 0, 0
        for change in self.changes:
            live += len(change.added) - len(change.removed)
            most = max(most, live)
        return most

    def delayed(self, seconds: float) -> SpotTrace:
        """Return the trace with nodes added `seconds` later, except at the start; nodes removed by then are left out."""
        gone = {node: change.time_s for change in self.changes for node in change.removed}
        events: list[tuple[float, int, bool]] = []
        for change in self.changes:
            for node in change.added:
                ready_s = change.time_s + (seconds if change.time_s > 0 else 0.0)
                leaves_s = gone.get(node, float("inf"))
                if ready_s < min(leaves_s, self.duration_s):
                    events.append((ready_s, node, True))
                    if leaves_s < float("inf"):
                        events.append((leaves_s, node, False))
        return SpotTrace(name=self.name, changes=_changes(events), duration_s=self.duration_s)


def read_trace(path: str | os.PathLike[str], *, unit: TimeUnit | None = None, seed: int = 0) -> SpotTrace:
    """Return the trace that a text file contains.

    Formats, recognised by their first line: `milliseconds,add|remove,node`; `YYYY-MM-DD, HH:MM:SS, count` (sorted first, as
    readings may be out of order); `time,count`, the corners of a step plot. The last two give only the number of nodes alive;
    which nodes are removed is drawn at random.

    Args:
        unit: unit of the times in the format `time,count`, which the file does not contain; None for the other formats.
        seed: random seed of the choice of removed nodes where the trace does not name them.

    Raises:
        ConfigError: the file cannot be read, a line is invalid (with its number), a node is removed that was never added, the
            trace has no length in time, or `unit` is missing or has no effect.
    """
    where = os.fspath(path)
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read trace {where}: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line]
    if not numbered:
        raise ConfigError(f"trace {where} is empty; wanted lines of one of {_FORMS}")
    form = next((form for form in (_EVENT, _DATED, _COUNT) if form.fullmatch(numbered[0][1])), None)
    if form is None:
        raise ConfigError(f"trace {where} begins with {numbered[0][1]!r}; wanted {_FORMS}")
    if (form is _COUNT) != (unit is not None):
        what = (
            "is in hours or seconds, which it does not say: name the unit" if unit is None else "says its unit itself"
        )
        raise ConfigError(f"trace {where} {what}")
    rows = [_row(form, number, line, where) for number, line in numbered]
    if form is _EVENT:
        events, end_s = _named(rows, where)
    elif form is _DATED:
        events, end_s = _counted(_dated(rows), seed)
    else:
        times = [(float(time) * _SECONDS[unit or "seconds"], int(count)) for _, (time, count) in rows]
        events, end_s = _counted(times, seed)
    if end_s <= 0:
        raise ConfigError(f"trace {where} ends when it begins; wanted changes over time")
    return SpotTrace(name=Path(path).name, changes=_changes(events), duration_s=end_s)


def _row(form: re.Pattern[str], number: int, line: str, where: str) -> tuple[int, tuple[str, ...]]:
    match = form.fullmatch(line)
    if match is None:
        raise ConfigError(
            f"trace {where}, line {number}: {line!r} is unlike the lines before it; wanted one of {_FORMS}"
        )
    return number, match.groups()


def _named(rows: Iterable[tuple[int, tuple[str, ...]]], where: str) -> tuple[list[tuple[float, int, bool]], float]:
    numbers: dict[str, int] = {}
    live: set[str] = set()
    events: list[tuple[float, int, bool]] = []
    last_s = 0.0
    for line, (time, kind, node) in rows:
        time_s = int(time) / 1000
        if time_s < last_s:
            raise ConfigError(f"trace {where}, line {line}: time {time} ms is before the line above it")
        if kind == "add" and node in numbers:
            raise ConfigError(
                f"trace {where}, line {line}: {node} is added twice; a node that comes back needs a new name"
            )
        if kind == "remove" and node not in live:
            raise ConfigError(f"trace {where}, line {line}: {node} is removed and is not there")
        numbers.setdefault(node, len(numbers))
        (live.add if kind == "add" else live.discard)(node)
        events.append((time_s, numbers[node], kind == "add"))
        last_s = time_s
    first_s = events[0][0]
    return [(time_s - first_s, node, added) for time_s, node, added in events], last_s - first_s


def _dated(rows: Iterable[tuple[int, tuple[str, ...]]]) -> list[tuple[float, int]]:
    found = sorted(
        (datetime.strptime(re.sub(r", *", " ", stamp), "%Y-%m-%d %H:%M:%S"), int(count)) for _, (stamp, count) in rows
    )
    start = found[0][0]
    return [((stamp - start).total_seconds(), count) for stamp, count in found]


def _counted(readings: Sequence[tuple[float, int]], seed: int) -> tuple[list[tuple[float, int, bool]], float]:
    rng = random.Random(seed)
    live: list[int] = []
    events: list[tuple[float, int, bool]] = []
    total = 0
    start_s = readings[0][0]
    for time_s, count in readings:
        while len(live) < count:
            live.append(total)
            events.append((time_s - start_s, total, True))
            total += 1
        while len(live) > count:
            events.append((time_s - start_s, live.pop(rng.randrange(len(live))), False))
    return events, readings[-1][0] - start_s


def _changes(events: Iterable[tuple[float, int, bool]]) -> tuple[TraceChange, ...]:
    """Return a change for each time of events (seconds, node, True if added), without nodes both added and removed then."""
    by_time: dict[float, tuple[set[int], set[int]]] = {0.0: (set(), set())}
    for time_s, node, added in sorted(events, key=lambda event: event[0]):
        by_time.setdefault(time_s, (set(), set()))[0 if added else 1].add(node)
    return tuple(
        TraceChange(time_s=time_s, added=tuple(sorted(come - go)), removed=tuple(sorted(go - come)))
        for time_s, (come, go) in by_time.items()
    )
