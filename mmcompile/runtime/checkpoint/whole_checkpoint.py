"""`Checkpoint`: a whole checkpoint in the memory of one process, in the format that ranks write together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mmcompile.runtime.checkpoint.checkpoint_folder import replacing, swap
from mmcompile.runtime.checkpoint.index import CheckpointIndex, state_key, weight_key
from mmcompile.runtime.checkpoint.pieces import Holding, wanted_by, whole_piece
from mmcompile.runtime.checkpoint.trainer_state import Stored, TrainerState, files_of, saved, write_state
from mmcompile.runtime.comm.wire import under

__all__ = ["Checkpoint", "TrainerState", "read", "saved", "write"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Training state, weights and optimizer state of a checkpoint, with tensors on the CPU."""

    trainer: TrainerState
    weights: Mapping[str, Tensor]
    """Trained parameters by original name."""
    optimizer: Mapping[str, Tensor]
    """Tensors of optimizer state by `<key>/<parameter>`."""


def write(folder: Path, checkpoint: Checkpoint, tied: Mapping[str, str]) -> None:
    """Write a checkpoint beside the old one, then put it in the old one's place.

    Args:
        tied: first name of a tied parameter, by each further name.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written. The old checkpoint is untouched.
    """
    # It takes most of a second to import.
    from mmcompile.runtime.checkpoint import dcp

    pieces = [whole_piece(weight_key(name), tensor) for name, tensor in checkpoint.weights.items()]
    for path, tensor in checkpoint.optimizer.items():
        key, name = path.split("/", 1)
        pieces.append(whole_piece(state_key(name, key), tensor))
    with replacing(folder) as fresh:
        index = CheckpointIndex.joined([dcp.write_part(fresh, 0, pieces)], tied)
        dcp.write_metadata(fresh, index)
        write_state(fresh, checkpoint.trainer, index.write(fresh), data=None)
        swap(fresh, folder, files_of(folder).__contains__)


def read(folder: Path) -> Checkpoint:
    """Read a whole checkpoint, independent of the plan that wrote it.

    Raises:
        CheckpointError: there is no complete checkpoint, another version wrote it, or it is damaged.
    """
    from mmcompile.runtime.checkpoint import dcp

    stored = Stored.find(folder)
    names = tuple(stored.index.weights)
    wanted = wanted_by({name: Holding(whole=name) for name in names}, stored.index, weights=names, states=names)
    for piece in wanted.values():
        dcp.read_piece(stored.place, stored.index, piece)
    tensors = {path: piece.tensor() for path, piece in wanted.items()}
    return Checkpoint(trainer=stored.trainer, weights=under("value/", tensors), optimizer=under("state/", tensors))
