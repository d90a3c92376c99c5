"""What rank 0 alone knows of a save, and what it keeps of a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mmcompile.ir.graph import torch_dtype
from mmcompile.runtime.checkpoint.holding import Holding
from mmcompile.runtime.checkpoint.index import Index, state_key
from mmcompile.runtime.checkpoint.pieces import Piece, empty_piece
from mmcompile.runtime.checkpoint.saving import PartJob, WholeJob
from mmcompile.runtime.checkpoint.trainer_state import Stored, TrainerState


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOrder:
    """A save that the user asked for."""

    folder: Path
    fresh: Path
    """Empty, beside it."""
    trainer: TrainerState
    tied: Mapping[str, str]
    """Further name of a parameter -> its first one."""
    data: bytes | None
    """What the user's data says of itself."""
    copies: bool
    """Training goes on meanwhile."""


@dataclass(kw_only=True, slots=True)
class Restored:
    """Optimizer state that stays in a checkpoint until a rank holds its parameters."""

    folder: Path = field(default_factory=Path)
    names: set[str] = field(default_factory=set)
    """What it calls these parameters."""
    index: Index = field(default_factory=lambda: Index(tensors={}, aliases={}))
    """What it had when it was loaded."""

    def take(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of some parameters, by any of their names, whose state is waited for; from now on it is not."""
        found = {name: self.index.name_of(name) for name in sorted(names) if self.index.name_of(name) in self.names}
        self.names -= set(found.values())
        return tuple(found)

    def pieces(self) -> list[Piece]:
        """To write to the next checkpoint: each is read when it is written. Raises CheckpointError."""
        if not self.names:
            return []
        stored = Stored.find(self.folder)
        return [
            _from(stored, state_key(name, key))
            for name, states in stored.index.states().items()
            if name in self.names
            for key in states
        ]


def whole_job(order: SaveOrder, part: PartJob, num_ranks: int, restored: Restored) -> WholeJob:
    """What rank 0 does in a save."""

    def note_saved() -> None:
        # The new checkpoint has it too, and the user may delete the old one.
        restored.folder = order.folder

    return WholeJob(
        part=part,
        folder=order.folder,
        trainer=order.trainer,
        data=order.data,
        tied=order.tied,
        num_ranks=num_ranks,
        saved=note_saved,
    )


def _from(stored: Stored, key: str) -> Piece:
    found = stored.index.tensors[key]

    def tensor() -> Tensor:
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        piece = empty_piece(key, Holding(whole=key), found, found.shape)
        dcp.read_piece(stored.place, stored.index, piece)
        return piece.tensor()

    return Piece(
        key=key,
        dtype=torch_dtype(found.dtype),
        shape=found.shape,
        boxes=Holding(whole=key).boxes(found.shape),
        tensor=tensor,
    )
