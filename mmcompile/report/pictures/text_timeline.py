"""A step as text: a row for each group of ranks, a character for each slice of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.planner.schedule.simulate import Event
from mmcompile.units import format_seconds

_FORWARD = "0123456789"
_BACKWARD = "abcdefghij"
_IDLE = "·"
_LEGEND = "0..9 forward of that microbatch (last digit), a..j its backward (a for 0), w its weight gradient, · idle"


def text_timeline(events: Sequence[Event], labels: Sequence[str], width: int = 96) -> str:
    """Draw the computations of a step in `width` slices of time, one row per rank, each with its label.

    A slice shows the action that takes most of it; sends are left out.
    """
    end_s = max((event.end_s for event in events if event.kind.is_compute), default=0.0)
    column = max(map(len, labels), default=0)
    rows = [f"{label:<{column}} {_row(events, rank, end_s, width)}" for rank, label in enumerate(labels)]
    scale = f"{'':<{column}} {'0':<{width - 10}}{format_seconds(end_s):>10}"
    return "\n".join([*rows, scale, _LEGEND])


def _row(events: Sequence[Event], rank: int, end_s: float, width: int) -> str:
    own = sorted(
        (event for event in events if event.rank == rank and event.kind.is_compute), key=lambda event: event.start_s
    )
    if not end_s:
        return _IDLE * width
    return "".join(_slices(own, end_s / width, width))


def _slices(events: Sequence[Event], slice_s: float, width: int) -> Iterator[str]:
    first = 0
    for index in range(width):
        start_s, end_s = index * slice_s, (index + 1) * slice_s
        while first < len(events) and events[first].end_s <= start_s:
            first += 1
        shares: dict[str, float] = {}
        position = first
        while position < len(events) and events[position].start_s < end_s:
            event = events[position]
            overlap = min(event.end_s, end_s) - max(event.start_s, start_s)
            shares[_mark(event)] = shares.get(_mark(event), 0.0) + overlap
            position += 1
        idle_s = slice_s - sum(shares.values())
        mark = max(shares, key=lambda mark: shares[mark], default=_IDLE)
        yield mark if mark != _IDLE and shares[mark] >= idle_s else _IDLE


def _mark(event: Event) -> str:
    match event.kind:
        case ActionKind.F:
            return _FORWARD[event.microbatch % 10]
        case ActionKind.W:
            return "w"
        case _:
            return _BACKWARD[event.microbatch % 10]
