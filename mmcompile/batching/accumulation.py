"""`AccumulatedStep`: a step in several parts, each with a plan of its own, whose gradients are added up before one update.

A step's loss is a mean: the sum over its valid tokens (or samples), divided by their number. This number is known only with the
last part. So tokens (or samples) of all parts have the same loss weight, 1 / u, and the update divides the gradient by the sum of
these weights:

    gradient = (sum over parts and tokens of 1/u * gradient of the token's loss) / (sum over parts of tokens / u)

u is a power of two near the number of tokens of the first part. So dividing by it rounds nothing, and sums are as large as those
of a step of one part.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from mmcompile.batching.step_plan import StepPlan
from mmcompile.errors import BatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class AccumulatedStep:
    """Numbers of parts (batches added up to one update) and samples of a step so far, and the divisor of its loss weights."""

    num_parts: int = 0
    num_samples: int = 0
    unit: float = 0.0
    """Divisor u of loss weights, a power of two: each token (or sample) of a step has weight 1 / u; 0.0 before the first part."""
    per_token: bool = True
    """True if the step's loss is a mean over tokens; False if it is a mean over samples."""

    def with_part(self, plan: StepPlan) -> AccumulatedStep:
        """Return the totals with one more part added; empty totals (`NOTHING`) if `plan` updates the parameters."""
        if plan.update:
            return NOTHING
        return AccumulatedStep(
            num_parts=self.num_parts + 1,
            num_samples=self.num_samples + plan.num_samples,
            unit=self.unit or unit_of(plan.num_tokens or plan.num_samples),
            per_token=plan.num_tokens > 0,
        )

    def check(self, per_token: Collection[bool]) -> None:
        """Refuse a part whose loss is a mean over tokens if earlier parts are means over samples, and the reverse.

        Args:
            per_token: for each kind of microbatch, whether its loss is a mean over tokens.

        Raises:
            BatchError: some losses are means over tokens, others over samples, so that their gradients cannot be added up.
        """
        kinds = {*per_token, self.per_token} if self.num_parts else set(per_token)
        if len(kinds) > 1:
            raise BatchError(
                "the losses of some samples are means over tokens, those of others means over samples; gradients of several "
                f"calls are one mean: update after each call (this is call {self.num_parts + 1} of the step)"
            )


NOTHING = AccumulatedStep()


def unit_of(count: int) -> float:
    """Return the largest power of two that is at most `count` (1 or more)."""
    return 2.0 ** math.floor(math.log2(count))
