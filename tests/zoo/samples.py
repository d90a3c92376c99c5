"""Per-sample inputs: what a processor returns for one conversation each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.family import Batch, Family, Size

PARITY_FAMILIES = (
    "llava",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "mllama",
    "qwen2_audio",
    "qwen2_5_omni",
    "two_encoder_net",
)
"""Families trained across real processes and compared with one process."""

MIXED_MEDIA = (1, 2, 0, 1, 1, 0, 0, 1)
"""Images or clips of eight samples: two in one of them, none in three; in pairs, one microbatch has none at all."""


def samples(
    family: Family,
    count: int,
    *,
    seed: int,
    media: Sequence[int] = MIXED_MEDIA,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """Draw `count` conversations, each a batch of one with its own text length and number of media.

    Args:
        family: Whose conversations.
        count: How many.
        seed: Same seed, same conversations.
        media: Images or clips of sample i, `media[i % len(media)]`.
        dtype: Of the float inputs.
    """
    if 0 in media and not family.text_only:
        raise ValueError(f"{family.name} takes no sample without media")
    return [_sample(family, seed * 1000 + i, media[i % len(media)], dtype) for i in range(count)]


def _sample(family: Family, seed: int, media: int, dtype: torch.dtype) -> Batch:
    longest = (family.first, family.second)[media > family.first.media].length
    length = longest - torch.randint(0, 7, (), generator=torch.Generator().manual_seed(seed)).item()
    return family.draw(Size(samples=1, length=int(length), media=media), seed=seed, dtype=dtype)
