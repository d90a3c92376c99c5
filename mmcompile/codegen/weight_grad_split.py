"""Weight gradients computed after the backward: where the backward runs in two parts, I and W (schedule zb-h1).

A product y = x w^T + b runs on w and b cut from autograd, and its result is joined with a *tap*, an input of zeros:
in part I, autograd makes dL/dx, and dL/dy as the gradient of the tap. Part W later makes the rest from x and dL/dy:

    dL/dw = (dL/dy)^T x        dL/db = sum over rows of dL/dy

A layer that recomputes its activations must not keep x from the forward to W. Its backward therefore hands the recomputed x to a
second tap, in place of a gradient (`handed`), so that x is kept from I to W only, as dL/dy is.

All of this is plain functional code, which a compiler takes as it takes any other.

Source: splitting of the backward: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. The taps are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class _Tapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, tap: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, gradient


def tapped(result: Tensor, tap: Tensor) -> Tensor:
    """Return `result`, whose gradient also becomes the gradient of `tap`, of the same shape; values of `tap` are not read."""
    return _Tapped.apply(result, tap)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient, x


def handed(x: Tensor, tap: Tensor) -> Tensor:
    """Return `x`; in the backward its value becomes the gradient of `tap`. Under checkpointing this is the recomputed `x`.

    Args:
        x: any shape; it must carry gradient, or the backward would not reach it.
        tap: tensor of the same shape and dtype; its values are not read. Good for one backward: a second one would add x once
            more.
    """
    return _Handed.apply(x, tap)


def new_tap(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a leaf tensor that requires grad, with the given shape but the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).requires_grad_()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredGradient:
    """The gradient of one weight for one microbatch, still to be computed."""

    tap: Tensor
    """Zeros [..., out]; the backward leaves the gradient of the product's result as their gradient."""
    x: Tensor
    """Input of the product, [..., in]; if `recomputed`, zeros of that shape whose gradient is the input after the backward."""
    weight: Tensor
    """Weight, [out, in]."""
    bias: Tensor | None
    """Bias, [out]; None if it does not train."""
    recomputed: bool = False
    """True if `x` is not the product's input but zeros that have the recomputed input as gradient after the backward."""

    def add(self) -> None:
        """Add the gradients of weight and bias to their `.grad`; do no work if the backward did not reach the product."""
        given, x = self.tap.grad, self.x.grad if self.recomputed else self.x.detach()
        if given is None:
            return
        assert x is not None, "a backward came by the product, not by what it multiplies"
        rows = given.reshape(-1, given.shape[-1])
        with torch.no_grad():
            _add_product(self.weight, rows.T, x.reshape(-1, x.shape[-1]).to(rows.dtype))
            if self.bias is not None:
                _add(self.bias, rows.sum(0))


def _add_product(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype == left.dtype:
        parameter.grad.addmm_(left, right)
    else:
        _add(parameter, left @ right)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
