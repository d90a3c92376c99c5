"""`Packer`: samples into one row of tokens without padding, each a document that sees nothing of the others.

    input_ids     [1, T]   a a a b b c c c c          T = the tokens of all samples
    position_ids  [1, T]   0 1 2 0 1 0 1 2 3          or [4, 1, T], where images have positions of their own
    labels        [1, T]   - a a - b - c c c          no token predicts the first one of a document

There is no `attention_mask`: from positions that start over, the model's own code makes masks that keep documents apart.
`mmcompile.batching.isolation` checks that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmcompile.data.collate import IGNORED_LABEL, Sample, Value, join, with_batch_dim
from mmcompile.errors import BatchError, PlanError
from mmcompile.ir.inputs import document_positions

_MEDIA_WORDS = ("image", "pixel", "video", "audio", "feature", "input_values", "spatial_shapes")
"""Words in the names of inputs for media. These are not per-token values, even if their sizes are those of `input_ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packer:
    """Packer of a model's samples: joins them into one row of tokens. Made by `Packer.of`."""

    model: nn.Module = field(repr=False)
    pad: Mapping[str, int | float] = field(default_factory=dict)
    """Padding value, by input name, of media that differ in size; 0 by default."""

    @classmethod
    def of(cls, model: nn.Module, pad: Mapping[str, int | float] | None = None) -> Packer:
        """Return the packer of `model`.

        Raises:
            PlanError: the model takes no `input_ids` or no `position_ids`.
        """
        takes = inspect.signature(model.forward).parameters
        for name in ("input_ids", "position_ids"):
            if name not in takes:
                raise PlanError(
                    f"{type(model).__name__}.forward takes no {name}, so it cannot know where documents begin"
                )
        return cls(model=model, pad=dict(pad or {}))

    def pack(self, samples: Sequence[Sample], names: Sequence[int] | None = None) -> dict[str, Value]:
        """Join per-conversation samples into one batch of one row.

        Media are joined as in `collate`. The same tokens carry loss as in a batch that `collate` pads on the right.

        Args:
            samples: samples as for `collate`. `position_ids` of a sample are used unchanged.
            names: numbers of the samples in error messages; 0, 1, ... by default.

        Raises:
            BatchError: there are no samples; or one has no tokens, several rows, or labels on its padding; or `collate` raises
                it.
        """
        if not samples:
            raise BatchError("no samples to pack: got an empty list, wanted at least one sample")
        numbers = range(len(samples)) if names is None else names
        rows = [self._document(sample, number) for number, sample in zip(numbers, samples, strict=True)]
        dims = {key: dim for row in rows for key, dim in token_dims(row)}
        keys = dict.fromkeys(key for row in rows for key in row)
        batch: dict[str, Value] = {}
        for key in keys:
            items = [(number, row[key]) for number, row in zip(numbers, rows, strict=True) if key in row]
            if key in dims and len(items) < len(rows):
                raise BatchError(
                    f"{key!r} has a value for every token of sample {items[0][0]}, and some samples have none; "
                    "give it to all samples that are packed together, or to none"
                )
            batch[key] = _joined(key, items, dims[key]) if key in dims else join(key, items, self.pad.get(key, 0))
        return batch

    def _document(self, sample: Sample, number: int) -> dict[str, Value]:
        """Return the inputs of one sample without its padding tokens, and with `position_ids`."""
        row = with_batch_dim(sample)
        ids = row.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1 or ids.numel() == 0:
            got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else "none"
            raise BatchError(
                f"sample {number} cannot be packed: wanted input_ids [1, tokens] of one conversation, got {got}"
            )
        kept = _kept(row.pop("attention_mask", None), ids, number)
        for key, dim in token_dims(row):
            value = row[key]
            assert isinstance(value, Tensor)
            row[key] = value.index_select(dim, kept)
            if key == "labels":
                row[key] = self._labels(value, kept, number)
        if row.get("position_ids") is None:
            row["position_ids"] = document_positions(self.model, row)
        return row

    def _labels(self, labels: Tensor, kept: Tensor, number: int) -> Tensor:
        found = labels.index_select(1, kept)
        lost = int((labels != IGNORED_LABEL).sum() - (found != IGNORED_LABEL).sum())
        if lost:
            raise BatchError(
                f"sample {number} cannot be packed: {lost} labels of its padding (attention_mask 0) are not {IGNORED_LABEL}; "
                "padding is cut away, so give it no labels"
            )
        found[:, 0] = IGNORED_LABEL  # the token before it is of another document
        return found


def _kept(mask: Value, ids: Tensor, number: int) -> Tensor:
    if mask is None:
        return torch.arange(ids.shape[1])
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"sample {number} cannot be packed: its attention_mask is {got}, wanted 1 or 0 for each token, {tuple(ids.shape)}"
        )
    kept = (mask[0] != 0).nonzero()[:, 0]
    if not len(kept):
        raise BatchError(f"sample {number} cannot be packed: its attention_mask hides all of its {ids.shape[1]} tokens")
    return kept


def token_dims(row: Mapping[str, Value]) -> Iterator[tuple[str, int]]:
    """Yield (input name, dim of tokens) for each input that has one value per token."""
    ids = row["input_ids"]
    assert isinstance(ids, Tensor)
    for key, value in row.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        if key == "position_ids":
            yield key, value.dim() - 1
        elif value.shape[:2] == ids.shape and not any(word in key for word in _MEDIA_WORDS):
            yield key, 1


def _joined(key: str, items: Sequence[tuple[int, Value]], dim: int) -> Value:
    moved = [(number, value.movedim(dim, 0) if isinstance(value, Tensor) else value) for number, value in items]
    found = join(key, moved, 0)
    assert isinstance(found, Tensor)
    return found.movedim(0, dim).clone(memory_format=torch.contiguous_format)
