"""Work of the models of the OrchMLLM and DFLOP evaluations, in closed form from their published sizes.

FLOPs of every matrix product and of attention, two a multiply-add; everything trains, so a step is three times the forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEP = 3
"""A step in forwards: the backward makes two products for each of the forward's."""
PATCH_FEATURES = 3 * 14 * 14
MEL_BINS = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A transformer encoder with a plain MLP in each layer."""

    layers: int
    width: int
    inner: int
    inputs: int
    """Multiply-adds, over the width, that make one row of its input."""

    def flops(self, rows: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Of the forward.

        Args:
            rows: patches or frames.
            squares: sum of squared lengths of the sequences that attend to themselves.
        """
        block = 2 * (4 * self.width**2 + 2 * self.width * self.inner)
        return rows * (self.layers * block + 2 * self.inputs * self.width) + 4 * self.width * self.layers * squares

    @property
    def parameters(self) -> int:
        return self.layers * (4 * self.width**2 + 2 * self.width * self.inner) + self.inputs * self.width


def vision(layers: int, width: int, inner: int) -> Encoder:
    return Encoder(layers=layers, width=width, inner=inner, inputs=PATCH_FEATURES)


def audio(layers: int, width: int, inner: int) -> Encoder:
    """Whisper's: two convolutions of three mel steps, the second with stride 2, make a row."""
    return Encoder(layers=layers, width=width, inner=inner, inputs=2 * 3 * MEL_BINS + 3 * width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A Llama or Qwen2 language model, head included."""

    layers: int
    width: int
    inner: int
    key_value_width: int
    vocabulary: int

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """Of the forward of packed sequences: half of the square of each is computed.

        Args:
            tokens: of each sequence.
        """
        block = 2 * (2 * self.width**2 + 2 * self.width * self.key_value_width + 3 * self.width * self.inner)
        attention = 2 * self.width * tokens
        return tokens * (self.layers * (block + attention) + 2 * self.width * self.vocabulary)

    @property
    def parameters(self) -> int:
        block = 2 * self.width**2 + 2 * self.width * self.key_value_width + 3 * self.width * self.inner
        return self.layers * block + 2 * self.width * self.vocabulary
