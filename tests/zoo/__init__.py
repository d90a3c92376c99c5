"""Tiny random models of the multimodal families of transformers and two of our own, with batches for each.

The only code about particular models: test data for a compiler that has none.
"""

from __future__ import annotations

from zoo import (
    audio,
    encoder_decoder,
    hand_written,
    llava_like,
    many_modalities,
    mixture_of_experts,
    packed_vision,
    pairs,
    qwen_like,
    readers,
    speech,
    tiled,
    unusual_towers,
    video,
)
from zoo.family import Batch, Draw, Family, Size, pad_last_row
from zoo.samples import PARITY_FAMILIES, samples

_TRANSFORMERS = (
    llava_like,
    qwen_like,
    packed_vision,
    tiled,
    mixture_of_experts,
    video,
    unusual_towers,
    encoder_decoder,
    audio,
    many_modalities,
    pairs,
    readers,
    speech,
)

FAMILIES: dict[str, Family] = {family.name: family for module in _TRANSFORMERS for family in module.FAMILIES}
"""Multimodal families of transformers, by name."""

HAND_WRITTEN: dict[str, Family] = {family.name: family for family in hand_written.FAMILIES}
"""Plain modules, by name."""

ALL: dict[str, Family] = {**FAMILIES, **HAND_WRITTEN}

__all__ = [
    "ALL",
    "FAMILIES",
    "HAND_WRITTEN",
    "PARITY_FAMILIES",
    "Batch",
    "Draw",
    "Family",
    "Size",
    "pad_last_row",
    "samples",
]
