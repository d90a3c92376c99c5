"""Shapes of conversations as a Hugging Face processor returns them, written apart from the planner's `SampleSizes`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmcompile.data.sample import SampleShape


def shapes_of_samples(
    samples: Iterable[Mapping[str, Any]],
    *,
    placeholders: Collection[int] = (),
    patch: int | None = None,
    hop: int = 2,
    packed_sounds: bool = False,
) -> Iterator[SampleShape]:
    """Yield the shapes of conversations as a Hugging Face processor returns them, one each.

    Args:
        placeholders: token ids that stand for images and sounds in `input_ids`.
        patch: pixels of a patch's side; needed without grids.
        hop: steps of `input_features` to one frame of the encoder (2 for Whisper's).
        packed_sounds: whether the encoder computes only a clip's real frames, not padding.
    """
    for index, sample in enumerate(samples):
        name = str(sample.get("name", sample.get("id", f"sample {index}")))
        ids = _array(sample["input_ids"]).reshape(-1)
        seen = (
            _array(sample["attention_mask"]).reshape(-1) != 0 if "attention_mask" in sample else np.ones_like(ids) > 0
        )
        text = int((seen & ~np.isin(ids, list(placeholders))).sum())
        yield SampleShape(
            name=name,
            text_tokens=text,
            images=tuple(_patches(sample, patch)),
            audios=tuple(_frames(sample, hop, packed_sounds)),
        )


def _array(value: Any) -> np.ndarray:
    return np.asarray(value)


def _patches(sample: Mapping[str, Any], patch: int | None) -> list[int]:
    grids = [sample[key] for key in ("image_grid_thw", "video_grid_thw") if sample.get(key) is not None]
    if grids:
        return [int(math.prod(row)) for grid in grids for row in _array(grid).reshape(-1, 3).tolist()]
    sizes: list[int] = []
    for key in ("pixel_values", "pixel_values_videos"):
        shape: Sequence[int] = () if sample.get(key) is None else tuple(sample[key].shape)
        if not shape:
            continue
        assert len(shape) >= 4 and patch is not None, "no grid, and no pixels to count patches in"
        sizes += [(shape[-2] // patch) * (shape[-1] // patch)] * math.prod(shape[:-3])
    return sizes


def _frames(sample: Mapping[str, Any], hop: int, packed: bool) -> list[int]:
    if sample.get("input_features") is None:
        return []
    if packed and sample.get("feature_attention_mask") is not None:
        steps = _array(sample["feature_attention_mask"]).sum(axis=-1).reshape(-1).tolist()
    else:
        shape = tuple(sample["input_features"].shape)
        steps = [shape[-1]] * math.prod(shape[:-2])
    return [math.ceil(count / hop) for count in steps]
