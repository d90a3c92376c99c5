"""Real pictures of free sizes, clips of free length, and free text, drawn from a seeded generator."""

from __future__ import annotations

import functools
import random
from importlib import resources

import matplotlib
import numpy as np
from PIL import Image

from zoo.streams.tokenizer import sentences

RATE = 16_000
"""Samples per second of all clips."""
_SMALLEST, _LARGEST = 40, 220
"""Sides of pictures, pixels."""
_SHORTEST_S, _LONGEST_S = 0.1, 0.95


def picture(rng: random.Random) -> Image.Image:
    """Return a crop of a photograph, 40 to 220 pixels wide and high."""
    photograph = rng.choice(_photographs())
    width, height = (rng.randint(_SMALLEST, _LARGEST) for _ in range(2))
    left, top = rng.randint(0, photograph.width - width), rng.randint(0, photograph.height - height)
    return photograph.crop((left, top, left + width, top + height))


def clip(rng: random.Random) -> np.ndarray:
    """Return a mono sound of 0.1 to 0.95 s, float32 [samples]: three tones that rise or fall, and noise."""
    seconds = rng.uniform(_SHORTEST_S, _LONGEST_S)
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(time))
    tones = (
        np.sin(2 * np.pi * (rng.uniform(80, 1000) + rng.uniform(-400, 2000) * time / seconds) * time) for _ in range(3)
    )
    return (0.2 * sum(tones, 0.05 * noise)).astype(np.float32)


def text(rng: random.Random) -> str:
    """Return a sentence, or two."""
    return " ".join(rng.choice(sentences()) for _ in range(rng.randint(1, 2)))


@functools.cache
def _photographs() -> tuple[Image.Image, ...]:
    """Return the photographs that scikit-learn and matplotlib contain."""
    images = resources.files("sklearn.datasets.images")
    samples = resources.files(matplotlib) / "mpl-data" / "sample_data"
    files = [images / "china.jpg", images / "flower.jpg", samples / "grace_hopper.jpg"]
    opened: list[Image.Image] = []
    for file in files:
        with file.open("rb") as stream:
            opened.append(Image.open(stream).convert("RGB"))
    return tuple(opened)
