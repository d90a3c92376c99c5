"""Checks and values of a batch before the graph. Missing media, and positions that the model would compute in Python."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmcompile.errors import BatchError
from mmcompile.ir.compat import positions_of_text

_MEDIA_INPUTS = {"image": ("pixel_values", "image"), "video": ("video",), "audio": ("audio", "features")}
"""Modality -> words in the names of its inputs, by transformers' conventions."""
_MEDIA_WORDS = ("image", "pixel", "video", "audio", "feature", "input_values", "spatial_shapes")


def is_media(name: str) -> bool:
    """Return True if an input of this name belongs to images, videos or audio clips; False if it belongs to tokens."""
    return any(word in name for word in _MEDIA_WORDS)


def completed(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch as the graph takes it: checked for missing media, with `position_ids` added.

    Raises:
        BatchError: the text has placeholders of a modality, and no input of that modality is there.
    """
    _check_media(model, batch)
    return with_positions(model, batch)


def _check_media(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise BatchError for placeholders without media: a model often trains on their embeddings without an error."""
    config, ids = getattr(model, "config", None), batch.get("input_ids")
    if config is None or not isinstance(ids, torch.Tensor):
        return
    given = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
    for modality, words in _MEDIA_INPUTS.items():
        names = (f"{modality}_token_id", f"{modality}_token_index")
        token = next((t for name in names if isinstance(t := getattr(config, name, None), int)), None)
        if token is None or any(word in name for name in given for word in words):
            continue
        count = int((ids == token).sum())
        if count:
            raise BatchError(
                f"input_ids hold {count} {modality} placeholders (token {token}) but the batch has no {modality} input; "
                f"got {', '.join(given)}; add what the processor returns for the {modality}s, or remove the placeholders"
            )


def with_positions(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with `position_ids`, if the model offers `get_rope_index` to compute them; else unchanged.

    Multimodal rotary positions depend on where images stand among the tokens: computed inside, every new text would be
    a new pattern; as an input, one graph serves all. Values are the model's own, so results do not change.
    """
    owners = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    owner: Any = next((own for own in owners if hasattr(own, "get_rope_index")), None)
    takes = inspect.signature(model.forward).parameters
    given = batch.get("position_ids") is not None or batch.get("input_ids") is None
    if owner is None or given or "position_ids" not in takes:
        return dict(batch)
    parameters = [name for name in inspect.signature(owner.get_rope_index).parameters if name not in ("args", "kwargs")]
    if not set(parameters) <= set(takes):  # the model first computes what it passes here: leave that to its own forward
        return dict(batch)
    arguments = {name: batch[name] for name in parameters if name in batch}
    with torch.no_grad():
        positions, _ = owner.get_rope_index(**arguments)
    return {**batch, "position_ids": positions}


def document_positions(model: nn.Module, sample: Mapping[str, Any]) -> torch.Tensor:
    """Return positions of the tokens of one conversation without padding, as the model needs them to separate documents.

    Args:
        model: model that computes the positions if it can (multimodal rotary positions depend on the places of images among the
            tokens).
        sample: inputs of that conversation, `input_ids` [1, S] among them.

    Returns:
        [1, S], counted from 0; or [4, 1, S] if the model has separate positions for images: positions counted from 0, then the
        three of the model.
    """
    ids = sample["input_ids"]
    found = positions_of_text(model, ids, {**sample, "attention_mask": torch.ones_like(ids)})
    return torch.arange(ids.shape[1])[None] if found is None else found
