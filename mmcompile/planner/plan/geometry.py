"""`Geometry`: rows that one component makes of the texts, images and sounds of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Media = Literal["image", "audio"]
Modality = Literal["image", "audio", "text", "sample"]
"""Kind of a component's rows. `sample`: none of the others, so as many for every sample."""

MEDIA_WORDS: Mapping[Media, tuple[str, ...]] = {
    "image": ("pixel", "image", "video", "vision", "visual", "frame"),
    "audio": ("input_features", "input_values", "audio", "sound", "speech", "mel"),
}

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaInput:
    """A float input of images or sounds, whose shape gives their lengths where no grid does."""

    name: str
    item_dims: int
    """Last dims that are one image or sound; those before count them."""
    patch: tuple[int, int] = (0, 0)
    """Pixels of a patch, height and width: an image is as long as it has patches. (0, 0): lengths go with the elements."""
    length: float = 0.0
    """Rows of an image or sound of `elements` elements, or of so many that `mask` marks."""
    elements: int = 0
    mask: str = ""
    """Input [images or sounds, steps] that marks the steps that the model takes; "" where it takes all, padding too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Rows that one component makes of a sample.

    For images and sounds: `rows_per_unit` times the patches or frames. For text: `rows_per_unit` times the length of the
    sample's sequence, `text_tokens + tokens_per_patch * patches + tokens_per_frame * frames`.
    """

    component: str
    modality: Modality
    rows_per_unit: float
    """Rows per patch, frame, token of the sequence, or sample: one class token beside 576 patches makes 577 / 576."""
    pairs_per_unit: float
    """Squared length of the component's rows per squared length in those units."""
    window: float = 0.0
    """Rows that attend to each other, where that is not the whole image, sound or sequence; 0 where it is. Read from the
    captured batch: one whose images all fit into a window does not show it."""
    tokens_per_patch: float = 0.0
    """Positions in the sequence that one patch takes; 0 where images are attended to from outside it."""
    tokens_per_frame: float = 0.0
    pads: bool = False
    """True if all sequences of a microbatch are as long as its longest."""
    media: tuple[MediaInput, ...] = ()
    """Inputs of images or sounds that give their sizes where no grid does."""
    sources: tuple[str, ...] = ()
    """Inputs that the component reads, if its modality does not determine whether a sample has any.

    A sample without all of them adds nothing. (): every input of the modality.
    """

    def squares(self, lengths: Array) -> Array:
        """Return pairs of rows that attend to each other in images, sounds or sequences of these lengths."""
        rows = self.rows_per_unit * lengths
        return rows * np.minimum(rows, self.window) if self.window else self.pairs_per_unit * lengths * lengths
