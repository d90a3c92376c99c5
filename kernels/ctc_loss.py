"""`ctc_loss`: the loss of connectionist temporal classification as ops whose sizes do not depend on values.

torch's op also returns a table for its backward, with two columns for each label of the longest target. Here lengths are tensors,
and the backward computes the table again. Source: Graves et al., ICML 2006; the kernels are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("mmcompile::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return -log p(target) of each sequence: [batch], in the dtype of `log_probs`; infinite where a target does not fit.

    Args:
        log_probs: [steps, batch, classes] log probabilities.
        targets: [batch, labels] padded, or [sum of target lengths] one target after the other; int64.
        input_lengths, target_lengths: [batch] steps and labels of each sequence, int64.
        blank: class that stands for no label.
        zero_infinity: True if the gradient of an infinite loss is zero.
    """
    return aten._ctc_loss(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity)[0]


@torch.library.custom_op("mmcompile::ctc_gradient", mutates_args=())
def ctc_gradient(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of `log_probs`, from the gradients `grad` [batch] of the sequences' losses."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    losses, table = aten._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    return aten._ctc_loss_backward(grad, log_probs, targets, *lengths, losses, table, blank, zero_infinity)


@ctc_losses.register_fake
def _(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_gradient.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctc_gradient(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_save)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: Literal["none", "mean", "sum"] = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return what `torch.nn.functional.ctc_loss` does, for the same arguments: [batch] without reduction, else []."""
    alone = log_probs.dim() == 2
    if alone:
        log_probs, targets = log_probs[:, None], targets[None] if targets.dim() == 1 else targets
    inputs, labels = (
        torch.as_tensor(given, device=targets.device).long().reshape(-1) for given in (input_lengths, target_lengths)
    )
    losses = ctc_losses(log_probs, targets, inputs, labels, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == "none":
        return losses[0] if alone else losses
    return losses.sum() if reduction == "sum" else (losses / labels.clamp_min(1).to(losses.dtype)).mean()
