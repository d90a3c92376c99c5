"""Ops at the borders between whole and sharded values: `torch.ops.mmcompile.tp_*`.

A *whole* value is the same on every rank of the group, and so is its gradient. A *sharded* value is a
rank's part of a value that is divided along a dim. A rank that computes with its part of a value gets a partial
gradient of the whole values it reads; `tp_copy` sums these over ranks.

    op                       forward            backward
    tp_copy, tp_exit         identity           sum over ranks
    tp_sum                   sum over ranks     identity
    tp_enter                 identity           the gradient on rank 0, zeros on the others
    tp_slice, tp_heads       own part           own part of a gradient that is zero elsewhere

`tp_exit` and `tp_enter` stand where components of different degrees meet, and keep the sum over ranks of the gradients
sent back equal to the whole gradient. The group is found by name (`mmcompile.kernels.process_groups`), and the rank in
it is the index of the rank's own part.

Source: the conjugate operators f and g of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch

from mmcompile.kernels.process_groups import all_reduce, registered_group
from mmcompile.kernels.tensor_parallel.blocks import block_part, block_ranges, resized


@torch.library.custom_op("mmcompile::tp_copy", mutates_args=())
def tp_copy(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """Copy a whole value that sharded computations read; its gradient is summed over ranks.

    Args:
        x: any shape, the same on every rank.
        group_name: name of a group given to `register_group`.
        count: number of ranks in the group.
    """
    return x.clone()


@torch.library.custom_op("mmcompile::tp_sum", mutates_args=())
def tp_sum(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """Return the sum of `x` over ranks; the result is the same on every rank.

    Raises:
        ConfigError: the group is not registered or has another size.
        ExchangeLost: a rank is gone.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    return all_reduce(total, registered_group(group_name, count))


@torch.library.custom_op("mmcompile::tp_exit", mutates_args=())
def tp_exit(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """Copy `x`, equal on all ranks, for another component, which sends its gradient to one rank; backward gives it to all."""
    return x.clone()


@torch.library.custom_op("mmcompile::tp_enter", mutates_args=())
def tp_enter(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """Copy `x` of another component, equal on all ranks; only rank 0 returns its gradient, so that a sum counts it once."""
    return x.clone()


@torch.library.custom_op("mmcompile::tp_first", mutates_args=())
def tp_first(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """Return `x` on rank 0, zeros on the others: the gradient of `tp_enter`."""
    first = registered_group(group_name, count).rank() == 0
    return x.clone() if first else torch.zeros_like(x)


@torch.library.custom_op("mmcompile::tp_slice", mutates_args=())
def tp_slice(x: torch.Tensor, dim: int, blocks: list[int], group_name: str, count: int) -> torch.Tensor:
    """Return this rank's part of `x`, equal on all ranks: a part of each block along `dim` (`mmcompile.ir.tensor_shard`).

    Args:
        dim: dim that is sharded.
        blocks: sizes of the blocks along `dim`, each divided evenly over the ranks.
        group_name: name of a group given to `register_group`.
        count: number of ranks in the group.

    Returns:
        `x` with 1/count of its size along `dim`, contiguous.
    """
    index = registered_group(group_name, count).rank()
    return block_part(x, dim, blocks, index, count).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("mmcompile::tp_slice_backward", mutates_args=())
def tp_slice_backward(grad: torch.Tensor, dim: int, blocks: list[int], group_name: str, count: int) -> torch.Tensor:
    """Return the gradient of `tp_slice`'s input: `grad` at the place of this rank's part, and zeros elsewhere."""
    index = registered_group(group_name, count).rank()
    whole = grad.new_zeros(resized(grad, dim, sum(blocks)))
    begin = 0
    for start, length in block_ranges(blocks, index, count):
        whole.narrow(dim, start, length).copy_(grad.narrow(dim, begin, length))
        begin += length
    return whole


@torch.library.custom_op("mmcompile::tp_heads", mutates_args=())
def tp_heads(x: torch.Tensor, dim: int, heads: list[int], group_name: str, count: int) -> torch.Tensor:
    """Return the key/value heads that this rank's query heads read; used if the ranks cannot divide these heads evenly.

    Args:
        x: whole value with heads along `dim`.
        heads: indices of the heads that rank 0 reads, then as many for rank 1, and so on; a head may occur several times.
        count: number of ranks in the group; the result has `len(heads) // count` heads along `dim`.
    """
    index = registered_group(group_name, count).rank()
    return x.index_select(dim, _own_heads(heads, index, count, x.device))


@torch.library.custom_op("mmcompile::tp_heads_backward", mutates_args=())
def tp_heads_backward(
    grad: torch.Tensor, dim: int, heads: list[int], size: int, group_name: str, count: int
) -> torch.Tensor:
    """Return the gradient of the `x` of `tp_heads`, with all `size` heads along `dim`; 0 for heads that this rank did not read.

    A head that this rank read several times gets the sum of these gradients. The group has `count` ranks.
    """
    index = registered_group(group_name, count).rank()
    whole = grad.new_zeros(resized(grad, dim, size))
    return whole.index_add_(dim, _own_heads(heads, index, count, grad.device), grad)


def _own_heads(heads: list[int], index: int, count: int, device: torch.device) -> torch.Tensor:
    each = len(heads) // count
    return torch.tensor(heads[index * each : (index + 1) * each], device=device)


def _same(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    return torch.empty_like(x)


def _contiguous(x: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _op, _fake in ((tp_copy, _same), (tp_exit, _same), (tp_enter, _same), (tp_first, _same), (tp_sum, _contiguous)):
    _op.register_fake(_fake)


@tp_slice.register_fake
def _(x: torch.Tensor, dim: int, blocks: list[int], group_name: str, count: int) -> torch.Tensor:
    return x.new_empty(resized(x, dim, sum(blocks) // count))


@tp_slice_backward.register_fake
def _(grad: torch.Tensor, dim: int, blocks: list[int], group_name: str, count: int) -> torch.Tensor:
    return grad.new_empty(resized(grad, dim, sum(blocks)))


@tp_heads.register_fake
def _(x: torch.Tensor, dim: int, heads: list[int], group_name: str, count: int) -> torch.Tensor:
    return x.new_empty(resized(x, dim, len(heads) // count))


@tp_heads_backward.register_fake
def _(grad: torch.Tensor, dim: int, heads: list[int], size: int, group_name: str, count: int) -> torch.Tensor:
    return grad.new_empty(resized(grad, dim, size))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group_name, ctx.count = inputs


def _summed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.mmcompile.tp_sum(grad, ctx.group_name, ctx.count), None, None


def _kept(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, None, None


def _first(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.mmcompile.tp_first(grad, ctx.group_name, ctx.count), None, None


tp_copy.register_autograd(_summed, setup_context=_save)
tp_exit.register_autograd(_summed, setup_context=_save)
tp_sum.register_autograd(_kept, setup_context=_save)
tp_enter.register_autograd(_first, setup_context=_save)


def _save_part(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dim, ctx.layout, ctx.group_name, ctx.count = inputs
    ctx.size = x.shape[ctx.dim]


def _slice_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    backward = torch.ops.mmcompile.tp_slice_backward
    return backward(grad, ctx.dim, ctx.layout, ctx.group_name, ctx.count), None, None, None, None


def _heads_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    backward = torch.ops.mmcompile.tp_heads_backward
    return backward(grad, ctx.dim, ctx.layout, ctx.size, ctx.group_name, ctx.count), None, None, None, None


tp_slice.register_autograd(_slice_backward, setup_context=_save_part)
tp_heads.register_autograd(_heads_backward, setup_context=_save_part)
