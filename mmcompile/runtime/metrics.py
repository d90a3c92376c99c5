"""`StepMetrics`: what one step did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What one step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the step's valid tokens (over its samples, where the model gives no loss per token)."""
    num_tokens: int
    """Valid tokens; 0 where the model gives no loss per token."""
    num_samples: int
    seconds: float
    grad_norm: float | None
    """Global norm before clipping; None without `clip_norm`."""
    busy_s: tuple[float, ...]
    """Per rank, the time in forwards and backwards."""
    balance: str = ""
    """The balancer that placed the samples, and why it (rank 0 only)."""
    planning_s: float = 0.0
    """Time it took to plan the step (rank 0 only)."""
    waited_s: float = 0.0
    """How long the step waited for its plan (rank 0 only): all of `planning_s` in `step`, next to nothing in `train`."""
