"""Collation of samples into a microbatch: concatenate on dim 0, pad the rest on the right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from mmcompile.errors import BatchError

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""

Value: TypeAlias = Tensor | bool | int | float | str | None | Mapping[str, Any] | list[Any] | tuple[Any, ...]
Sample: TypeAlias = Mapping[str, Value]
"""Inputs of one conversation by name, as a processor returns them."""

_PAD: Mapping[str, int | float] = {"labels": IGNORED_LABEL}


def collate(
    samples: Sequence[Sample], pad: Mapping[str, int | float] | None = None, names: Sequence[int] | None = None
) -> dict[str, Value]:
    """Join per-conversation samples into one batch.

    Tensors of one key are concatenated on dim 0; other dims that differ are padded on the right. A key that only some
    samples have is joined from those. If texts differ in length and no sample has an `attention_mask`, one is made.

    Args:
        samples: each as a Hugging Face processor returns it with `return_tensors="pt"`: `input_ids` [1, S],
            `attention_mask` [1, S], `labels` [1, S], `pixel_values` [images, ...] or [patches, D], `image_grid_thw`
            [images, 3], ... With `input_ids` [S], every 1-D tensor of that length gains the batch dim.
        pad: padding value by key. Defaults: labels -100, all others 0 (give `input_ids` the tokenizer's pad id).
        names: names of the samples in errors; by default 0, 1, ...

    Returns:
        The batch by key. A value that is no tensor is passed on, and must be equal in all samples that have it.

    Raises:
        BatchError: no samples, ranks or dtypes that differ within a key, or values that are neither tensors nor
            scalars.
    """
    if not samples:
        raise BatchError("no samples to collate: got an empty list, wanted at least one sample")
    fill = {**_PAD, **(pad or {})}
    rows = _with_masks([with_batch_dim(sample) for sample in samples])
    keys = dict.fromkeys(key for row in rows for key in row)
    return {
        key: join(
            key,
            [(i, row[key]) for i, row in zip(names or range(len(rows)), rows, strict=True) if key in row],
            fill.get(key, 0),
        )
        for key in keys
    }


def padded_alike(samples: Sequence[Sample], pad: Mapping[str, int | float] | None = None) -> list[dict[str, Value]]:
    """Return samples with media padded to the largest of all samples, so that a sample has the same sizes in any microbatch.

    A model that pads media to the largest of a batch (images of a conversation, tiles of an image) then makes the same
    number of rows for a sample in any microbatch. Dims that are as long as the text in every sample stay as they are.

    Args:
        pad: padding value by key, as for `collate`.
    """
    rows = [with_batch_dim(sample) for sample in samples]
    fill = {**_PAD, **(pad or {})}
    for key in dict.fromkeys(key for row in rows for key in row):
        having = [(row, value) for row in rows if isinstance(value := row.get(key), Tensor)]
        if len({value.dim() for _, value in having}) != 1:
            continue  # collate says what is wrong with them.
        lengths = [len(ids[0]) if isinstance(ids := row.get("input_ids"), Tensor) else None for row, _ in having]
        by_dim = list(zip(*(value.shape[1:] for _, value in having), strict=True))
        largest = [None if list(sizes) == lengths else max(sizes) for sizes in by_dim]
        for row, value in having:
            wanted = [size or own for size, own in zip(largest, value.shape[1:], strict=True)]
            row[key] = _padded(value, wanted, fill.get(key, 0))
    return rows


def check_labels(samples: Sequence[Sample]) -> None:
    """Raise BatchError if samples have integer `labels` and all are -100: no label of the step can be learned from."""
    labels = [sample["labels"] for sample in samples if isinstance(sample.get("labels"), Tensor)]
    tokens = [label for label in labels if isinstance(label, Tensor) and not label.is_floating_point()]
    if tokens and len(tokens) == len(labels) and all(bool((label == IGNORED_LABEL).all()) for label in tokens):
        raise BatchError(
            f"every label of the step is {IGNORED_LABEL} (ignored): {len(samples)} samples, 0 tokens to learn from; "
            "give at least one sample labels for the tokens of its answer"
        )


def with_batch_dim(sample: Sample) -> dict[str, Value]:
    """Return the sample with `input_ids` [1, S], and every 1-D tensor of that length likewise."""
    ids = sample.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        return dict(sample)
    length = len(ids)
    return {
        key: value[None] if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length else value
        for key, value in sample.items()
    }


def _with_masks(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
    texts = [ids for row in rows if isinstance(ids := row.get("input_ids"), Tensor) and ids.dim() == 2]
    masked = any("attention_mask" in row for row in rows)
    if not masked and len({text.shape[1] for text in texts}) < 2:
        return rows
    return [
        row if "attention_mask" in row or not isinstance(ids := row.get("input_ids"), Tensor)
        else {**row, "attention_mask": torch.ones_like(ids)}
        for row in rows
    ]  # fmt: skip


def join(key: str, items: Sequence[tuple[int, Value]], fill: int | float) -> Value:
    """Join one input of several samples: tensors are concatenated on dim 0, other dims padded with `fill` on the right.

    Nested inputs are joined leaf by leaf; lists in them are concatenated (one entry an image, as labels of detection have).

    Args:
        key: name of the input, for errors.
        items: (name of the sample in errors, value), at least one.

    Raises:
        BatchError: ranks, dtypes or nestings that differ, or plain values that are not equal.
    """
    first_index, first = items[0]
    if not isinstance(first, Tensor):
        return _nested(key, items, fill) if _holds_tensors(first) else _same(key, items)
    tensors: list[Tensor] = []
    for index, value in items:
        if not isinstance(value, Tensor):
            raise BatchError(
                f"{key!r} is a tensor in sample {first_index} and {type(value).__name__} in sample {index}"
            )
        if value.dim() != first.dim() or value.dim() == 0 or value.dtype != first.dtype:
            raise BatchError(
                f"{key!r} of sample {index} has shape {tuple(value.shape)} and dtype {value.dtype}; sample {first_index} "
                f"has {tuple(first.shape)} and {first.dtype}: wanted the same number of dims (at least 1) and dtype"
            )
        tensors.append(value)
    sizes = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, first.dim())]
    return torch.cat([_padded(tensor, sizes, fill) for tensor in tensors])


def _nested(key: str, items: Sequence[tuple[int, Any]], fill: int | float) -> Any:
    first_index, first = items[0]
    for index, value in items:
        if type(value) is not type(first):
            raise BatchError(
                f"{key!r} is a {type(first).__name__} in sample {first_index} and a {type(value).__name__} in sample {index}"
            )
    if isinstance(first, list):
        return [entry for _, value in items for entry in value]
    parts = [(index, _parts(value)) for index, value in items]
    for index, found in parts:
        if found.keys() != parts[0][1].keys():
            raise BatchError(
                f"{key!r} has {', '.join(map(str, parts[0][1]))} in sample {first_index} and "
                f"{', '.join(map(str, found))} in sample {index}: wanted the same"
            )
    joined = {part: join(f"{key}.{part}", [(i, found[part]) for i, found in parts], fill) for part in parts[0][1]}
    if isinstance(first, tuple):
        kind: Any = type(first)
        return tuple(joined.values()) if kind is tuple else kind(*joined.values())
    return joined if isinstance(first, Mapping) else dataclasses.replace(first, **joined)


def _parts(value: Any) -> dict[Any, Any]:
    """Entries of a mapping or sequence, and fields of a dataclass; empty for any other value."""
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if isinstance(value, list | tuple):
        return dict(enumerate(cast("Sequence[Any]", value)))
    if not dataclasses.is_dataclass(value):
        return {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or any(map(_holds_tensors, _parts(value).values()))


def _padded(tensor: Tensor, sizes: Sequence[int], fill: int | float) -> Tensor:
    missing = [size - have for size, have in zip(sizes, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor
    # functional.pad lists dims from the last, as (left, right) pairs.
    widths = [width for amount in reversed(missing) for width in (0, amount)]
    return functional.pad(tensor, widths, value=fill)


def _same(key: str, items: Sequence[tuple[int, Value]]) -> Value:
    first_index, first = items[0]
    for index, value in items:
        if not isinstance(value, bool | int | float | str | None):
            raise BatchError(
                f"{key!r} of sample {index} is a {type(value).__name__}, wanted a tensor; "
                'call the processor with return_tensors="pt"'
            )
        if value != first:
            raise BatchError(
                f"{key!r} is {first!r} in sample {first_index} and {value!r} in sample {index}: wanted equal"
            )
    return first
