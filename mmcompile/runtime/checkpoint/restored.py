"""`Restored`: optimizer state not yet loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.checkpoint.index import CheckpointIndex, state_key
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, Holding, empty_piece
from mmcompile.runtime.checkpoint.trainer_state import Stored


@dataclass(kw_only=True, slots=True)
class Restored:
    """Records which optimizer state is left in a loaded checkpoint, until a rank holds its parameters and reads it."""

    folder: Path = field(default_factory=Path)
    names: set[str] = field(default_factory=set)
    """Names in the checkpoint of the parameters that no rank holds yet."""
    index: CheckpointIndex = field(default_factory=lambda: CheckpointIndex(tensors={}, aliases={}))
    """Index of the checkpoint at the time it was loaded."""

    def take(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` (any name of a parameter) whose state is still in the checkpoint, and remove them here."""
        found = {name: self.index.name_of(name) for name in sorted(names) if self.index.name_of(name) in self.names}
        self.names -= set(found.values())
        return tuple(found)

    def pieces(self) -> list[CheckpointPiece]:
        """Return pieces that copy the state left in the loaded checkpoint to a new one. Each tensor is read as it is written.

        Raises CheckpointError.
        """
        if not self.names:
            return []
        stored = Stored.find(self.folder)
        return [
            _from(stored, state_key(name, key))
            for name, states in stored.index.states().items()
            if name in self.names
            for key in states
        ]


def _from(stored: Stored, key: str) -> CheckpointPiece:
    found = stored.index.tensors[key]

    def tensor() -> Tensor:
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        piece = empty_piece(key, Holding(whole=key), found, found.shape)
        dcp.read_piece(stored.place, stored.index, piece)
        return piece.tensor()

    return CheckpointPiece(
        key=key,
        dtype=torch_dtype(found.dtype),
        shape=found.shape,
        boxes=Holding(whole=key).boxes(found.shape),
        tensor=tensor,
    )
