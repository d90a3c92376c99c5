"""Sizes of samples: lengths of their texts, images and audio clips, and the rows that components make of them.

Lengths are read by one set of rules, from the batch a model was captured with and from what a processor returns for one
sample. All samples of a step are sized in a few array operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmcompile.data.sample import SampleShape
from mmcompile.planner.plan.geometry import MEDIA_WORDS, Array, Geometry, Media, MediaInput

_GRIDS = ("grid_thw", "grid_hws")
_TOKENS = ("input_ids", "decoder_input_ids", "labels")
"""Names of inputs that hold the sequences of a text component, most reliable first."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleRows:
    """Rows that each of several samples (or microbatches) brings to one component, as arrays [samples]."""

    rows: Array
    squares: Array
    """Sum over a sample's sequences of their squared lengths, [samples]."""

    def __getitem__(self, chosen: np.ndarray) -> SampleRows:
        return SampleRows(rows=self.rows[chosen], squares=self.squares[chosen])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lengths:
    """Lengths of images, audio clips or texts (called items), of which a sample has any number."""

    values: Array
    """Length of each item: patches, frames or tokens, [items]."""
    owner: NDArray[np.int64]
    """Index of the sample that an item belongs to, [items]."""
    num_samples: int

    @classmethod
    def of(cls, each: Sequence[Sequence[float]]) -> Lengths:
        """Return the lengths of samples' items, given as one sequence of lengths for each sample."""
        return cls(
            values=np.array([length for own in each for length in own], dtype=np.float64),
            owner=np.repeat(np.arange(len(each)), [len(own) for own in each]),
            num_samples=len(each),
        )

    def of_samples(self, kept: NDArray[np.bool_]) -> Lengths:
        """Return the lengths of the items of the samples where `kept` is True, bool [samples]."""
        things = kept[self.owner]
        return Lengths(values=self.values[things], owner=self.owner[things], num_samples=self.num_samples)

    def sums(self, values: Array) -> Array:
        """Return the sum over each sample's items, [samples], of values [items]."""
        return np.bincount(self.owner, weights=values, minlength=self.num_samples).astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleSizes:
    """Lengths of all texts, images and audio clips of several samples."""

    texts: Lengths
    images: Lengths
    audios: Lengths
    interleaved: bool
    """True if texts are whole sequences that include the positions of images and audio clips."""
    inputs: tuple[frozenset[str], ...] = ()
    """Names of the inputs that each sample has; () where they are not known."""

    @classmethod
    def of_shapes(cls, shapes: Sequence[SampleShape]) -> SampleSizes:
        """Return the sizes of samples that are given as shapes, without the positions of media in texts."""
        return cls(
            texts=Lengths.of([(float(shape.text_tokens),) for shape in shapes]),
            images=Lengths.of([shape.images for shape in shapes]),
            audios=Lengths.of([shape.audios for shape in shapes]),
            interleaved=False,
        )

    @classmethod
    def of_samples(cls, samples: Sequence[Mapping[str, object]], geometries: Iterable[Geometry]) -> SampleSizes:
        """Return the sizes of samples given as a processor's output.

        Args:
            samples: inputs by name of each sample.
            geometries: geometries of all components; they name the inputs that hold images and audio clips.
        """
        known = tuple(geometries)
        images, audios = (
            tuple(dict.fromkeys(own for each in known if each.modality == modality for own in each.media))
            for modality in MEDIA_WORDS
        )
        return cls(
            texts=Lengths.of([text_lengths(sample) for sample in samples]),
            images=Lengths.of([media_lengths(sample, "image", images) for sample in samples]),
            audios=Lengths.of([media_lengths(sample, "audio", audios) for sample in samples]),
            interleaved=True,
            inputs=tuple(frozenset(sample) for sample in samples) if any(each.sources for each in known) else (),
        )

    def rows(self, geometry: Geometry) -> SampleRows:
        """Return the rows and squared lengths that each sample brings to the component that `geometry` describes."""
        lengths = self._lengths(geometry)
        return SampleRows(
            rows=lengths.sums(lengths.values) * geometry.rows_per_unit,
            squares=lengths.sums(geometry.squares(lengths.values)),
        )

    def _lengths(self, geometry: Geometry) -> Lengths:
        """Return the lengths of images (patches), clips (frames) or texts (tokens) that a component reads; else 1 a sample."""
        match geometry.modality:
            case "image" | "audio":
                lengths = self.images if geometry.modality == "image" else self.audios
                return lengths.of_samples(self._reads(geometry)) if geometry.sources and self.inputs else lengths
            case "text":
                return self.texts if self.interleaved else self._sequences(geometry)
            case "sample":
                return self._each(geometry)

    def _reads(self, geometry: Geometry) -> NDArray[np.bool_]:
        return np.array([not own.isdisjoint(geometry.sources) for own in self.inputs], dtype=np.bool_)

    def _sequences(self, geometry: Geometry) -> Lengths:
        """Return text lengths with the positions of images and audio clips added, for samples with one text each."""
        taken = geometry.tokens_per_patch * self.images.sums(self.images.values)
        taken = taken + geometry.tokens_per_frame * self.audios.sums(self.audios.values)
        texts = self.texts
        return Lengths(values=texts.values + taken, owner=texts.owner, num_samples=texts.num_samples)

    def _each(self, geometry: Geometry) -> Lengths:
        present = np.ones(self.texts.num_samples, dtype=np.bool_)
        media = [
            own
            for own, words in MEDIA_WORDS.items()
            if any(word in name for name in geometry.sources for word in words)
        ]
        if geometry.sources and self.inputs:
            present = self._reads(geometry)
        elif media:
            each = [self.images if own == "image" else self.audios for own in media]
            present = np.any([own.sums(own.values) > 0 for own in each], axis=0)
        owner = np.flatnonzero(present)
        return Lengths(values=np.ones(len(owner)), owner=owner, num_samples=len(present))


