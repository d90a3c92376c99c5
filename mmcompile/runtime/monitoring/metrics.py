"""Results of one step: `StepTotals`, which all ranks have, and `StepMetrics`, which the user gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """Totals of a step over all ranks. Loss, tokens and norm do not depend on which rank computed which microbatch."""

    loss: float
    """Sum of the weighted losses of all microbatches; the mean times the plan's `total_weight`."""
    num_tokens: int
    """Valid tokens that loss stages counted."""
    squared_norm: float | None
    """Squared norm of all gradients, before clipping; None without clipping, or where no update follows."""
    busy_s: tuple[float, ...]
    """Per rank, the time in forwards and backwards."""
    microbatch_s: tuple[float, ...]
    """Seconds of all ranks together in each microbatch of the step plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of one step."""

    step: int
    """Counted from 1; the same for all calls of one step."""
    loss: float
    """Mean over the valid tokens of the call (over its samples, where the model gives no loss per token)."""
    num_tokens: int
    """Valid tokens; 0 where the model gives no loss per token."""
    num_samples: int
    seconds: float
    grad_norm: float | None
    """Global norm before clipping; None without `clip_norm`, or without an update."""
    busy_s: tuple[float, ...]
    """Per rank, the time in forwards and backwards."""
    updated: bool = True
    """Parameters were updated; if not, gradients were added to those of the step."""
    balance: str = ""
    """The balancer that placed the samples, and why it (rank 0 only)."""
    planning_s: float = 0.0
    """Time it took to plan the step (rank 0 only)."""
    waited_s: float = 0.0
    """Seconds for which the step waited for its plan (rank 0 only): all of `planning_s` in `step`, next to nothing in `train`."""
