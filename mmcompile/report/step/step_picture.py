"""Picture of a balanced step: a panel for each component, bars of each microbatch's seconds in arrival order and balanced."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmcompile.report.pictures.drawing import colours, lighter, new_figure, write_png
from mmcompile.report.step.balanced_step import BalancedStep, ComponentLoads
from mmcompile.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 64
"""Largest number of microbatches of a component drawn as bars; more are drawn sorted, as two lines."""
_BEFORE, _LABELS = "#b8b8b8", 32
"""Colour of bars in arrival order, and the largest number of microbatches that have labels below their bars."""
_LEGEND = ("arrival order", "balanced", "deferred", "mean")
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def draw_step(path: str | os.PathLike[str], step: BalancedStep) -> Path:
    """Draw the loads of a step as PNG: arrival order in grey beside balanced in the component's colour.

    The part of a balanced bar that belongs to deferred samples is hatched. A dashed line is the mean.

    Raises:
        ConfigError: matplotlib is not installed.
        OutputError: the file cannot be written.
    """
    count = len(step.components)
    figure = new_figure("a picture of a step", 12, 1.0 + 2.7 * count)
    axes = figure.subplots(count, squeeze=False)[:, 0]
    palette = colours(f"{component.name}.0" for component in step.components)
    for axis, component in zip(axes, step.components, strict=True):
        _panel(axis, component, palette[component.name])
    figure.suptitle(_title(step), x=0.01, ha="left", fontsize=11)
    return write_png(path, figure)


def _title(step: BalancedStep) -> str:
    simulated, straggler = step.simulated_s, step.straggler_s
    return (
        f"step {step.step}, {step.assignment.num_samples} samples of {step.data}, balanced by {step.balancer}\n"
        f"simulated {format_seconds(simulated.before)} → {format_seconds(simulated.after)}, "
        f"straggler seconds {format_seconds(straggler.before)} → {format_seconds(straggler.after)}"
    )


def _panel(axis: Axes, component: ComponentLoads, colour: str) -> None:
    before, after, late = (
        np.array(loads) for loads in (component.loads_before, component.loads_after, component.deferred_s)
    )
    largest_s = float(max(before.max(), after.max()))
    # The unit that reads best.
    scale, unit = next((each for each in _UNITS if largest_s >= each[0]), _UNITS[-1])
    if before.size > MAX_BARS:
        _sorted_lines(axis, (before / scale, after / scale), colour)
    else:
        _bars(axis, before / scale, after / scale, late / scale, colour)
    axis.axhline(float(after.mean()) / scale, color="black", linewidth=0.8, linestyle=(0, (4, 3)), label="mean")
    imbalance = component.imbalance
    axis.set_title(
        f"{component.name}: imbalance {imbalance.before:.2f} → {imbalance.after:.2f} (slowest microbatch over mean)",
        loc="left",
        fontsize=10,
    )
    axis.set_ylabel(unit)
    axis.set_ylim(0, 1.06 * largest_s / scale)
    axis.margins(x=0.01)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    shown = [label for label in _LEGEND if label in named]
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axis.legend([named[label] for label in shown], shown, ncols=4, frameon=False, fontsize=8, **place)


def _bars(axis: Axes, before: np.ndarray, after: np.ndarray, late: np.ndarray, colour: str) -> None:
    # All arrays are [replicas, microbatches], in seconds; `late` is the deferred part of `after`.
    replicas, microbatches = before.shape
    places = (np.arange(replicas)[:, None] * (microbatches + 1) + np.arange(microbatches)).ravel()
    axis.bar(places - 0.2, before.ravel(), width=0.4, color=_BEFORE, label="arrival order")
    axis.bar(places + 0.2, after.ravel(), width=0.4, color=colour, label="balanced")
    if late.any():
        style: dict[str, Any] = {"edgecolor": "white", "hatch": "////", "linewidth": 0.0}
        style |= {"color": lighter(colour, 0.35), "label": "deferred"}
        axis.bar(places + 0.2, late.ravel(), width=0.4, bottom=(after - late).ravel(), **style)
    numbered = replicas * microbatches <= _LABELS
    labels = [str(place % (microbatches + 1)) for place in places] if numbered else []
    axis.set_xticks(places if numbered else [], labels, fontsize=8)
    axis.tick_params(axis="x", length=0)
    _name_replicas(axis, places.reshape(replicas, microbatches))


def _name_replicas(axis: Axes, places: np.ndarray) -> None:
    named = len(places) <= 8
    middle = axis.secondary_xaxis(-0.08 if places.size <= _LABELS else 0.0)
    texts = [f"replica {index}" if named else str(index) for index in range(len(places))]
    middle.set_xticks(places.mean(axis=1), texts, fontsize=9)
    middle.tick_params(length=0)
    middle.spines["bottom"].set_visible(False)
    if not named:
        middle.set_xlabel("replica", fontsize=9)


def _sorted_lines(axis: Axes, sides: Sequence[np.ndarray], colour: str) -> None:
    for loads, paint, label in zip(sides, (_BEFORE, colour), ("arrival order", "balanced"), strict=True):
        ordered = np.sort(loads, axis=None)[::-1]
        axis.stairs(ordered, np.arange(len(ordered) + 1), color=paint, label=label, linewidth=1.8, baseline=None)
    axis.set_xlabel(f"{sides[0].size} microbatches of {len(sides[0])} replicas, each line's slowest first", fontsize=9)
