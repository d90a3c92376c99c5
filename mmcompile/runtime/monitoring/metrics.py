"""Results of one step: `StepTotals`, which all ranks have, and `StepMetrics`, which the user gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """Totals of a step over all ranks. Loss, tokens and norm do not depend on which rank computed which microbatch."""

    loss: float
    """Sum of the weighted losses of all microbatches; divided by the step plan's `total_weight`, it is the mean loss."""
    num_tokens: int
    """Number of valid tokens that loss stages counted."""
    squared_norm: float | None
    """Squared norm of all gradients, before clipping; None without clipping, or where no update follows."""
    busy_s: tuple[float, ...]
    """Seconds of each rank in forwards and backwards, in order of ranks."""
    microbatch_s: tuple[float, ...]
    """Seconds of forwards and backwards of each microbatch in the step plan, added over all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one step as `Engine.step` returns them: loss, tokens, times, and how samples were balanced."""

    step: int
    """Number of the step, counted from 1; the same for all calls of one step."""
    loss: float
    """Mean over the valid tokens of the call (over its samples, where the model gives no loss per token)."""
    num_tokens: int
    """Number of valid tokens; 0 where the model gives no loss per token."""
    num_samples: int
    seconds: float
    grad_norm: float | None
    """Global gradient norm before clipping; None without `clip_norm`, or without an update."""
    busy_s: tuple[float, ...]
    """Seconds of each rank in forwards and backwards, in order of ranks."""
    updated: bool = True
    """True if parameters were updated; else gradients were added to those of earlier calls of the step."""
    balance: str = ""
    """Name of the balancer that placed the samples, and its reason; "" on ranks other than 0, which plan no steps."""
    planning_s: float = 0.0
    """Seconds that rank 0 spent planning the step; 0 on other ranks."""
    waited_s: float = 0.0
    """Seconds for which the step waited for its plan (rank 0 only): all of `planning_s` in `step`, nearly 0 in `train`."""