def token_ids(batch: Mapping[str, object]) -> Tensor | None:
    """Return the token ids of a batch, [sequences, length]; None if the batch has no token ids."""
    for name in _TOKENS:
        ids = batch.get(name)
        if isinstance(ids, Tensor) and not ids.is_floating_point():
            return ids if ids.dim() == 2 else ids[None]
    return None


def token_mask(batch: Mapping[str, object], ids: Tensor) -> Tensor | None:
    """Return the padding mask of token ids, nonzero where a token is real, [sequences, length]; None if the batch has no mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.numel() == ids.numel() and mask.dim() <= 2:
        return mask if mask.shape == ids.shape else mask.reshape(ids.shape)
    return None


def text_lengths(sample: Mapping[str, object]) -> list[float]:
    """Return the number of tokens of every sequence of a sample, without padding."""
    ids = token_ids(sample)
    if ids is None:
        return []
    mask = token_mask(sample, ids)
    if mask is None:
        return [float(ids.shape[1])] * len(ids)
    return [float(count) for count in _marks(mask)]


def _marks(mask: Tensor) -> list[int]:
    # numpy counts so few numbers several times as fast as torch, and a whole array faster than its rows.
    marks = (mask if mask.is_cpu and mask.dtype in (torch.int64, torch.bool) else mask.bool().cpu()).numpy()
    return [int(np.count_nonzero(row)) for row in ((marks,) if len(marks) == 1 else marks)]


def media_lengths(batch: Mapping[str, object], modality: Media, inputs: Sequence[MediaInput]) -> list[float]:
    """Return the patches of every image, or the frames of every audio clip, in a batch or sample.

    Args:
        inputs: float inputs that hold them; ignored where a grid input (`grid_of`) gives their sizes.
    """
    sizes: list[float] = []
    for name, value in batch.items():
        if modality in grid_of(name) and isinstance(value, Tensor):
            sizes += [float(prod(row)) for row in value.tolist()]
    if sizes:
        return sizes
    for own in inputs:
        value = batch.get(own.name)
        if isinstance(value, Tensor):
            sizes += _item_lengths(own, value, batch.get(own.mask))
    return sizes


def _item_lengths(own: MediaInput, value: Tensor, mask: object = None) -> list[float]:
    """Return the patches of every image, or the frames of every audio clip, in a float input `value`, which `own` describes."""
    if own.mask and isinstance(mask, Tensor):
        return [own.length * (count / own.elements) for count in _marks(mask)]
    shape = tuple(value.shape)
    split = len(shape) - own.item_dims
    count, item = prod(shape[:split]), shape[split:]
    if all(own.patch):
        height, width = (size // step for size, step in zip(item[-2:], own.patch, strict=True))
        return [float(height * width)] * count
    return [own.length * (prod(item) / own.elements)] * count


@cache
def grid_of(name: str) -> tuple[Media, ...]:
    """Return the modalities whose sizes an input such as `image_grid_thw` holds, by its name; () for an input that is no grid."""
    if not name.endswith(_GRIDS):
        return ()
    return tuple(modality for modality, words in MEDIA_WORDS.items() if any(word in name for word in words))
