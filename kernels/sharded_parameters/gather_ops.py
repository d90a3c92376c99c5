"""`torch.ops.mmcompile.gather_parameter`: gathers a whole parameter from the parts that replicas hold.

    op                    forward                              backward
    gather_parameter      the whole from parts of all ranks    `scatter_gradient`
    scatter_gradient      own part of the sum over ranks       none

Each replica computes with the whole parameter on its own samples, so the gradient of a part is a part of the sum of
all replicas' gradients. All ranks of the group must call these ops in the same order.

Source: SimpleFSDP (arXiv 2411.00284), where FSDP's collectives are ops of the graph; ZeRO stage 3 (arXiv 1910.02054).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mmcompile.kernels.process_groups import Channel, registered_group
from mmcompile.kernels.sharded_parameters.regather import note_gathered
from mmcompile.kernels.tensor_parallel.blocks import block_part, join_blocks, resized

_HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("mmcompile::gather_parameter", mutates_args=())
def gather_parameter(part: torch.Tensor, group_name: str, count: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
    """Gather a whole parameter from the parts of all ranks.

    Args:
        part: this rank's parts of all blocks along `dim`, concatenated.
        group_name: name of a group given to `register_group`; its ranks hold the parts in order.
        count: number of ranks in the group.
        dim: dim along which the parameter is sharded.
        blocks: sizes of the blocks along `dim` in the whole parameter; every rank holds an equal part of each block.

    Returns:
        The whole parameter, contiguous. Parts along dim 0 of a single block arrive in place; other parts are copied
        once more.

    Raises:
        ConfigError: the group is not registered or has another size.
        ExchangeLost: a rank is gone.
    """
    again = functools.partial(_gathered, part.detach(), group_name, count, dim, tuple(blocks))
    whole = again()
    note_gathered(whole, again)
    return whole


def _gathered(part: torch.Tensor, group_name: str, count: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
    target = part.new_empty((count * part.shape[0], *part.shape[1:]))
    made = Channel(registered_group(group_name, count), part.device).gather(target, part.contiguous()).wait()
    return made if _in_place(dim, blocks) else join_blocks(made.chunk(count), dim, blocks)


@gather_parameter.register_fake
def _(part: torch.Tensor, group_name: str, count: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
    return part.new_empty(resized(part, dim, sum(blocks)))


@torch.library.custom_op("mmcompile::scatter_gradient", mutates_args=())
def scatter_gradient(grad: torch.Tensor, group_name: str, count: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
    """Return this rank's part of a gradient summed over ranks; half-precision gradients are summed in float32, rounded once.

    Args:
        grad: gradient of the whole parameter, from this rank's samples. The other arguments are those of
            `gather_parameter`.

    Returns:
        The part, in the shape of this rank's part of the parameter and the dtype of `grad`.
    """
    wide = grad.to(torch.float32) if grad.dtype in _HALF else grad
    if not _in_place(dim, blocks):
        wide = torch.cat([block_part(wide, dim, blocks, index, count) for index in range(count)])
    target = wide.new_empty((wide.shape[0] // count, *wide.shape[1:]))
    channel = Channel(registered_group(group_name, count), grad.device)
    return channel.scatter_sum(target, wide.contiguous()).wait().to(grad.dtype)


@scatter_gradient.register_fake
def _(grad: torch.Tensor, group_name: str, count: int, dim: int, blocks: Sequence[int]) -> torch.Tensor:
    return grad.new_empty(resized(grad, dim, grad.shape[dim] // count))


def _in_place(dim: int, blocks: Sequence[int]) -> bool:
    """Return whether a gathered parameter is simply the parts of all ranks one after another in memory."""
    return dim == 0 and len(blocks) == 1


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *ctx.layout = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.mmcompile.scatter_gradient(grad, *ctx.layout), None, None, None, None


gather_parameter.register_autograd(_backward, setup_context=_save)
