"""Gradients between the last backward and the optimizer: summed over the ranks that hold a parameter, the norm clipped."""

# pyright: reportPrivateImportUsage=false
# torch re-exports the functions its optimizers are built on without saying so.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmcompile.runtime.groups import Groups, Lane, Work, wait

_TAG = 2**31 - 2
"""Above the tags of links, below that of control messages."""
BUCKET_BYTES = 64 * 2**20
"""What travels at once, unless one parameter is larger."""
_PART_BYTES = 16 * 1024
"""Below this, splitting a sum over more owners costs more in messages than it saves."""
_ALIGN = 64
"""Elements."""
_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Parameters held by the same ranks: replicas or shards of a stage, or stages that are tied; or all of these at once."""

    names: tuple[str, ...]
    owners: tuple[int, ...]
    """At least two, ascending."""
    givers: tuple[int, ...]
    """Those that may have a gradient in this step, ascending: they ran a backward of a stage with these parameters."""


def sum_shared(
    groups: Groups,
    parameters: Mapping[str, nn.Parameter],
    shared: Iterable[Shared],
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Give every rank that holds a parameter the sum of all its owners' gradients, the same bits to each.

    Gradients travel in flat buckets. Each owner adds up one part of a bucket in order of ranks and sends it to the others,
    so no rank carries more than its share. Half precision is added in float32 and rounded once. A gradient of None counts
    as zero; None on all owners stays None. Parameters that no rank gives anything for cost nothing.

    Args:
        parameters: trainable parameters of this rank, by original name.
        shared: the same on all ranks; each parameter once.
        bucket_bytes: the same on all ranks.
    """
    # In one order on all ranks, since an exchange blocks.
    for item in sorted(shared, key=lambda item: (item.owners, item.givers)):
        if item.givers and groups.rank in item.owners:
            for bucket in _buckets([parameters[name] for name in sorted(item.names)], bucket_bytes):
                _sum(groups, bucket, item)


def _buckets(parameters: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype, as many as fit."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        bucket: list[nn.Parameter] = []
        num_bytes = 0
        for parameter in same:
            if bucket and num_bytes + parameter.nbytes > limit_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(parameter)
            num_bytes += parameter.nbytes
        yield bucket


def _sum(groups: Groups, parameters: Sequence[nn.Parameter], shared: Shared) -> None:
    flat = _flat(parameters)
    parts = _parts(len(flat), flat.element_size(), shared.owners)
    own = flat[parts[groups.rank]]
    received = {rank: torch.empty_like(own) for rank in shared.givers if rank != groups.rank}
    works: list[Work] = []
    # Posted in one order on all ranks: NCCL joins two ranks at their first message, and both must be there.
    for source, target in _pairs(shared.givers, shared.owners):
        if groups.rank == source:
            works += _send(groups, flat[parts[target]], source, target)
        elif groups.rank == target:
            works += _receive(groups, received[source], source, target)
    for work in works:
        wait(work)
    own.copy_(_in_order([own if rank == groups.rank else received[rank] for rank in shared.givers]))
    works = []
    for source, target in _pairs(shared.owners, shared.owners):
        if groups.rank == source:
            works += _send(groups, own, source, target)
        elif groups.rank == target:
            works += _receive(groups, flat[parts[source]], source, target)
    for work in works:
        wait(work)
    _give(parameters, flat)


def _flat(parameters: Sequence[nn.Parameter]) -> Tensor:
    """All gradients, then one element a parameter that says whether there is one."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes) + len(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    *places, flags = flat.split([*sizes, len(sizes)])
    for index, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
        if parameter.grad is not None:
            place.copy_(parameter.grad.flatten())
            flags[index] = 1
    return flat


def _give(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Inverse of `_flat`; gradients are views."""
    sizes = [parameter.numel() for parameter in parameters]
    *places, flags = flat.split([*sizes, len(sizes)])
    for parameter, place, flag in zip(parameters, places, flags.tolist(), strict=True):
        parameter.grad = place.view_as(parameter) if flag > 0 else None


def _parts(length: int, element_bytes: int, owners: Sequence[int]) -> dict[int, slice]:
    """What each owner adds up: contiguous, in order, none too small to be worth it; the last ones may be empty."""
    least = max(_PART_BYTES // element_bytes, math.ceil(length / len(owners)))
    size = math.ceil(least / _ALIGN) * _ALIGN
    return {
        rank: slice(min(index * size, length), min((index + 1) * size, length)) for index, rank in enumerate(owners)
    }


def _pairs(sources: Iterable[int], targets: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((source, target) for source in sources for target in targets if source != target)


def _send(groups: Groups, tensor: Tensor, source: int, target: int) -> list[Work]:
    return [groups.send(tensor, _lane(source, target), _TAG)] if len(tensor) else []


def _receive(groups: Groups, tensor: Tensor, source: int, target: int) -> list[Work]:
    return [groups.receive(tensor, _lane(source, target), _TAG)] if len(tensor) else []


def _lane(source: int, target: int) -> Lane:
    return Lane(source=source, target=target, name="gradients")


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total


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
