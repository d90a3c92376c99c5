"""Replay of a job over a trace of spot instances: text, JSON and a picture of throughput over time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmcompile.planner.resilience.replay.replay_run import TimeKind
from mmcompile.planner.resilience.replay.spot_trace import TimeUnit, read_trace
from mmcompile.planner.resilience.replay.systems import CURVE_WINDOWS, TraceReplay, replay_trace
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.report.pictures.drawing import colours, new_figure, write_png
from mmcompile.units import columns, format_count, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPENT = (TimeKind.REPEATED, TimeKind.PAUSED, TimeKind.SAVING, TimeKind.STOPPED)
_COLOURS = ("#228833", "#99cc99", "#cc6677", "#aa7700", "#4477aa", "#bbbbbb")
"""Bar colours: for useful time, for redundant computation, then for each other use of time in `_SPENT`."""


def replay_resilience(
    resilience: Resilience, path: str | os.PathLike[str], *, unit: TimeUnit | None = None, seed: int = 0
) -> TraceReplay:
    """Replay a plan's templates over a trace file; `trace_text`, `TraceReplay.to_json` and `draw_trace` show the result.

    Raises:
        ConfigError: as `read_trace`, which also describes `unit` and `seed`.
    """
    trace = read_trace(path, unit=unit, seed=seed)
    return replay_trace(resilience.job, trace, microbatch_samples=resilience.microbatch_samples)


def remarks(found: TraceReplay, resilience: Resilience) -> tuple[str, ...]:
    """Return remarks if the node counts of a trace differ from those that the plan was made for."""
    needed, planned = resilience.cover.least_nodes, resilience.num_nodes
    if found.max_nodes < needed:
        return (
            f"templates never start: they need {needed} nodes, and the trace has at most {found.max_nodes}; plan with a smaller "
            "fault tolerance, or a trace of more nodes",
        )
    if found.max_nodes > planned:
        return (
            f"the plan is for {planned} nodes and has no templates of more than {resilience.sizes[-1]}; plan for "
            f"{found.max_nodes} nodes to use larger ones",
        )
    return ()


def trace_text(found: TraceReplay) -> str:
    """Return a table of the replay with one row per system, followed by the assumptions."""
    rows = [
        ("system", "useful", "samples/s", *(spent.value for spent in _SPENT), "lost samples", "pauses", "saves every")
    ]
    for one in found.systems:
        shares = (f"{one.seconds(spent) / found.duration_s:.1%}" for spent in _SPENT)
        rate = f"{one.samples_per_s:.4g}"
        tail = (format_count(one.lost_samples), str(one.num_pauses), format_seconds(one.save_interval_s))
        rows.append((one.name, f"{one.useful:.1%}", rate, *shares, *tail))
    return "\n".join(
        [
            _title(found),
            "",
            *columns(rows, left=(0,)),
            "",
            "useful: time in steps that counted, without redundant computation; lost samples: trained again as state was lost",
            f"assumed: {_assumed(found)}",
        ]
    )


def _title(found: TraceReplay) -> str:
    return (
        f"{found.trace}: {format_seconds(found.duration_s)}, up to {found.max_nodes} nodes, {found.num_removed} lost, "
        f"{found.num_added} new; fault tolerance {found.fault_tolerance}"
    )


def _assumed(found: TraceReplay) -> str:
    known = found.constants
    return (
        f"new nodes work after {format_seconds(known.creation_s)}, nobody is warned of a loss; templates regroup in "
        f"{format_seconds(known.reconfigure_s)} and copy {known.bytes_per_s / 1e9:g} GB/s a node; a restart takes "
        f"{format_seconds(known.restart_s)}, checkpoints move at {known.store_bytes_per_s / 1e9:g} GB/s, saved at the best of "
        f"six intervals; redundant computation regroups in {format_seconds(known.rendezvous_s)} and "
        f"makes a step {known.redundancy_slowdown:g} times longer"
    )


def draw_trace(path: str | os.PathLike[str], found: TraceReplay) -> Path:
    """Draw a PNG: throughput over time (means over 1/120 of the trace), and each system's shares of time in training and pauses.

    Raises:
        ConfigError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    figure = new_figure("a picture of a trace", 12, 6.5)
    rates, bars = figure.subplots(2, height_ratios=(3, 1))
    _draw_rates(rates, found)
    _draw_shares(bars, found)
    for axis in (rates, bars):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(found), x=0.01, ha="left", fontsize=11)
    return write_png(path, figure)


def _draw_rates(axis: Axes, found: TraceReplay) -> None:
    palette = colours(f"{one.name}.0" for one in found.systems)
    for one in found.systems:
        points = one.curve(CURVE_WINDOWS)
        label = f"{one.name}: {one.samples_per_s:.4g} samples/s on average"
        hours, rates = [time_s / 3600 for time_s, _ in points], [rate for _, rate in points]
        axis.plot(hours, rates, color=palette[one.name], linewidth=1.6, label=label)
    axis.set_xlim(0, found.duration_s / 3600)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("hours")
    axis.set_ylabel("samples/s")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=9)


def _draw_shares(axis: Axes, found: TraceReplay) -> None:
    systems = found.systems
    kinds = {"useful": [one.useful for one in systems]}
    kinds["redundant"] = [one.seconds(TimeKind.USEFUL) / found.duration_s - one.useful for one in systems]
    kinds |= {spent.value: [one.seconds(spent) / found.duration_s for one in systems] for spent in _SPENT}
    left = [0.0] * len(systems)
    for (kind, shares), colour in zip(kinds.items(), _COLOURS, strict=True):
        names = [one.name for one in systems]
        axis.barh(names, shares, left=left, color=colour, label=kind, edgecolor="white", linewidth=0.5)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of the time")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize=9)
