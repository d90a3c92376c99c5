"""Export of a trained model to a folder that loads with `from_pretrained`, without any state of training."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Protocol, runtime_checkable

from safetensors.torch import save_file
from torch import Tensor, nn

from mmcompile.runtime.checkpoint.checkpoint_folder import replacing, swap

_MODEL_FILES = ("model*.safetensors", "model.safetensors.index.json")
"""File name patterns of weights. Old weight files are removed before an export, which may write fewer files."""


@runtime_checkable
class _SavesItself(Protocol):
    """Models with a method `save_pretrained`, e.g. those of transformers; peft models write only their adapters with it."""

    def save_pretrained(self, save_directory: Path, *, state_dict: Mapping[str, Tensor]) -> object: ...


def export(folder: Path, model: nn.Module | None, state_dict: Mapping[str, Tensor]) -> None:
    """Write the model by its own `save_pretrained`, or as a model.safetensors with all names if it has none.

    The model.safetensors loads strictly. Other files in the folder stay.

    Raises:
        CheckpointError: the files cannot be written. Earlier contents are untouched.
    """
    with replacing(folder) as fresh:
        if isinstance(model, _SavesItself):
            model.save_pretrained(fresh, state_dict=dict(state_dict))
        else:
            # Tied names are written once each.
            tensors = {name: tensor.detach().cpu().clone() for name, tensor in state_dict.items()}
            save_file(tensors, fresh / "model.safetensors")
        swap(fresh, folder, lambda path: any(fnmatch.fnmatch(PurePath(path).name, match) for match in _MODEL_FILES))
