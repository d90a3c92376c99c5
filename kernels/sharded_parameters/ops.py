"""`torch.ops.mmcompile.gather_parameter`: a whole parameter, from the parts that replicas hold.

    op                    forward                              backward
    gather_parameter      parts of all ranks along dim 0       `scatter_gradient`
    scatter_gradient      own part of the sum over ranks       none

Each replica computes with the whole parameter on samples of its own, so the gradient of a part is a part of the sum of all
replicas' gradients. All ranks of the group must call these ops in the same order.

Source: SimpleFSDP (arXiv 2411.00284), where FSDP's collectives are ops of the graph; ZeRO stage 3 (arXiv 1910.02054).
"""

from __future__ import annotations

from typing import Any

import torch

from mmcompile.kernels.process_groups import Channel, registered_group

_HALF = (torch.bfloat16, torch.float16)


@torch.library.custom_op("mmcompile::gather_parameter", mutates_args=())
def gather_parameter(part: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """The whole parameter.

    Args:
        part: [rows / count, ...], the rank's rows; the next rank has the rows that follow.
        group_name: of a group given to `register_group`.
        count: its ranks.

    Returns:
        [rows, ...], contiguous, with the bits of the parts.

    Raises:
        ConfigError: the group is not registered or has another size.
        ExchangeLost: a rank is gone.
    """
    target = part.new_empty(_gathered(part, count))
    return Channel(registered_group(group_name, count), part.device).gather(target, part.contiguous()).wait()


@gather_parameter.register_fake
def _(part: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    return part.new_empty(_gathered(part, count))


@torch.library.custom_op("mmcompile::scatter_gradient", mutates_args=())
def scatter_gradient(grad: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    """A rank's rows of the sum over ranks; half-precision gradients are added up in float32 and rounded once.

    Args:
        grad: [rows, ...], of the whole parameter, from the rank's own samples.

    Returns:
        [rows / count, ...] in the dtype of `grad`.
    """
    wide = grad.to(torch.float32) if grad.dtype in _HALF else grad
    target = wide.new_empty(_scattered(grad, count))
    channel = Channel(registered_group(group_name, count), grad.device)
    return channel.scatter_sum(target, wide.contiguous()).wait().to(grad.dtype)


@scatter_gradient.register_fake
def _(grad: torch.Tensor, group_name: str, count: int) -> torch.Tensor:
    return grad.new_empty(_scattered(grad, count))


def _gathered(part: torch.Tensor, count: int) -> tuple[int, ...]:
    return (part.shape[0] * count, *part.shape[1:])


def _scattered(grad: torch.Tensor, count: int) -> tuple[int, ...]:
    return (grad.shape[0] // count, *grad.shape[1:])


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    _, ctx.group_name, ctx.count = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple:
    return torch.ops.mmcompile.scatter_gradient(grad, ctx.group_name, ctx.count), None, None


gather_parameter.register_autograd(_backward, setup_context=_save)
