"""Batch inputs on their way from rank 0: those of several microbatches packed into one message where they are small."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.batching.step_plan import StepPlan, ValueShape
from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.comm.groups import Groups, Work, wait
from mmcompile.runtime.executor.loaded_stage import Stages

_ALIGN_BYTES = 64
_PARCEL_BYTES = 256 * 1024
"""Above this, a further microbatch gets a message of its own: a rank holds only the next few."""
_ROOTS_AHEAD = 2
"""Parcels received before their turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One message to one rank: batch inputs of consecutive microbatches."""

    items: tuple[tuple[int, ValueShape, int], ...]
    """(microbatch, input, offset in bytes)."""
    num_bytes: int

    def pack(self, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """CPU tensors, by microbatch and name, into one buffer of bytes."""
        buffer = self.empty()
        for microbatch, shape, start in self.items:
            raw = values[microbatch][shape.name].contiguous().flatten().view(torch.uint8)
            buffer[start : start + len(raw)] = raw
        return buffer

    def empty(self) -> Tensor:
        """A buffer of the size `pack` makes."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def unpack(self, buffer: Tensor) -> dict[int, dict[str, Tensor]]:
        """Views into a packed buffer, by microbatch and name."""
        found: dict[int, dict[str, Tensor]] = {}
        for microbatch, shape, start in self.items:
            raw = buffer[start : start + _num_bytes(shape)]
            found.setdefault(microbatch, {})[shape.name] = raw.view(torch_dtype(shape.dtype)).view(shape.shape)
        return found


class _Arrived:
    """The work of a message without bytes, which is never sent."""

    def wait(self) -> bool:
        return True


ARRIVED = _Arrived()


class Roots:
    """Batch inputs of one rank: sent by rank 0 in parcels, in the order of the step's microbatches, received a few ahead.

    That order is by slot, and a rank needs them nearly so: what it needs later than others of its slot waits here.
    """

    def __init__(self, groups: Groups, plan: StepPlan, loaded: Sequence[Stages], *, tag: int) -> None:
        """
        Args:
            loaded: per microbatch, this rank's stages.
            tag: of the first parcel; the others follow.
        """
        self._groups = groups
        self._plan = plan
        self._tag = tag
        self._arrived: dict[int, Mapping[str, Tensor]] = {}
        self._readers = [len(stages) for stages in loaded]
        self._names = [frozenset[str]().union(*(stage.roots for stage in stages.values())) for stages in loaded]
        self._upcoming = deque(enumerate(parcels(plan, self._names) if groups.rank else ()))
        self._posted: deque[tuple[Work, Parcel, Tensor]] = deque()
        self._sent: list[tuple[Work, Tensor]] = []
        self._post()

    def send(self, values: Sequence[Mapping[str, Tensor]], reads: Sequence[Mapping[int, frozenset[str]]]) -> None:
        """Rank 0: start to send them, and keep its own.

        Args:
            values: per microbatch, every root by name.
            reads: per microbatch, rank -> names that its stages read; ranks without stages in it are absent.
        """
        for microbatch, names in enumerate(self._names):
            self._arrived[microbatch] = {name: values[microbatch][name].to(self._groups.device) for name in names}
        for rank in range(1, self._groups.world_size):
            names = [readers.get(rank, frozenset()) for readers in reads]
            for number, parcel in enumerate(parcels(self._plan, names)):
                buffer = parcel.pack(values)
                if parcel.num_bytes:
                    self._sent.append((self._groups.send_control(buffer, rank, self._tag + number), buffer))

    def take(self, microbatch: int) -> Mapping[str, Tensor]:
        """Those of a microbatch, on the device. Each of its stages takes them once."""
        if self._names[microbatch] and microbatch not in self._arrived:
            self._receive_until(microbatch)
        self._readers[microbatch] -= 1
        # The last of its stages takes them away; autograd keeps what backwards need.
        return self._arrived.get(microbatch, {}) if self._readers[microbatch] else self._arrived.pop(microbatch, {})

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self._sent:
            wait(work)

    def _receive_until(self, microbatch: int) -> None:
        while microbatch not in self._arrived:
            work, parcel, buffer = self._posted.popleft()
            wait(work)
            self._arrived |= parcel.unpack(buffer.to(self._groups.device))
            self._post()

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < _ROOTS_AHEAD:
            number, parcel = self._upcoming.popleft()
            buffer = parcel.empty()
            work = self._groups.receive_control(buffer, 0, self._tag + number) if parcel.num_bytes else ARRIVED
            self._posted.append((work, parcel, buffer))


def parcels(plan: StepPlan, names: Sequence[frozenset[str]]) -> list[Parcel]:
    """The messages one rank gets in a step, in order. Both sides work them out from the step plan.

    Args:
        names: per microbatch, the inputs its stages read.
    """
    found: list[Parcel] = []
    items: list[tuple[int, ValueShape, int]] = []
    end = 0
    for microbatch, wanted in zip(plan.microbatches, names, strict=True):
        shapes = [shape for shape in microbatch.roots if shape.name in wanted]
        if items and end + sum(map(_num_bytes, shapes)) > _PARCEL_BYTES:
            found.append(Parcel(items=tuple(items), num_bytes=end))
            items, end = [], 0
        for shape in shapes:
            items.append((microbatch.index, shape, end))
            end = math.ceil((end + _num_bytes(shape)) / _ALIGN_BYTES) * _ALIGN_BYTES
    return [*found, Parcel(items=tuple(items), num_bytes=end)] if items else found


def _num_bytes(shape: ValueShape) -> int:
    return math.prod(shape.shape) * torch_dtype(shape.dtype).itemsize
