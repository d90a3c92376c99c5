"""`stream`: microbatches of a family, with 0 to 4 pictures or clips each, whose labels are the text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin

from zoo.family import IGNORE, Batch, cast_floats
from zoo.streams import qwen_like, sound, tiled
from zoo.streams.media import RATE, clip, picture, text
from zoo.streams.processor import FamilyProcessor
from zoo.streams.tokenizer import FIRST_SPECIAL

STREAM_FAMILIES: Mapping[str, FamilyProcessor] = {**qwen_like.ROWS, **tiled.ROWS, **sound.ROWS}
"""Family of the zoo -> its processor."""
_ROWS = 2
_MOST = 4
"""Most pictures and clips of a microbatch."""

Medium = Image.Image | np.ndarray


def stream(name: str, count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
    """Yield `count` microbatches of two conversations with 0 to 4 pictures or clips in them; of five, one has each number."""
    family = STREAM_FAMILIES[name]
    processor = family.build()
    for index in range(count):
        rng = random.Random(f"{name} {seed} {index}")
        numbers = random.Random(f"{name} {seed} {index // (_MOST + 1)}").sample(range(_MOST + 1), _MOST + 1)
        yield cast_floats(_batch(processor, family, _media(family, numbers[index % (_MOST + 1)], rng), rng), dtype)


def _media(family: FamilyProcessor, number: int, rng: random.Random) -> list[list[Medium]]:
    """Draw the pictures and clips of each row, `number` in all."""
    kinds = [draw for draw, placeholder in ((picture, family.picture), (clip, family.sound)) if placeholder]
    rows: list[list[Medium]] = [[] for _ in range(_ROWS)]
    for _ in range(number):
        rng.choice(rows).append(rng.choice(kinds)(rng))
    return rows


def _batch(
    processor: ProcessorMixin, family: FamilyProcessor, media: Sequence[Sequence[Medium]], rng: random.Random
) -> Batch:
    pictures = [[medium for medium in row if isinstance(medium, Image.Image)] for row in media]
    sounds = [medium for row in media for medium in row if isinstance(medium, np.ndarray)]
    given: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    given["text"] = [_conversation(family, row, rng) for row in media]
    if any(pictures):
        given["images"] = pictures if family.by_row else [medium for row in pictures for medium in row]
    if sounds:
        given |= {"audio": sounds, "sampling_rate": RATE}
    batch = dict(processor(**given))
    ids = batch["input_ids"]
    batch["labels"] = torch.where((ids < FIRST_SPECIAL) & (batch["attention_mask"] != 0), ids, IGNORE)
    return batch


def _conversation(family: FamilyProcessor, media: Sequence[Medium], rng: random.Random) -> str:
    """Return a question with its media at free places, and an answer."""
    parts = [text(rng)]
    for medium in media:
        parts.append(family.picture if isinstance(medium, Image.Image) else family.sound)
        if rng.random() < 0.5:
            parts.append(text(rng))
    return f"<s>user {' '.join(parts)} assistant {text(rng)}</s>"
