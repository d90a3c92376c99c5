"""Seeded multimodal masks at benchmark sizes, one row each, for the attention and context-parallel benchmarks.

    causal      one text document
    EP          one block of encoder output before the text of one document (encoder output prepended)
    EE          one document of text and images in turn; an image sees only itself (encoder output embedded)
    EE-Gemma    the same document; an image also sees all that comes before it
    MP          documents like those of EE, packed
    MP-Gemma    documents like those of EE-Gemma, packed

Visible share of all pairs at 32,768 tokens, mean of seeds 0-9, counted by `visible_pairs`: causal 50.0 %, EP 50.2 %, EE 13.0 %,
EE-Gemma 51.7 %, MP 5.9 %, MP-Gemma 15.7 %.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mmcompile.kernels.bitfield_attention.masks.words import pack

MASKS = ("causal", "EP", "EE", "EE-Gemma", "MP", "MP-Gemma")
"""Names `benchmark_mask` knows."""

_IMAGE_TOKENS = (256, 576, 1024, 2048)
_TEXT_TOKENS = (16, 440)
_DOCUMENT_TOKENS = (1024, 24576)
_PREFIX_SHARE = 16
_TEXT, _IMAGE = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Consecutive tokens of one word."""

    length: int
    document: int
    island: int
    causal: bool
    modalities: int


def benchmark_mask(name: str, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and positions of one row of a mask.

    Args:
        name: one of `MASKS`.
        tokens: length of the row; no token is padding.
        seed: of the lengths of texts, images and documents.

    Returns:
        [1, tokens] int64 words and [1, tokens] int32 positions, on the CPU.

    Raises:
        ValueError: the name is none of `MASKS`.
    """
    if name not in MASKS:
        raise ValueError(f"no benchmark mask is called {name!r}; choose one of {', '.join(MASKS)}")
    runs = list(_runs(name, tokens, random.Random(seed)))
    lengths = torch.tensor([run.length for run in runs])
    words = pack(
        causal=torch.tensor([run.causal for run in runs]),
        document=torch.tensor([run.document for run in runs]),
        instance=torch.tensor([run.island for run in runs]),
        modalities=torch.tensor([run.modalities for run in runs]),
    )
    return words.repeat_interleave(lengths)[None], torch.arange(tokens, dtype=torch.int32)[None]


def _runs(name: str, tokens: int, rng: random.Random) -> Iterator[_Run]:
    if name == "causal":
        yield _text(tokens, 1)
    elif name == "EP":
        prefix = tokens // _PREFIX_SHARE
        yield _Run(length=prefix, document=1, island=1, causal=False, modalities=_IMAGE)
        yield _text(tokens - prefix, 1)
    else:
        gemma = name.endswith("Gemma")
        for index, length in enumerate(_documents(tokens, rng) if name.startswith("MP") else [tokens]):
            yield from _interleaved(length, index + 1, gemma, rng)


def _documents(tokens: int, rng: random.Random) -> Iterator[int]:
    """Log-uniform lengths that add up to `tokens`."""
    shortest, longest = (math.log(x) for x in _DOCUMENT_TOKENS)
    while tokens:
        length = min(tokens, round(math.exp(rng.uniform(shortest, longest))))
        yield length
        tokens -= length


def _interleaved(tokens: int, document: int, gemma: bool, rng: random.Random) -> Iterator[_Run]:
    """Text and images in turn; about four fifths of the tokens are of images."""
    island = 0
    while tokens:
        length = min(tokens, rng.randint(*_TEXT_TOKENS))
        yield _text(length, document)
        tokens -= length
        length = min(tokens, rng.choice(_IMAGE_TOKENS))
        if length:
            island += 1
            modalities = _TEXT | _IMAGE if gemma else _IMAGE
            yield _Run(length=length, document=document, island=island, causal=gemma, modalities=modalities)
            tokens -= length


def _text(length: int, document: int) -> _Run:
    return _Run(length=length, document=document, island=0, causal=True, modalities=_TEXT | _IMAGE)
