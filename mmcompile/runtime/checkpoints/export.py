"""A folder that loads with `from_pretrained`: the model without anything of its training."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TypeGuard

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from mmcompile.runtime.checkpoints.folder import replacing, swap, unwritable

_MODEL_FILES = ("model*.safetensors", "model.safetensors.index.json")
"""A model with fewer files than the one before must not leave some of the other's."""


class _Pretrained(Protocol):
    def save_pretrained(self, save_directory: Path, *, state_dict: Mapping[str, Tensor]) -> object: ...


def export(folder: Path, model: nn.Module | None, state_dict: Mapping[str, Tensor]) -> None:
    """Write config.json and model*.safetensors as the model's own `save_pretrained` does; for other modules one
    model.safetensors with all names, which loads strictly. Other files in the folder stay.

    Raises:
        CheckpointError: it cannot be written. What was there before is untouched.
    """
    try:
        with replacing(folder) as fresh:
            if _is_pretrained(model):
                model.save_pretrained(fresh, state_dict=dict(state_dict))
            else:
                # Tied names are written once each.
                tensors = {name: tensor.detach().cpu().clone() for name, tensor in state_dict.items()}
                save_file(tensors, fresh / "model.safetensors")
            swap(fresh, folder, lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in _MODEL_FILES))
    except SafetensorError as error:
        raise unwritable(folder, error) from error


def _is_pretrained(model: nn.Module | None) -> TypeGuard[_Pretrained]:
    """True for transformers models. One exists only if transformers was imported, so we need not import it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)
