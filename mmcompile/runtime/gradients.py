"""Gradients between the last backward and the optimizer: tied parameters summed, the global norm clipped."""

# pyright: reportPrivateImportUsage=false
# torch re-exports the functions its optimizers are built on without saying so.

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mmcompile.runtime.groups import Groups, Lane, wait

_TAG = 2**31 - 2
"""Above the tags of links, below that of control messages."""
_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


def sum_tied(groups: Groups, parameters: Mapping[str, nn.Parameter], owners: Mapping[str, tuple[int, ...]]) -> None:
    """Give every rank that holds a tied parameter the sum of all their gradients.

    The lowest rank adds in order of ranks and sends the sum back, so all get the same bits. A rank whose gradient is
    None counts as zero; if all are None, all stay None.

    Args:
        parameters: trainable parameters of this rank, by original name.
        owners: parameter name -> the ranks that hold it (at least two), ascending; the same on all ranks.
    """
    for name in sorted(owners):
        if groups.rank in owners[name]:
            _sum_over(groups, parameters[name], owners[name], name)


def _sum_over(groups: Groups, parameter: nn.Parameter, ranks: tuple[int, ...], name: str) -> None:
    lead, *others = ranks
    total = _flagged(parameter)
    if groups.rank != lead:
        wait(groups.send(total, Lane(source=groups.rank, target=lead, name=f"sum/{name}"), _TAG))
        wait(groups.receive(total, Lane(source=lead, target=groups.rank, name=f"total/{name}"), _TAG))
    else:
        part = torch.empty_like(total)
        for rank in others:
            wait(groups.receive(part, Lane(source=rank, target=lead, name=f"sum/{name}"), _TAG))
            total += part
        for rank in others:
            wait(groups.send(total, Lane(source=lead, target=rank, name=f"total/{name}"), _TAG))
    parameter.grad = total[:-1].view_as(parameter) if bool(total[-1] > 0) else None


def _flagged(parameter: nn.Parameter) -> Tensor:
    """The flattened gradient, then one element that says whether there is one."""
    flat = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
    if parameter.grad is not None:
        flat[-1] = 1
        flat[:-1] = parameter.grad.flatten()
    return flat


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Sum of squares of all gradients, in float64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)
    return float(torch.stack([norm.double().cpu() for norm in norms]).square().sum())


def scale(parameters: Iterable[nn.Parameter], norm: float, limit: float) -> None:
    """Multiply all gradients by min(1, limit / norm), the norm being that of all ranks together."""
    factor = limit / (norm + _EPSILON)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor < 1 and gradients:
        torch._foreach_mul_(gradients, factor)
