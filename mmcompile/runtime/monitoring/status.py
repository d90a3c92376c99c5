"""`StatusBoard`: current action of every rank, readable even after a rank was killed."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass

_SLOT = struct.Struct("<qiii")
_SLOT_BYTES = 64
"""Bytes of one rank's status in the shared memory: a cache line, so that writes by other ranks do not slow this one down."""

IDLE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The last action that a rank began."""

    step: int
    stage: int
    """Index of the stage in the placement, which lists every replica and shard of a stage; -1 between actions."""
    kind: int
    """Position of the action's kind in `ActionKind`."""
    microbatch: int
    """Number of the microbatch as in the rank's action list. Replicas, and encoders balanced by themselves, number their own."""


class StatusBoard:
    """Shared memory where each rank writes its current action before it begins. A write takes less than a microsecond."""

    def __init__(self, file: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(file, num_ranks * _SLOT_BYTES)

    @staticmethod
    def create(num_ranks: int) -> int:
        """Make a board in an unnamed file, and return the file descriptor, which workers inherit."""
        with tempfile.TemporaryFile() as file:
            file.write(_SLOT.pack(0, IDLE, 0, 0).ljust(_SLOT_BYTES, b"\0") * num_ranks)
            file.flush()
            return os.dup(file.fileno())

    @classmethod
    def private(cls, num_ranks: int) -> StatusBoard:
        """Return a board that no other process sees."""
        file = cls.create(num_ranks)
        try:
            return cls(file, num_ranks)
        finally:
            os.close(file)

    def write(self, rank: int, step: int, stage: int, kind: int, microbatch: int) -> None:
        """Write the action that a rank begins (fields as in `Status`) to the rank's slot of the board."""
        _SLOT.pack_into(self._memory, rank * _SLOT_BYTES, step, stage, kind, microbatch)

    def read(self, rank: int) -> Status:
        """Return the last action that a rank wrote to its slot."""
        step, stage, kind, microbatch = _SLOT.unpack_from(self._memory, rank * _SLOT_BYTES)
        return Status(step=step, stage=stage, kind=kind, microbatch=microbatch)
