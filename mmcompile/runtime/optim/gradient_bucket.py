"""`Bucket`: gradients of a few parameters with the same owners, which are sent and added up together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from mmcompile.errors import EngineError
from mmcompile.runtime.comm.groups import END_GRADIENT_TAG, FIRST_GRADIENT_TAG, Groups, Lane, Work, wait
from mmcompile.runtime.optim.arithmetic import Arithmetic, Largest

_PART_BYTES = 16 * 1024
"""Minimum bytes of the part of a bucket that one rank adds up: smaller parts cost more in messages than they save."""
_ALIGN = 64
"""Alignment, in elements, of each gradient in a bucket, so that vector instructions read all gradients in the same way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerSet:
    """Parameters held by the same ranks, which run replicas or shards of a stage, or several stages with tied parameters."""

    names: tuple[str, ...]
    owners: tuple[int, ...]
    """Ranks that hold the parameters, ascending."""
    givers: tuple[int, ...]
    """Owners that ran a backward of a stage with these parameters in this step, and so may have a gradient; ascending."""
    updater: int | None = None
    """Only owner that gets the sum, updates the parameters and sends the others their new values. None: every owner does."""


@final
class Bucket:
    """A flat buffer of gradients: each parameter's gradient, then one flag element a parameter, 1 if it has a gradient.

    *Owners* are the ranks that hold the parameters; *givers* are the owners with gradients in this step. The buffer is cut into
    one part for each owner. In phase 1 (`start`), each giver sends every owner that owner's part. Each owner adds up its part of
    all givers' buffers, in order of ranks, and rounds once. In phase 2 (`add`), each owner sends the sum to all others, so that
    all hold the same bits. Where one owner alone updates the parameters, its part is the whole buffer, and there is no phase 2.
    `give` leaves sums in `.grad`. Only `add` and `give` block.

    Args:
        parameters: parameters of one dtype, by name.
        targets: the tensor that gets each parameter's sum: the parameter itself, or its float32 master. All are of one dtype.
        dtype: dtype of the targets, also on ranks that get no sum.
        shared: owners and givers of the parameters.
        tags: message tag of phase 1, and of phase 2.
    """

    def __init__(
        self,
        groups: Groups,
        arithmetic: Arithmetic,
        parameters: Mapping[str, nn.Parameter],
        targets: Sequence[nn.Parameter],
        dtype: torch.dtype,
        shared: OwnerSet,
        tags: tuple[int, int],
    ) -> None:
        self.is_local = len(shared.owners) == 1
        """True if only one rank holds the parameters."""
        self.moves = arithmetic.moves
        self._groups = groups
        self._arithmetic = arithmetic
        self._parameters = list(parameters.values())
        self._targets = targets
        self._index = {name: index for index, name in enumerate(parameters)}
        self._shared = shared
        self._gets = shared.updater in (None, groups.rank)
        self._tags = tags
        self._dtype, self._device = dtype, self._parameters[0].device
        self._places, self._flags = _places([parameter.numel() for parameter in self._parameters])
        self._length = self._flags + len(self._parameters)
        self._parts = _parts(self._length, self._dtype.itemsize, shared)
        self._entered: set[int] = set()
        self._largest = Largest(arithmetic.limit)
        self._flat: Tensor | None = None
        self._received: dict[int, Tensor] = {}
        self._works: list[Work] = []
        self._sum: Tensor | None = None

    def enter(self, name: str) -> None:
        """Add a parameter's `.grad`, if it has one, to the gradient in the buffer, and set `.grad` to None."""
        index = self._index[name]
        parameter = self._parameters[index]
        if parameter.grad is None:
            return
        gradient, flat = parameter.grad.flatten(), self._buffer()
        self._arithmetic.add(flat[self._places[index]], gradient)
        self._mark(index)
        self._largest.note(name, gradient)
        parameter.grad = None

    def resume(self, name: str, total: Tensor) -> None:
        """Put a parameter's sum of earlier gradients, in the reduction's number format, into the buffer. More can be added."""
        index = self._index[name]
        self._buffer()[self._places[index]] = total
        self._mark(index)

    def start(self) -> None:
        """Start to send each owner (rank that holds the parameters) its part of the gradients, and receive this rank's part."""
        if not self._arithmetic.moves:
            for name in self._index:
                self.enter(name)
        rank = self._groups.rank
        if rank in self._shared.givers:
            self._buffer()
        own = self._parts[rank]
        # In one order on all ranks: NCCL joins two ranks at their first message, and both must be there.
        for source, target in _pairs(self._shared.givers, self._shared.owners):
            if rank == source:
                self._send(self._buffer()[self._parts[target]], target, phase=0)
            elif rank == target:
                shape = (own.stop - own.start, *self._arithmetic.width)
                dtype = self._arithmetic.dtype(self._dtype)
                self._received[source] = torch.empty(shape, dtype=dtype, device=self._device)
                self._receive(self._received[source], source, phase=0)

    def add(self) -> None:
        """Wait for the other ranks' gradients, add up those in this rank's part of the buffer, and start to exchange the sums."""
        self._wait()
        rank, flat = self._groups.rank, self._flat
        if not self._gets:
            self._flat = None
            self._received.clear()
            return
        own = self._parts[rank]
        total = self._arithmetic.sum(
            [self._buffer()[own] if giver == rank else self._received[giver] for giver in self._shared.givers]
        )
        self._received.clear()
        alike = flat is not None and flat.dtype == self._dtype and flat.dim() == 1
        self._flat = None
        self._sum = flat if alike else torch.empty(self._length, dtype=self._dtype, device=self._device)
        assert self._sum is not None
        self._sum[own] = self._arithmetic.rounded(total, self._dtype)
        if self._shared.updater is not None:
            return
        for source, target in _pairs(self._shared.owners, self._shared.owners):
            if rank == source:
                self._send(self._sum[own], target, phase=1)
            elif rank == target:
                self._receive(self._sum[self._parts[source]], source, phase=1)

    def give(self) -> None:
        """Wait for the sums of other ranks, then set `.grad` of each parameter, or of its float32 master, to a view of its sum.

        `.grad` is None where no rank has a gradient, or where another rank updates the parameter.
        """
        self._wait()
        if not self._gets:
            return
        assert self._sum is not None, "gradients are added before they are given"
        # To read the flags would wait for a device.
        given = [flag > 0 for flag in self._sum[self._flags :].tolist()] if not self.is_local else None
        for index, (target, place) in enumerate(zip(self._targets, self._places, strict=True)):
            has = index in self._entered if given is None else given[index]
            target.grad = self._sum[place].view_as(target) if has else None
        self._sum = None

    def faults(self) -> dict[str, float]:
        """Return name -> largest absolute gradient element on this rank, where too large, infinite or NaN for the arithmetic."""
        return self._largest.faults()

    def _mark(self, index: int) -> None:
        if index not in self._entered:
            self._entered.add(index)
            flag = self._flags + index
            one = torch.ones(1, dtype=self._dtype, device=self._device)
            self._arithmetic.add(self._buffer()[flag : flag + 1], one)

    def _buffer(self) -> Tensor:
        if self._flat is None:
            shape = (self._length, *self._arithmetic.width)
            self._flat = torch.zeros(shape, dtype=self._arithmetic.dtype(self._dtype), device=self._device)
        return self._flat

    def _send(self, tensor: Tensor, target: int, *, phase: int) -> None:
        if len(tensor):
            self._works.append(
                self._groups.send(tensor, Lane(self._groups.rank, target, "gradients"), self._tags[phase])
            )

    def _receive(self, tensor: Tensor, source: int, *, phase: int) -> None:
        if len(tensor):
            # Waited for before what is sent: gloo lets go of it if a rank is gone.
            self._works.insert(
                0, self._groups.receive(tensor, Lane(source, self._groups.rank, "gradients"), self._tags[phase])
            )

    def _wait(self) -> None:
        for work in self._works:
            wait(work)
        self._works.clear()


