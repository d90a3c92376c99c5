"""Torch ops that select one rank's tokens from a sequence and put them back: `torch.ops.mmcompile.{shard,unshard}_tokens`.

Each op is the other's gradient. `unshard_tokens` leaves zeros in place of other ranks' tokens and does not sum over
ranks: the sum over ranks, which is taken together with that over replicas, is the whole gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.types import Number

from mmcompile.kernels.tensor_parallel.blocks import resized


@torch.library.custom_op("mmcompile::shard_tokens", mutates_args=())
def shard_tokens(x: torch.Tensor, index: torch.Tensor, dim: int, fill: Number) -> torch.Tensor:
    """Return the rows of one rank's tokens.

    Args:
        x: tensor of any dtype with tokens along `dim`.
        index: [local tokens] int64, the token of each row; -1 for a free row, which holds none. No token occurs twice.
        fill: value of free rows: 0 for words and activations, -100 for labels.

    Returns:
        `x` with the selected tokens along `dim`, contiguous.
    """
    rows = x.index_select(dim, index.clamp(min=0))
    return rows.masked_fill_(_free(index, dim, x.ndim), fill)


@shard_tokens.register_fake
def _(x: torch.Tensor, index: torch.Tensor, dim: int, fill: Number) -> torch.Tensor:
    return x.new_empty(resized(x, dim, index.shape[0]))


@torch.library.custom_op("mmcompile::unshard_tokens", mutates_args=())
def unshard_tokens(x: torch.Tensor, index: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    """Return a sequence of zeros with one rank's tokens put back; the inverse of `shard_tokens` on these tokens.

    Args:
        x: result of `shard_tokens`, or its gradient.
        index: [local tokens] int64, as given to `shard_tokens`; free rows are dropped.
        dim, tokens: dim of `x` that runs over tokens, and size of the result along it.
    """
    rows = x.masked_fill(_free(index, dim, x.ndim), 0)
    # Free rows add zeros to the first token: to leave them out would mean to wait for their number on an accelerator.
    return x.new_zeros(resized(x, dim, tokens)).index_add_(dim, index.clamp(min=0), rows)


@unshard_tokens.register_fake
def _(x: torch.Tensor, index: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    return x.new_empty(resized(x, dim, tokens))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, index, ctx.dim, _ = inputs
    ctx.tokens = x.shape[ctx.dim]
    ctx.save_for_backward(index)


def _shard_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return torch.ops.mmcompile.unshard_tokens(grad, index, ctx.dim, ctx.tokens), None, None, None


def _unshard_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return torch.ops.mmcompile.shard_tokens(grad, index, ctx.dim, 0), None, None, None


shard_tokens.register_autograd(_shard_backward, setup_context=_save)
unshard_tokens.register_autograd(_unshard_backward, setup_context=_save)


def _free(index: torch.Tensor, dim: int, ndim: int) -> torch.Tensor:
    return (index < 0).view([-1 if d == dim % ndim else 1 for d in range(ndim)])
