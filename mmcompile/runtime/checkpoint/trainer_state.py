"""`TrainerState`: how far training was when a checkpoint was written; and the search for a checkpoint in a folder.

trainer.json        `TrainerState`; it is written last, so a folder with it is whole
index.json          `CheckpointIndex`: where each tensor is
.metadata           the same for torch
__<rank>_0.distcp   tensors, as `torch.distributed.checkpoint` writes them
data.pt             position in the user's data, if that was saved
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from mmcompile.errors import CheckpointError
from mmcompile.runtime.checkpoint.checkpoint_folder import place_of
from mmcompile.runtime.checkpoint.index import CheckpointIndex, damaged, digest_of
from mmcompile.runtime.optim.optimizer import Hyper, OptimizerSpec

_CHECKPOINT_VERSION = 2
_STATE = "trainer.json"
_DATA = "data.pt"
_SAMPLED = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """Training state beside the tensors: counters, seed, data cursor, and the optimizer's settings."""

    step: int
    optimizer: OptimizerSpec
    hyper: Hyper
    seed: int
    num_samples: int = 0
    """Number of samples trained on so far, over all steps and replicas."""
    cursor: str | None = None
    """Cursor of the data as text, for a run that reads data itself; None otherwise."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """`fingerprint` of each frozen parameter, by name. The checkpoint has no frozen weights; the trained ones depend on them."""
    version: int = _CHECKPOINT_VERSION
    index: str = ""
    """Digest of the index file."""
    data: str | None = None
    """Digest of the saved state of the user's data; None if it was not saved."""
    files: tuple[str, ...] = ()
    """Paths of all files that this checkpoint wrote; other files in the folder are the user's and are kept."""
    digest: str = ""
    """Digest of this state, computed with this field set to ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Position of training in a checkpoint, from which the data resumes."""

    num_steps: int
    """Number of updates so far. If every batch was one step, the data resumes after this many batches."""
    num_samples: int
    """Number of samples trained on, over all steps and replicas."""
    data: Any
    """Saved state of the user's data; None if it was not saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A complete checkpoint on the disk: its state and index, without tensors."""

    folder: Path
    """Folder that was requested."""
    place: Path
    """Folder of the checkpoint: the requested one, or `<folder>.previous` after an interrupted save."""
    trainer: TrainerState
    index: CheckpointIndex

    @classmethod
    def find(cls, folder: Path) -> Stored:
        """Find the complete checkpoint in a folder.

        Raises:
            CheckpointError: there is no complete checkpoint, another version wrote it, or it is damaged.
        """
        place = place_of(folder, _STATE)
        if place is None:
            raise CheckpointError(
                f"no checkpoint at {folder}: wanted a folder with {_STATE}, as engine.save() writes it"
            )
        trainer = _read_state(place)
        return cls(folder=folder, place=place, trainer=trainer, index=CheckpointIndex.read(place, trainer.index))

    def data(self) -> Any:
        """Return the state of the user's data; None if it was not saved. Raises CheckpointError."""
        if self.trainer.data is None:
            return None
        try:
            found = (self.place / _DATA).read_bytes()
        except OSError as error:
            raise damaged(self.place, error) from error
        if digest_of(found) != self.trainer.data:
            raise damaged(self.place, f"{_DATA} is not as it was written")
        return _decoded(found)


def saved(folder: Path) -> TrainerState | None:
    """Return the training state of the checkpoint in a folder; None if there is no checkpoint.

    Raises:
        CheckpointError: another version wrote it, or it is damaged.
    """
    place = place_of(folder, _STATE)
    return None if place is None else _read_state(place)


def write_state(fresh: Path, trainer: TrainerState, index: str, data: bytes | None) -> None:
    """Write trainer.json, the last file of a checkpoint, and the user's data before it. Raises OSError.

    Args:
        index: digest of the index, which is already written.
        data: user's data from `encoded`; None to save no data.
    """
    if data is not None:
        (fresh / _DATA).write_bytes(data)
    written = (path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
    whole = replace(
        trainer, index=index, data=None if data is None else digest_of(data), files=(*sorted(written), _STATE)
    )
    whole = replace(whole, digest=_digest(whole))
    (fresh / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(whole)))


def _read_state(place: Path) -> TrainerState:
    """Return the training state stored in a folder. Raises CheckpointError if it is damaged or has another version."""
    try:
        raw = (place / _STATE).read_bytes()
        version = msgspec.json.decode(raw, type=_Header).version
        if version != _CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{place / _STATE} has version {version}; this mmcompile reads version {_CHECKPOINT_VERSION}"
            )
        trainer = msgspec.json.decode(raw, type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise damaged(place, error) from error
    if _digest(trainer) != trainer.digest:
        raise damaged(place, f"{_STATE} is not as it was written")
    return trainer


def fingerprint(tensor: Tensor) -> str:
    """Return a fingerprint of a tensor's dtype, shape and about a thousand elements spread over it.

    Takes microseconds for any size. Other weights (another model, another training of it) differ nearly everywhere, so a sample
    of elements distinguishes them.
    """
    flat = tensor.detach().reshape(-1)
    drawn = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().contiguous().view(torch.uint8)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{zlib.crc32(drawn.numpy().tobytes()):08x}"


def files_of(folder: Path) -> frozenset[str]:
    """Return the paths of the files that the checkpoint in a folder wrote; an empty set if there is no checkpoint."""
    place = place_of(folder, _STATE)
    try:
        return frozenset() if place is None else msgspec.json.decode((place / _STATE).read_bytes(), type=_Header).files
    except (OSError, msgspec.DecodeError):
        return frozenset()


def encoded(data: Any) -> bytes:
    """Encode the state of the user's data as bytes.

    Raises:
        CheckpointError: the state has more than plain values and tensors.
    """
    buffer = io.BytesIO()
    try:
        torch.save(data, buffer)
        _decoded(buffer.getvalue())
    except (CheckpointError, pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"the state of the data must be numbers, text, lists, dicts and tensors, got {type(data).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def _decoded(data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"what was saved of the data cannot be read: {error}") from error


def _digest(trainer: TrainerState) -> str:
    return digest_of(msgspec.json.encode(replace(trainer, digest="")))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """The fields of a stored `TrainerState` that all versions have."""

    version: int
    files: frozenset[str] = frozenset()
