"""A step as a picture: a row for each rank, a bar for each forward and backward."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmcompile.errors import ConfigError
from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.planner.schedule.simulate import Event
from mmcompile.report.pictures.drawing import chain_of, colours, lighter, new_figure, write_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WHITE = {ActionKind.F: 0.0, ActionKind.B: 0.45, ActionKind.I: 0.45, ActionKind.W: 0.7}
"""Action kind -> fraction of white mixed into its bar's color, 0..1."""
_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradient",
}
_COMPARABLE = 3.0
"""Largest ratio between the lengths of two timelines at which they are drawn on one time axis."""
_LEGEND_COLUMNS = 6
"""Most entries in a row of the legend: more would be wider than the picture."""


def draw_timeline(path: str | os.PathLike[str], measured: Sequence[Event], predicted: Sequence[Event] = ()) -> Path:
    """Draw a step as PNG: measured above predicted when both are given.

    Bars are coloured by component, forwards dark and backwards light, and carry the microbatch's number where it fits.
    Events of other kinds are left out.

    Raises:
        ConfigError: matplotlib is not installed, or there is no forward or backward to draw.
        OutputError: the file cannot be written.
    """
    groups = {name: computing(events) for name, events in (("measured", measured), ("predicted", predicted))}
    groups = {name: events for name, events in groups.items() if events}
    if not groups:
        raise ConfigError("no timeline to draw: neither a measured nor a predicted forward or backward was given")
    ranks = {name: sorted({event.rank for event in events}) for name, events in groups.items()}
    lengths = [length_s(events) for events in groups.values()]
    one_axis = max(lengths) <= _COMPARABLE * min(lengths)
    height = 1.4 + sum(0.9 + 0.45 * len(rows) for rows in ranks.values())
    figure = new_figure("a timeline picture", 14, height)
    heights = [1 + len(rows) for rows in ranks.values()]
    axes = figure.subplots(len(groups), sharex=one_axis, squeeze=False, height_ratios=heights)[:, 0]
    palette = colours(event.stage for events in groups.values() for event in sorted(events, key=lambda e: e.start_s))
    for axis, (name, events) in zip(axes, groups.items(), strict=True):
        _draw_rows(axis, events, ranks[name], palette)
        title = f"{name}: {length_s(events) * 1e3:.4g} ms, {idle_share(events):.0%} idle"
        axis.set_title(title if one_axis else f"{title} (time axis of its own)", loc="left")
    axes[-1].set_xlabel("ms")
    _legend(figure, groups.values(), palette)
    return write_png(path, figure)


def computing(events: Sequence[Event]) -> list[Event]:
    """Return the forwards and backwards among events, including the input and weight gradients of split backwards."""
    return [event for event in events if event.kind.is_compute]


def length_s(events: Sequence[Event]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(event.end_s for event in events) - min(event.start_s for event in events)


def idle_share(events: Sequence[Event]) -> float:
    """Return the fraction of all ranks' time, from first start to last end, in which they compute nothing; 0..1."""
    available = len({event.rank for event in events}) * length_s(events)
    return 1 - sum(event.end_s - event.start_s for event in events) / available if available else 0.0


def _draw_rows(axis: Axes, events: Sequence[Event], ranks: Sequence[int], palette: dict[str, str]) -> None:
    origin = min(event.start_s for event in events)
    width_ms = max(length_s(events) * 1e3, 1e-9)
    for event in events:
        colour = palette[chain_of(event.stage)]
        start, length = (event.start_s - origin) * 1e3, (event.end_s - event.start_s) * 1e3
        row, number = ranks.index(event.rank), str(event.microbatch)
        paint = lighter(colour, _WHITE[event.kind])
        axis.barh(row, length, left=start, height=0.8, color=paint, edgecolor="white", linewidth=0.5)
        if length / width_ms > 0.007 * len(number):
            ink = "white" if event.kind is ActionKind.F else "black"
            axis.text(start + length / 2, row, number, ha="center", va="center", fontsize=8, color=ink)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.set_ylim(len(ranks) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, groups: Iterable[Sequence[Event]], palette: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    drawn = {(chain_of(event.stage), event.kind) for events in groups for event in events}
    handles = [
        Patch(color=lighter(colour, _WHITE[kind]), label=f"{chain} {label}")
        for chain, colour in palette.items()
        for kind, label in _NAMES.items()
        if (chain, kind) in drawn
    ]
    columns = min(len(handles), _LEGEND_COLUMNS)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
