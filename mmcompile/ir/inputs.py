"""Preparation of a batch for a graph: nested inputs flattened, missing media refused, `position_ids` added as an input."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmcompile.errors import BatchError
from mmcompile.ir.compat import positions_of_text

_PLACEHOLDER = re.compile(r"(?P<modality>image|video|audio)_token_(id|index)")
"""Pattern of the config fields of transformers that hold the token id of a placeholder."""
_JOINT = "__"
"""Separator between the parts of a nested input's flat name, as in `targets__boxes__0`."""


class FlatBatch(dict[str, Any]):
    """A batch whose values are tensors and plain values, by name.

    Tensors inside dicts, lists, tuples and dataclasses have names of their own: `targets["boxes"][0]` is `targets__boxes__0`.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.nested: dict[str, tuple[pytree.TreeSpec, tuple[str, ...]]] = {}
        """Name of a nested value -> its structure, and the names of its leaves in order."""
        flat: dict[str, Any] = {}
        for name, value in batch.items():
            leaves, structure = _flattened(value)
            if isinstance(value, Tensor) or not any(isinstance(leaf, Tensor) for _, leaf in leaves):
                flat[name] = value
                continue
            names = tuple(_JOINT.join((name, *map(_part, path))) for path, _ in leaves)
            self.nested[name] = structure, names
            flat |= zip(names, (leaf for _, leaf in leaves), strict=True)
        super().__init__(flat)

    def arguments(self, other: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return a model's arguments, nested as the batch was; `other` has values, by flat name, to use in place of its own."""
        values = {**self, **other}
        inner = {name for _, names in self.nested.values() for name in names}
        found = {name: value for name, value in values.items() if name not in inner}
        for name, (structure, names) in self.nested.items():
            found[name] = pytree.tree_unflatten([values[leaf] for leaf in names], structure)
        return found


def _flattened(value: object) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
    for part in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            pytree.register_dataclass(type(part))
            return _flattened(value)
    return pytree.tree_flatten_with_path(value)


def _part(key: Any) -> str:
    # A step of a pytree path: a dict's key, a list's index, a field.
    found = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
    return re.sub(r"\W", "_", str(found))


def completed(model: nn.Module, batch: Mapping[str, Any]) -> FlatBatch:
    """Return the batch as the graph takes it: flat, checked for missing media, with `position_ids` added.

    Raises:
        BatchError: the text has placeholders of more modalities than the batch has media.
    """
    if isinstance(batch, FlatBatch):
        return batch
    _check_media(model, batch)
    return FlatBatch(with_positions(model, batch))


def _check_media(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Raise BatchError if a text has image, video or audio placeholder tokens, but the batch has too few image or audio tensors.

    Many models would train on the placeholders' own embeddings then, without an error. As many media are required as there are
    kinds of placeholders in the text: float inputs with two or more dims, or codes (integers that are no mask, at least as many
    as the text has of some placeholder, and not one for each token).
    """
    config, ids = getattr(_inner_model(model), "config", None), batch.get("input_ids")
    if config is None or not isinstance(ids, Tensor):
        return
    tokens: dict[int, str] = {}
    for name, token in vars(config).items():
        field = _PLACEHOLDER.fullmatch(name)
        if field is not None and isinstance(token, int):
            tokens.setdefault(token, field["modality"])
    counts = {token: int((ids == token).sum()) for token in tokens}
    found = [
        f"{counts[token]} {modality} placeholders (token {token})"
        for token, modality in tokens.items()
        if counts[token]
    ]
    given = [name for name, value in batch.items() if isinstance(value, Tensor)]
    fewest = min(filter(None, counts.values()), default=0)
    media = [name for name in given if batch[name].dim() > 1 and _is_media(batch[name], ids, fewest)]
    if len(found) > len(media):
        raise BatchError(
            f"input_ids hold {' and '.join(found)} but the batch has {f'only {media[0]}' if media else 'no media'}; got inputs "
            f"{', '.join(given)}; add what the processor returns for the media, or remove the placeholders"
        )


def _is_media(value: Tensor, ids: Tensor, fewest: int) -> bool:
    codes = value.numel() >= fewest and value.shape[:2] != ids.shape and bool((value > 1).any())
    return value.is_floating_point() or codes and value.dtype != torch.bool


def _inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside a peft wrapper, whose own forward takes any arguments; another model is returned as it is."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def with_positions(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with `position_ids`, if the model offers `get_rope_index` to compute them; else unchanged.

    Multimodal rotary positions depend on where images stand among the tokens. Computed inside the graph, they would tie it to one
    text; as an input, they let one graph serve all texts. The model itself computes them, so results do not change.
    """
    model = _inner_model(model)
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


def document_positions(model: nn.Module, sample: Mapping[str, Any]) -> Tensor:
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