def gradient_tags(place: int, num_places: int, bucket: int) -> tuple[int, int]:
    """Return two message tags of a bucket: of gradients sent to be summed, and of the sums (or updated parameters) sent back.

    Args:
        place: position of the bucket's owner set among the `num_places` owner sets, the same on all ranks.
        bucket: position of the bucket among the buckets of its owner set, the same on all owners.

    Raises:
        EngineError: there are more buckets than tags.
    """
    room = (END_GRADIENT_TAG - FIRST_GRADIENT_TAG) // (2 * num_places)
    if bucket >= room:
        raise EngineError(
            f"gradients of one set of ranks travel in more than {room} buckets, of {num_places} sets: there are no more tags; "
            "use larger buckets"
        )
    first = FIRST_GRADIENT_TAG + 2 * (place * room + bucket)
    return first, first + 1


def split_into_buckets(parameters: Mapping[str, nn.Parameter], limit_bytes: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield buckets: parameters of one dtype in order of names, at most `limit_bytes` together, at least one parameter."""
    by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, parameter in sorted(parameters.items()):
        by_dtype.setdefault(parameter.dtype, {})[name] = parameter
    for same in by_dtype.values():
        bucket: dict[str, nn.Parameter] = {}
        num_bytes = 0
        for name, parameter in same.items():
            if bucket and num_bytes + parameter.nbytes > limit_bytes:
                yield bucket
                bucket, num_bytes = {}, 0
            bucket[name] = parameter
            num_bytes += parameter.nbytes
        yield bucket


def _places(sizes: Iterable[int]) -> tuple[list[slice], int]:
    """Return (slice of each gradient in a flat buffer, length of the buffer). Sizes, slices and length are in elements."""
    places: list[slice] = []
    end = 0
    for size in sizes:
        places.append(slice(end, end + size))
        end = math.ceil((end + size) / _ALIGN) * _ALIGN
    return places, end


def _parts(length: int, element_bytes: int, shared: OwnerSet) -> dict[int, slice]:
    """Return the slice of the buffer, in elements, that each owner adds up, by rank; some slices may be empty."""
    if shared.updater is not None:
        return {rank: slice(0, length if rank == shared.updater else 0) for rank in shared.owners}
    least = max(_PART_BYTES // element_bytes, math.ceil(length / len(shared.owners)))
    size = math.ceil(least / _ALIGN) * _ALIGN
    return {
        rank: slice(min(index * size, length), min((index + 1) * size, length))
        for index, rank in enumerate(shared.owners)
    }


def _pairs(sources: Iterable[int], targets: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((source, target) for source in sources for target in targets if source != target)
