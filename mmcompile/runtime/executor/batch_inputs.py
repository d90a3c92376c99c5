"""Batch inputs on their way from rank 0: small inputs of several microbatches are packed into one message."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.batching.step_plan import StepPlan, ValueShape
from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.comm.groups import ARRIVED, Groups, Work, wait
from mmcompile.runtime.executor.loaded_stage import Stages

_ALIGN_BYTES = 64
_MESSAGE_BYTES = 256 * 1024
"""Maximum bytes of a message with inputs of several microbatches. It limits the inputs that a rank stores in advance."""
_AHEAD = 2
"""Maximum number of messages with batch inputs that a rank starts to receive before it needs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInputs:
    """One message from rank 0 to another rank: batch inputs of consecutive microbatches."""

    items: tuple[tuple[int, ValueShape, int], ...]
    """(index of the microbatch, shape of the input, offset in bytes) of each packed input, in order."""
    num_bytes: int

    def pack(self, values: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return a buffer (uint8 [num_bytes]) with the CPU tensors `values`, by microbatch and name."""
        buffer = self.empty()
        for microbatch, shape, start in self.items:
            raw = values[microbatch][shape.name].contiguous().flatten().view(torch.uint8)
            buffer[start : start + len(raw)] = raw
        return buffer

    def empty(self) -> Tensor:
        """Return an uninitialised CPU buffer (uint8 [num_bytes]) to receive what `pack` makes."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def unpack(self, buffer: Tensor) -> dict[int, dict[str, Tensor]]:
        """Return the batch inputs of a packed buffer, as views into it: tensors by index of the microbatch, then by name."""
        found: dict[int, dict[str, Tensor]] = {}
        for microbatch, shape, start in self.items:
            raw = buffer[start : start + _num_bytes(shape)]
            found.setdefault(microbatch, {})[shape.name] = raw.view(torch_dtype(shape.dtype)).view(shape.shape)
        return found


class BatchInputs:
    """Batch inputs of one rank: rank 0 packs and sends them in microbatch order; other ranks receive a few messages ahead.

    Microbatches are ordered by slot (place in the schedule), nearly the order in which a rank needs them. Inputs that arrive
    before they are needed are kept in this object.
    """

    def __init__(
        self,
        groups: Groups,
        plan: StepPlan,
        loaded: Sequence[Stages],
        values: Sequence[Mapping[str, Tensor]],
        *,
        tag: int,
    ) -> None:
        """Start to send batch inputs on rank 0, or to receive them on another rank.

        Args:
            loaded: this rank's stages, per microbatch.
            values: batch inputs by name, per microbatch, on rank 0; () on other ranks.
            tag: tag of the first message; each further message has the next higher tag.
        """
        self._groups = groups
        self._tag = tag
        self._arrived: dict[int, Mapping[str, Tensor]] = {}
        self._uses = [len(stages) for stages in loaded]
        self._names = [microbatch.readers.get(groups.rank, ()) for microbatch in plan.microbatches]
        self._upcoming = deque(enumerate(packed_inputs(plan, groups.rank) if groups.rank else ()))
        self._posted: deque[tuple[Work, PackedInputs, Tensor]] = deque()
        self._sent: list[tuple[Work, Tensor]] = []
        if groups.rank == 0:
            self._send(plan, values)
        self._post()

    def take(self, microbatch: int) -> Mapping[str, Tensor]:
        """Return the batch inputs of a microbatch, on the device. Each stage that runs the microbatch calls this once."""
        while self._names[microbatch] and microbatch not in self._arrived:
            work, packed, buffer = self._posted.popleft()
            wait(work)
            self._arrived |= packed.unpack(buffer.to(self._groups.device))
            self._post()
        self._uses[microbatch] -= 1
        # The last of its stages takes them away; autograd keeps what backwards need.
        return self._arrived.get(microbatch, {}) if self._uses[microbatch] else self._arrived.pop(microbatch, {})

    def finish(self) -> None:
        """Block until every message that this rank sent has arrived."""
        for work, _ in self._sent:
            wait(work)

    def _send(self, plan: StepPlan, values: Sequence[Mapping[str, Tensor]]) -> None:
        for microbatch, names in enumerate(self._names):
            self._arrived[microbatch] = {name: values[microbatch][name].to(self._groups.device) for name in names}
        for rank in range(1, self._groups.world_size):
            for number, packed in enumerate(packed_inputs(plan, rank)):
                buffer = packed.pack(values)
                if packed.num_bytes:
                    self._sent.append((self._groups.send_control(buffer, rank, self._tag + number), buffer))

    def _post(self) -> None:
        while self._upcoming and len(self._posted) < _AHEAD:
            number, packed = self._upcoming.popleft()
            buffer = packed.empty()
            work = self._groups.receive_control(buffer, 0, self._tag + number) if packed.num_bytes else ARRIVED
            self._posted.append((work, packed, buffer))


def packed_inputs(plan: StepPlan, rank: int) -> list[PackedInputs]:
    """Return the messages with batch inputs that a rank gets in a step, in order; rank 0 and the receiver derive the same."""
    found: list[PackedInputs] = []
    items: list[tuple[int, ValueShape, int]] = []
    end = 0
    for microbatch in plan.microbatches:
        names = microbatch.readers.get(rank, ())
        shapes = [shape for shape in microbatch.inputs if shape.name in names]
        if items and end + sum(map(_num_bytes, shapes)) > _MESSAGE_BYTES:
            found.append(PackedInputs(items=tuple(items), num_bytes=end))
            items, end = [], 0
        for shape in shapes:
            items.append((microbatch.index, shape, end))
            end = math.ceil((end + _num_bytes(shape)) / _ALIGN_BYTES) * _ALIGN_BYTES
    return [*found, PackedInputs(items=tuple(items), num_bytes=end)] if items else found


def _num_bytes(shape: ValueShape) -> int:
    return math.prod(shape.shape) * torch_dtype(shape.dtype).itemsize
