"""`Geometry`: rows that one component makes of the texts, images and audio clips of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Media = Literal["image", "audio"]
Modality = Literal["image", "audio", "text", "sample"]
"""Source of a component's rows. `sample`: none of the other three; every sample brings equally many rows."""

MEDIA_WORDS: Mapping[Media, tuple[str, ...]] = {
    "image": ("pixel", "image", "video", "vision", "visual", "frame"),
    "audio": ("input_features", "input_values", "audio", "sound", "speech", "mel"),
}

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaInput:
    """Float input of images or audio clips, whose shape gives their lengths if no grid input (like `image_grid_thw`) does."""

    name: str
    item_dims: int
    """Number of trailing dims of one image or audio clip; the dims before them count the items."""
    patch: tuple[int, int] = (0, 0)
    """Height and width in pixels of a patch, in which an image's length is counted; (0, 0): `length` and `elements` apply."""
    length: float = 0.0
    """Number of patches or frames made of `elements` values of an item, or of `elements` nonzero steps of `mask` if given."""
    elements: int = 0
    mask: str = ""
    """Name of the mask input [items, time steps], nonzero at steps that the model reads; "" if it reads padded steps too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Rule that turns the sizes of a sample into the number of rows of one component.

    For images and audio clips: `rows_per_unit` times the patches or frames. For text: `rows_per_unit` times the length of the
    sample's sequence, `text_tokens + tokens_per_patch * patches + tokens_per_frame * frames`.
    """

    component: str
    modality: Modality
    rows_per_unit: float
    """Rows per patch, frame, token of the sequence, or sample: a class token beside 576 patches makes 577 / 576."""
    pairs_per_unit: float
    """Number of row pairs that attend to each other, divided by n^2, for a sequence of n patches, frames, tokens or samples."""
    window: float = 0.0
    """Rows of an attention window; 0 if a whole image, audio clip or sequence attends to itself.

    It is read from the captured batch, and stays 0 if all of the batch's images fit into a window.
    """
    tokens_per_patch: float = 0.0
    """Positions in the sequence that one patch takes; 0 where images are outside of the sequence (cross-attention)."""
    tokens_per_frame: float = 0.0
    pads: bool = False
    """True if all sequences of a microbatch are padded to the longest of them."""
    media: tuple[MediaInput, ...] = ()
    """Float inputs that give the sizes of images or audio clips where no grid input does."""
    sources: tuple[str, ...] = ()
    """Names of the inputs that the component reads, if the modality alone does not show whether a sample has work for it.

    A sample that has none of them brings no rows. (): every input of the modality counts.
    """

    def squares(self, lengths: Array) -> Array:
        """Return the number of row pairs that attend to each other in items of `lengths` patches, frames, tokens or samples."""
        rows = self.rows_per_unit * lengths
        return rows * np.minimum(rows, self.window) if self.window else self.pairs_per_unit * lengths * lengths
