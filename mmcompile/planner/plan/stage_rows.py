"""Stages of a plan as rows of a table: runs of similar stages are folded into one row to keep the table short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from itertools import pairwise

from mmcompile.config import Recompute
from mmcompile.planner.plan.plan_record import Chain, Stage, uniform_mode
from mmcompile.units import columns, counted, milliseconds, runs, span

_TOLERANCES = (0.005, 0.02, 0.1, float("inf"))
"""Relative differences at which neighbouring stages' times count as alike, tried in order until few enough rows are left."""
_MAX_RANGES = 2


Fold = tuple[Stage, ...]
"""Neighbouring stages of one chain that share one row of the table."""


def _fold_layers(fold: Fold) -> str:
    """Return the layers of a table row, which shows one or more stages, as text: first and last layer of each component.

    A row of several stages ends with the number of layers of one stage, as in `llm 0..23 (2 each)`.
    """
    spans: dict[str, tuple[int, int]] = {}
    for segment in (segment for stage in fold for segment in stage.segments):
        first, _ = spans.get(segment.component, (segment.first, 0))
        spans[segment.component] = first, segment.last - 1
    texts = [f"{name} {first}" + (f"..{last}" if last > first else "") for name, (first, last) in spans.items()]
    each = span(len(stage.layer_names) for stage in fold)
    return ", ".join(texts) + (f" ({each} each)" if len(fold) > 1 else "")


def folded(chains: Sequence[Chain], max_rows: int) -> list[Fold]:
    """Return all stages in order as rows; beyond `max_rows`, similar neighbours are folded as little as needed."""
    folds: list[Fold] = [(stage,) for chain in chains for stage in chain.stages]
    for tolerance in _TOLERANCES:
        if len(folds) <= max_rows:
            break
        folds = [fold for chain in chains for fold in _runs(chain.stages, tolerance)]
    return folds


def stage_table(chains: Sequence[Chain], max_rows: int) -> Iterator[str]:
    """Yield a header and at most `max_rows` rows as text; a last line counts the chains that are left out."""
    folds = folded(chains, max_rows)
    shown = folds if len(folds) <= max_rows else folds[: max_rows - 1]
    largest = max(stage.prediction.total_bytes for chain in chains for stage in chain.stages)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    header = ("stage", "layers", "devices", "fwd ms", "input-grad", "weight-grad")
    memory = (f"param {unit}", "grad", "optim", "activ", "total")
    rows = [_row(fold, scale) for fold in shown]
    yield from columns([(*header, *memory, "live", "frozen"), *rows], left=(0, 1, 2))
    if len(shown) < len(folds):
        yield f"and {counted(len(folds) - len(shown), 'more chain')}"


def recompute_text(stages: Iterable[Stage]) -> str:
    """Return recomputation as text: `"full"`, or `"selective 2, full 3 of 8 layers"`; only layers where it saves memory count."""
    stages = tuple(stages)
    mode = uniform_mode(stages)
    if mode != "mixed":
        return mode
    counts = Counter(mode for stage in stages for mode in stage.modes.values())
    kinds: tuple[Recompute, ...] = ("selective", "full")
    each = ", ".join(f"{kind} {counts[kind]}" for kind in kinds if counts[kind])
    return f"{each} of {counts.total()} layers"


def frozen_text(stages: Iterable[Stage]) -> str:
    """Return the frozen share of parameter bytes as text: `"97%"`; `"-"` without parameters. Only exact values are 0% or 100%."""
    predictions = [stage.prediction for stage in stages]
    total = sum(prediction.parameter_bytes for prediction in predictions)
    if not total:
        return "-"
    share = 1 - sum(min(each.gradient_bytes, each.parameter_bytes) for each in predictions) / total
    if 0.995 <= share < 1:
        return ">99%"
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as text: `"0-2,8-9"`; many even ranges as `"0-7,16-23,..,112-119"`, many others as `"0-7,9-11 and 6 more"`."""
    ranges = runs(sorted(set(ranks)))
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) <= _MAX_RANGES + 1:
        return ",".join(texts)
    shown = ",".join(texts[:_MAX_RANGES])
    steps = {(next_[0] - first, next_[1] - last) for (first, last), next_ in pairwise(ranges)}
    return f"{shown},..,{texts[-1]}" if len(steps) == 1 else f"{shown} and {len(texts) - _MAX_RANGES} more"


def _runs(stages: Sequence[Stage], tolerance: float) -> Iterator[Fold]:
    run: list[Stage] = []
    for stage in stages:
        if run and not _alike(run[0], stage, tolerance):
            yield tuple(run)
            run = []
        run.append(stage)
    yield tuple(run)


def _alike(first: Stage, other: Stage, tolerance: float) -> bool:
    if tolerance == float("inf"):
        return True
    if _kind(first) != _kind(other):
        return False
    times = zip(astuple(first.prediction.times), astuple(other.prediction.times), strict=True)
    return all(abs(one - two) <= tolerance * max(one, two) for one, two in times)


def _kind(stage: Stage) -> tuple[bool, bool, list[str]]:
    components = [segment.component for segment in stage.segments]
    return stage.has_backward, stage.prediction.gradient_bytes > 0, components


def _row(fold: Fold, scale: int) -> tuple[str, ...]:
    predictions = [stage.prediction for stage in fold]
    backward = any(stage.has_backward for stage in fold)
    forward, *gradients = zip(*(astuple(predicted.times) for predicted in predictions), strict=True)
    sizes = zip(*(predicted.memory_bytes.values() for predicted in predictions), strict=True)
    first, last = fold[0].name, fold[-1].name
    return (
        first if len(fold) == 1 else f"{first}..{last.rpartition('.')[2]} x{len(fold)}",
        _fold_layers(fold),
        rank_ranges(rank for stage in fold for rank in stage.ranks),
        span(forward, milliseconds),
        *(span(times, milliseconds) if backward else "-" for times in gradients),
        *(span(size, lambda value: f"{value / scale:.2f}") for size in sizes),
        span(predicted.in_flight for predicted in predictions) if backward else "-",
        frozen_text(fold),
    )
