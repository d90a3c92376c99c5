"""`Received`: a value that came from another stage, whose gradient goes back there.

As a leaf of autograd it would stay in memory until its backward, needed or not. So it enters the stage through a node that only
takes its gradient: then what it holds is freed with the last of those who read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmcompile.runtime.executor.loaded_stage import InputSlot


@dataclass(kw_only=True, slots=True)
class Received:
    """One link input of one microbatch."""

    slot: InputSlot
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    gradient: Tensor | None = None

    @classmethod
    def of(cls, slot: InputSlot, value: Tensor) -> Received:
        return cls(slot=slot, shape=value.shape, dtype=value.dtype, device=value.device)

    def enter(self, value: Tensor) -> Tensor:
        """The value as the stage takes it: the same memory, with gradient."""
        return _Enter.apply(value, torch.zeros((), requires_grad=True), self)

    def take_gradient(self) -> Tensor:
        """What the backward brought; zeros if it did not come by."""
        gradient, self.gradient = self.gradient, None
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if gradient is None else gradient


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, received: Received) -> Tensor:
        """`anchor` is there to have a gradient: `value` has none outside of this stage."""
        ctx.received = received
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.received.gradient = gradient
        return None, None, None
