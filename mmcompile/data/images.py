"""Number of patches of an image from its width and height, as the processors of vision encoders cut them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from mmcompile.errors import ConfigError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRule:
    """Rule by which an encoder's processor turns pixels into patches."""

    patch: int = 14
    """Side of a patch, in pixels."""
    merge: int = 1
    """Number of patches per side that are merged into one token."""
    side: int | None = None
    """Side, in pixels, of the square that every image is resized to. None rounds its sides up to multiples of `patch * merge`."""

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1 or (self.side is not None and self.side < self.patch):
            raise ConfigError(
                f"patches of {self.patch} pixels, merged by {self.merge}, in images of {self.side}; wanted a patch and a "
                "merge of at least 1, and a side of at least one patch"
            )

    def patches(self, width: int, height: int) -> int:
        """Return the number of patches of an image of `width` by `height` pixels, as one input of the encoder."""
        if self.side is not None:
            return (self.side // self.patch) ** 2
        step = self.patch * self.merge
        return ceil(width / step) * ceil(height / step) * self.merge**2


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height from an image's header; its pixels are not read.

    Raises:
        ConfigError: the file is no image.
    """
    try:
        with Image.open(path) as image:
            return image.size
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ConfigError(f"cannot read the size of image {path}: {error}; repair it or take it away") from error
