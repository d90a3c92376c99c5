"""Merge of features into the text: at placeholder tokens, before the text, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from mmcompile.composition.encoder import Features
from mmcompile.data.collate import IGNORED_LABEL
from mmcompile.errors import BatchError, ConfigError

MergeFunction: TypeAlias = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
"""(embeddings [B, S, hidden], features by encoder, input_ids [B, S]) -> embeddings of the same shape."""
Merge: TypeAlias = Literal["placeholder", "prepend"] | MergeFunction
KINDS = ("placeholder", "prepend")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextInputs:
    """Arguments of the language model that have one value per token."""

    embeddings: Tensor
    """Token embeddings, [B, S, hidden]."""
    attention_mask: Tensor | None
    """Mask of real tokens, [B, S], 0 at padding; None if all tokens are real."""
    position_ids: Tensor | None
    """Positions [B, S]; None for the model's default positions."""
    labels: Tensor | None
    """Labels, [B, S], -100 for tokens without loss; None without labels."""


def text_ids(input_ids: Tensor, placeholders: Mapping[str, int]) -> Tensor:
    """Return `input_ids` with 0 for placeholders, whose ids may exceed the embedding table; features replace their embeddings."""
    return input_ids.masked_fill(_is_placeholder(input_ids, placeholders), 0)


def _is_placeholder(input_ids: Tensor, placeholders: Mapping[str, int]) -> Tensor:
    found = torch.zeros_like(input_ids, dtype=torch.bool)
    for token in placeholders.values():
        found = found | (input_ids == token)
    return found


def at_placeholders(
    text: TextInputs, features: Mapping[str, Features], input_ids: Tensor, placeholders: Mapping[str, int]
) -> TextInputs:
    """Replace the embeddings of placeholder tokens by features, in order. Placeholders carry no loss.

    Raises:
        BatchError: the number of placeholders differs from that of feature rows.
    """
    embeddings = text.embeddings
    for name, token in placeholders.items():
        where = input_ids == token
        rows = features[name].rows() if name in features else None
        count = 0 if rows is None else rows.shape[0]
        # One yes or no, so that a graph captured for a varying number of images need not fix it.
        if not bool(where.sum() == count):
            raise BatchError(_misfit(name, token, int(where.sum()), count))
        if rows is not None:
            mask = where.unsqueeze(-1).expand_as(embeddings)
            embeddings = embeddings.masked_scatter(mask, rows.to(embeddings.dtype))
    labels = text.labels
    if labels is not None:
        labels = labels.masked_fill(_is_placeholder(input_ids, placeholders), IGNORED_LABEL)
    return replace(text, embeddings=embeddings, labels=labels)


def _misfit(name: str, token: int, placeholders: int, rows: int) -> str:
    if not rows:
        return (
            f"input_ids hold {placeholders} placeholders of {name!r} (token {token}) but the batch has no input for it; add what "
            "its processor returns, or remove the placeholders"
        )
    return (
        f"input_ids hold {placeholders} placeholders of {name!r} (token {token}), but its features are {rows} tokens; wanted one "
        "placeholder a token: ComposedProcessor inserts them, or ask model.num_tokens"
    )


def prepend(text: TextInputs, features: Mapping[str, Features]) -> TextInputs:
    """Put the features of all encoders, in order of encoders, before the text; labels, mask and positions are extended.

    Every sample of a batch must have the same number of images or audio clips, because shapes do not show which image belongs to
    which sample.

    Raises:
        BatchError: the number of images is no multiple of the number of samples, or features have no dim of images.
    """
    samples, length, hidden = text.embeddings.shape
    parts: list[Tensor] = []
    masks: list[Tensor] = []
    for name, found in features.items():
        if found.packed:
            raise BatchError(
                f"features of {name!r} are {list(found.values.shape)}, images end to end, so nothing says which tokens belong to "
                'which sample; use merge="placeholder"'
            )
        if found.values.shape[0] % samples:
            raise BatchError(
                f'merge="prepend" needs equally many inputs of {name!r} in every sample; got {found.values.shape[0]} for '
                f"{samples} samples"
            )
        values = found.values.reshape(samples, -1, hidden).to(text.embeddings.dtype)
        parts.append(values)
        # From sizes alone, not `ones_like` features: capture must answer models that ask whether a mask is all ones.
        ones = torch.ones(values.shape[:2], dtype=torch.long, device=values.device)
        masks.append(ones if found.valid is None else found.valid.long().reshape(samples, -1))
    if not parts:
        return text
    count = sum(part.shape[1] for part in parts)
    mask, positions, labels = text.attention_mask, text.position_ids, text.labels
    if mask is None and any(found.valid is not None for found in features.values()):
        mask = torch.ones((samples, length), dtype=torch.long, device=text.embeddings.device)
    if mask is not None:
        mask = torch.cat([*(part.to(mask.dtype) for part in masks), mask], dim=1)
    if positions is not None:
        own = torch.arange(count, dtype=positions.dtype, device=positions.device)
        positions = torch.cat([own.expand(samples, -1), positions + count], dim=1)
    if labels is not None:
        labels = torch.cat([labels.new_full((samples, count), IGNORED_LABEL), labels], dim=1)
    return TextInputs(
        embeddings=torch.cat([*parts, text.embeddings], dim=1),
        attention_mask=mask,
        position_ids=positions,
        labels=labels,
    )


def by_function(
    merge: MergeFunction, text: TextInputs, features: Mapping[str, Features], input_ids: Tensor
) -> TextInputs:
    """Merge features into the text by the user's function.

    Raises ConfigError if its result does not have the embeddings' shape.
    """
    # A user's function may return anything.
    merged = cast(object, merge(text.embeddings, {name: found.values for name, found in features.items()}, input_ids))
    if not isinstance(merged, Tensor) or merged.shape != text.embeddings.shape:
        got = list(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
        raise ConfigError(
            f"the merge function returned {got}; wanted embeddings {list(text.embeddings.shape)}, as given"
        )
    return replace(text, embeddings=merged)
