"""A plan as a plain-text table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcompile.plan.plan import Link, Plan, SharedValue, Stage

_MAX_ROWS = 8
"""Rows of links, shared values and rejected alternatives; the rest is counted."""
_MAX_NAMES = 2


def format_plan(plan: Plan) -> str:
    """What a reader needs to judge a plan: what runs where, how long, how much memory, what else was tried."""
    return "\n".join(line.rstrip() for line in _lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.fingerprint.model} on {plan.cluster}: {len(plan.stages)} stages, {plan.num_ranks} ranks, "
        f"{plan.schedule}, {plan.num_microbatches} microbatches, recompute {plan.recompute}"
        + (f", {plan.attention} attention" if plan.attention != "model" else "")
        + (f", context parallel {plan.context_parallel}" if plan.context_parallel > 1 else "")
    )
    yield ""
    yield from _stages(plan.stages)
    yield from _links(plan.links)
    yield from _shared(plan.shared_values)
    yield from _prediction(plan)
    yield from _rejected(plan)


def _stages(stages: Sequence[Stage]) -> Iterator[str]:
    unit, scale = _memory_unit(max(stage.prediction.total_bytes for stage in stages))
    header = (
        *("stage", "layers", "rank", "fwd ms", "bwd ms"),
        *(f"{part} {unit}" for part in ("params", "grads", "optim", "activ")),
        *("in flight", "gradient"),
    )
    rows = [_stage_row(stage, scale) for stage in stages]
    yield from _columns([header, *rows], left={0, 1, len(header) - 1})


def _stage_row(stage: Stage, scale: int) -> tuple[str, ...]:
    predicted = stage.prediction
    sizes = (
        predicted.parameter_bytes,
        predicted.gradient_bytes,
        predicted.optimizer_bytes,
        predicted.activation_bytes,
    )
    return (
        stage.name,
        _layers(stage),
        ",".join(map(str, stage.ranks)),
        _ms(predicted.forward_s),
        _ms(predicted.backward_s) if stage.has_backward else "-",
        *(f"{size / scale:.2f}" for size in sizes),
        str(predicted.in_flight) if stage.has_backward else "-",
        _gradient(stage),
    )


def _gradient(stage: Stage) -> str:
    if stage.prediction.gradient_bytes:
        return "trains"
    return "frozen, passes gradient" if stage.has_backward else "forward only"


def _layers(stage: Stage) -> str:
    """First and last layer of each component touched; layers are counted from 0."""
    parts = []
    for segment in stage.segments:
        last = segment.last - 1
        parts.append(f"{segment.component} {segment.first}" + (f"..{last}" if last > segment.first else ""))
    return ", ".join(parts)


def _links(links: Sequence[Link]) -> Iterator[str]:
    if not links:
        return
    yield ""
    rows = [
        (
            f"{link.source} -> {link.target}",
            _names(tensor.name for tensor in link.tensors),
            f"{link.num_bytes / 1e6:.3g}",
            "yes" if link.gradient else "no",
        )
        for link in links[:_MAX_ROWS]
    ]
    yield from _columns([("link", "tensors", "MB", "gradient back"), *rows], left={0, 1})
    yield from _more(len(links) - _MAX_ROWS, "links")


def _shared(values: Sequence[SharedValue]) -> Iterator[str]:
    if not values:
        return
    yield ""
    yield "shared values, without gradient, needed by several stages: computed again in each unless sending is faster"
    rows = [
        (
            value.name,
            value.choice,
            f"{value.recompute_s * 1e6:.3g} us to compute, {value.send_s * 1e6:.3g} us to send",
            f"for {_names(value.stages)}",
        )
        for value in values[:_MAX_ROWS]
    ]
    yield from _columns(rows, left={0, 1, 2, 3})
    yield from _more(len(values) - _MAX_ROWS, "shared values")


def _prediction(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    yield ""
    yield (
        f"predicted iteration {_ms(predicted.iteration_s)} ms, bubble {predicted.bubble:.1%}, "
        f"lower bound {_ms(predicted.lower_bound_s)} ms, gap {predicted.gap:.1%}"
    )


def _rejected(plan: Plan) -> Iterator[str]:
    if not plan.rejected:
        return
    yield "rejected:"
    for alternative in plan.rejected[:_MAX_ROWS]:
        yield f"  {alternative.what}: {alternative.reason}"
    yield from _more(len(plan.rejected) - _MAX_ROWS, "alternatives")


def _more(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"  and {count} more {what}"


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) <= _MAX_NAMES + 1:
        return ", ".join(listed)
    return f"{', '.join(listed[:_MAX_NAMES])} and {len(listed) - _MAX_NAMES} more"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"


def _memory_unit(largest: int) -> tuple[str, int]:
    """GiB, or MiB for models so small that GiB would print zeros."""
    return ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)


def _columns(rows: Sequence[Sequence[str]], left: set[int]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells)
