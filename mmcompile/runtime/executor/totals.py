"""`add_up`: contributions of all ranks to the totals of a step; the sum's bits do not depend on which rank computed what.

Every number has a position of its own in one vector, which one rank fills and all others leave at zero; so adding vectors moves
numbers, and rounds nothing. Then each rank adds up losses in the order of the samples, and squared norms in the order of names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmcompile.batching.step_plan import StepPlan
from mmcompile.errors import EngineError
from mmcompile.planner.schedule.schedule import Action
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.monitoring.metrics import StepMetrics, StepTotals

_NAMED = 5
"""Maximum number of parameter names in an error message."""


@dataclass(kw_only=True, slots=True)
class OwnTotals:
    """One rank's losses, tokens, seconds and squared norms in a step, which `add_up` adds to those of all ranks."""

    losses: Tensor
    """float64 [microbatches, 1], on the CPU: weighted loss of each microbatch; 0 where another rank computes it."""
    num_tokens: int = 0
    """Number of valid tokens that this rank's loss stages counted."""
    seconds: Tensor
    """float64 [microbatches]: seconds in this rank's forwards and backwards."""
    events: list[tuple[Action, float, float]] = field(default_factory=list)
    """(action, start, end) of every action, in seconds of time.perf_counter; empty unless traced."""
    squared_norms: Mapping[str, float] | None = None
    """Squared norms of the gradients that this rank counts, by parameter; one rank counts each. None without clipping."""
    faults: Mapping[str, float] | None = None
    """Parameter -> largest absolute gradient element, where too large, infinite or NaN to add; None if any value can be added."""


def add_up(groups: Groups, plan: StepPlan, own: OwnTotals, *, names: Sequence[str], limit: float) -> StepTotals:
    """Return the totals of a step over all ranks, with the same bits on all.

    Args:
        names: all trainable parameters of the model, in an order that all ranks share.
        limit: exclusive upper bound of gradients in reduction "fixed"; only printed in the error.

    Raises:
        EngineError: on all ranks, if `OwnTotals.faults` of any rank names a gradient: too large, infinite or NaN.
    """
    faults = own.faults or {}
    too_large = [name for name, size in faults.items() if size < float("inf")]
    parts = [
        own.losses.flatten(),
        torch.tensor([own.num_tokens], dtype=torch.float64),
        torch.zeros(groups.world_size, dtype=torch.float64),
        own.seconds,
        _vector(names, own.squared_norms),
        _vector(names, None if own.faults is None else dict.fromkeys(too_large, 1.0)),
        _vector(names, None if own.faults is None else dict.fromkeys(faults.keys() - set(too_large), 1.0)),
    ]
    parts[2][groups.rank] = own.seconds.sum()
    vector = torch.cat(parts)
    groups.all_reduce(vector)
    losses, num_tokens, busy_s, microbatch_s, norms, large, infinite = vector.split([len(part) for part in parts])
    _check_faults(plan.step, names, large.tolist(), infinite.tolist(), limit)
    by_microbatch = losses.view(own.losses.shape).tolist()
    in_order = sorted(plan.microbatches, key=lambda microbatch: (min(microbatch.samples), microbatch.tower))
    return StepTotals(
        loss=_sum(loss for microbatch in in_order for loss in by_microbatch[microbatch.index]),
        num_tokens=int(num_tokens),
        squared_norm=None if own.squared_norms is None else _sum(norms.tolist()),
        busy_s=tuple(busy_s.tolist()),
        microbatch_s=tuple(microbatch_s.tolist()),
    )


def metrics_of(plan: StepPlan, totals: StepTotals, start_s: float) -> StepMetrics:
    """Return the metrics, without those of planning, of a step that began at `start_s` (time.perf_counter) and ends now."""
    return StepMetrics(
        step=plan.step,
        loss=totals.loss / plan.total_weight,
        num_tokens=totals.num_tokens,
        num_samples=plan.num_samples,
        seconds=time.perf_counter() - start_s,
        grad_norm=None if totals.squared_norm is None else math.sqrt(totals.squared_norm),
        busy_s=totals.busy_s,
        updated=plan.update,
    )


def _vector(names: Sequence[str], values: Mapping[str, float] | None) -> Tensor:
    if values is None:
        return torch.zeros(0, dtype=torch.float64)
    assert values.keys() <= set(names), f"not among the model's trainable parameters: {values.keys() - set(names)}"
    return torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64)


def _sum(values: Iterable[float]) -> float:
    """Add values in the order given. The built-in `sum` of newer Python versions corrects rounding errors, so it differs."""
    total = 0.0
    for value in values:
        total += value
    return total


def _check_faults(
    step: int, names: Sequence[str], large: Sequence[float], infinite: Sequence[float], limit: float
) -> None:
    kinds = (f"of {limit:,.0f} or more", large), ("that are infinite or NaN", infinite)
    found = [
        f"{_listed([name for name, count in zip(names, counts, strict=True) if count])} {what}"
        for what, counts in kinds
        if any(counts)
    ]
    if found:
        raise EngineError(
            f"step {step} has gradients that reduction='fixed' cannot add: those of {', and those of '.join(found)}. Parameters "
            "are as they were before the step; lower the learning rate, look at the step's samples, or use reduction='fp64' or "
            "'fast', which go on with such values"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
