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

MIXED_MEDIA = (1, 2, 0, 1, 1, 1, 0, 0)
"""Images or clips of eight samples: two in one of them, none in three. In pairs, the last pair has none at all."""

ALIGNED_MEDIA = (1, 2, 1, 1, 1, 1, 0, 0)
"""The same for models whose images have a sample dim: a pair has images in both samples or in none."""

_SHORTER = (0, 5)
"""Tokens by which even and odd samples are shorter than the longest, so that every pair has real padding."""


def samples(
    family: Family,
    count: int,
    *,
    seed: int,
    media: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Batch]:
    """Draw `count` conversations, each a batch of one with its own text length and number of media.

    Args:
        family: Whose conversations.
        count: How many.
        seed: Same seed, same conversations. Sizes do not depend on it.
        media: Images or clips of sample i, `media[i % len(media)]`; mixed by default.
        dtype: Of the float inputs.
    """
    wanted = media or (ALIGNED_MEDIA if family.aligned_media else MIXED_MEDIA)
    if 0 in wanted and not family.text_only:
        raise ValueError(f"{family.name} takes no sample without media")
    drawn: list[Batch] = []
    for index in range(count):
        number = wanted[index % len(wanted)]
        longest = family.second.length if number > family.first.media else family.first.length
        size = Size(samples=1, length=longest - _SHORTER[index % len(_SHORTER)], media=number)
        drawn.append(family.draw(size, seed=seed * 1000 + index, dtype=dtype))
    return drawn
