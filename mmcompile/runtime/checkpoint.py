"""Checkpoints: a folder that loads with `from_pretrained`, plus what training needs to go on. Replaced as a whole.

config.json, model*.safetensors     the model, as its own `save_pretrained` writes it; for other modules one
                                    model.safetensors with all names
trainer.safetensors                 `weight/<name>` of trained parameters, `state/<key>/<name>` of the optimizer
trainer.json                        `TrainerState`
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmcompile.errors import CheckpointError
from mmcompile.runtime.optimizer import OptimizerSpec
from mmcompile.runtime.wire import under

CHECKPOINT_VERSION = 1
_STATE = "trainer.json"
_TENSORS = "trainer.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """What is small: counters and the optimizer's settings."""

    step: int
    optimizer: OptimizerSpec
    hyper: dict[str, Any]
    seed: int
    cursor: str | None = None
    """Of the data, for a run that reads it by itself."""
    version: int = CHECKPOINT_VERSION
    files: tuple[str, ...] = ()
    """Everything this checkpoint wrote; other files in the folder are the user's and are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint in memory, tensors on the CPU."""

    trainer: TrainerState
    weights: Mapping[str, Tensor]
    """Trained parameters by original name."""
    optimizer: Mapping[str, Tensor]
    """`<key>/<name>`."""


class _Pretrained(Protocol):
    def save_pretrained(self, save_directory: Path, *, state_dict: Mapping[str, Tensor]) -> object: ...


def write(folder: Path, checkpoint: Checkpoint, model: nn.Module | None, state_dict: Mapping[str, Tensor]) -> None:
    """Write a checkpoint beside the old one, then put it in its place.

    The old one stays whole until the new one is on the disk. Between two renames the old one is at `<folder>.previous`,
    where `read` finds it.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written. The old checkpoint is untouched.
    """
    target = folder.expanduser().resolve()
    fresh = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Only one process writes to a folder at a time: others' are left over from processes that were killed.
        for left in target.parent.glob(f"{target.name}.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir()
        _fill(fresh, checkpoint, model, state_dict)
        _keep_foreign(target, fresh)
        _swap(fresh, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write a checkpoint to {folder}: {error}; the one saved before, if any, is untouched"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def read(folder: Path) -> Checkpoint:
    """Read what `write` wrote.

    Raises:
        CheckpointError: there is no complete checkpoint, or another version wrote it.
    """
    place = _place(folder)
    if place is None:
        raise CheckpointError(f"no checkpoint at {folder}: wanted a folder with {_STATE}, as engine.save() writes it")
    trainer = _trainer(place)
    try:
        tensors = load_file(place / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise _damaged(place, error) from error
    return Checkpoint(trainer=trainer, weights=under("weight/", tensors), optimizer=under("state/", tensors))


def saved(folder: Path) -> TrainerState | None:
    """What a checkpoint says of itself, without its tensors; None if there is none.

    Raises:
        CheckpointError: as `read`.
    """
    place = _place(folder)
    return None if place is None else _trainer(place)


def _place(folder: Path) -> Path | None:
    """Where the last whole checkpoint is."""
    target = folder.expanduser().resolve()
    return next((p for p in (target, _previous(target)) if (p / _STATE).is_file()), None)


def _trainer(place: Path) -> TrainerState:
    try:
        raw = (place / _STATE).read_bytes()
        version = msgspec.json.decode(raw, type=_Version).version
        if version != CHECKPOINT_VERSION:
            raise CheckpointError(
                f"{place / _STATE} has version {version}; this mmcompile reads version {CHECKPOINT_VERSION}"
            )
        return msgspec.json.decode(raw, type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise _damaged(place, error) from error


def _damaged(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the checkpoint at {place} is damaged: {error}; load an older one")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    version: int


def _fill(folder: Path, checkpoint: Checkpoint, model: nn.Module | None, state_dict: Mapping[str, Tensor]) -> None:
    if _is_pretrained(model):
        model.save_pretrained(folder, state_dict=dict(state_dict))
    else:
        # Tied names are written once each, so that the file loads strictly into any module.
        save_file(
            {name: tensor.detach().cpu().clone() for name, tensor in state_dict.items()}, folder / "model.safetensors"
        )
    tensors = {f"weight/{name}": tensor for name, tensor in checkpoint.weights.items()}
    tensors |= {f"state/{path}": tensor for path, tensor in checkpoint.optimizer.items()}
    save_file({path: tensor.contiguous() for path, tensor in tensors.items()}, folder / _TENSORS)
    written = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    trainer = replace(checkpoint.trainer, files=(*written, _STATE))
    (folder / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(trainer)))
    for path in folder.rglob("*"):
        _sync(path)


def _keep_foreign(old: Path, new: Path) -> None:
    """Link files of the old folder that no checkpoint wrote (a processor, a README) into the new one."""
    if not old.is_dir():
        return
    ours = _files_of(old)
    for path in old.rglob("*"):
        name = path.relative_to(old)
        if path.is_file() and name.as_posix() not in ours and not (new / name).exists():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, new / name)


def _files_of(folder: Path) -> frozenset[str]:
    """What the checkpoint in a folder wrote; nothing if it holds none."""
    state = folder / _STATE
    if not state.is_file():
        return frozenset()
    try:
        return frozenset(msgspec.json.decode(state.read_bytes(), type=TrainerState).files)
    except msgspec.DecodeError:
        return frozenset()


def _swap(fresh: Path, target: Path) -> None:
    previous = _previous(target)
    if target.exists():
        # A left-over from an interruption: `target` is whole, so it is not needed.
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    fresh.rename(target)
    _sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(target: Path) -> Path:
    return target.with_name(f"{target.name}.previous")


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _is_pretrained(model: nn.Module | None) -> TypeGuard[_Pretrained]:
    """True for transformers models. One exists only if transformers was imported, so we need not import it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
