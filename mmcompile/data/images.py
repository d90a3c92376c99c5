"""Number of patches of an image from its width and height, as the processors of vision encoders cut them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, sqrt
from pathlib import Path
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from mmcompile.errors import ConfigError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})

_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Least and greatest number of pixels of an image after Qwen2-VL's processor resized it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRule:
    """Rule by which an encoder's processor turns pixels into patches.

    With `side`, every image is resized to a square of that side. Without, it keeps its size as nearly as a multiple of
    `patch * merge` and the limits allow.
    """

    patch: int = 14
    """Side of a patch, in pixels."""
    merge: int = 1
    """Number of patches per side that are merged into one token; image sides become multiples of `patch * merge`."""
    side: int | None = None
    """Side, in pixels, that every image is resized to; None for encoders of any size."""
    min_pixels: int = 0
    max_pixels: int | None = None
    max_side: int | None = None
    """Upper limit of the longer side, in pixels; a larger image is scaled down. None for no limit."""
    rounding: Literal["nearest", "up"] = "up"
    """Direction of rounding of sides: up to the next multiple of `patch * merge`, or to the nearest."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Sizes (height, width), in pixels: an image is scaled to the best one, and cut into squares of `side`.

    The whole image is encoded as one more square.
    """

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PatchRule:
        """Return the patch rule of a model from its Hugging Face configuration, with the defaults of its kind of processor.

        Raises:
            ConfigError: the model has no vision encoder that cuts images into patches.
        """
        vision = config.get("vision_config") or config.get("thinker_config", {}).get("vision_config") or {}
        patch, size = vision.get("patch_size"), vision.get("image_size")
        if not isinstance(patch, int):
            raise ConfigError(
                f"a config of model_type {config.get('model_type')!r} tells no patch size in its vision_config; "
                "state the rule of patches"
            )
        if "spatial_merge_size" in vision:
            merge = vision["spatial_merge_size"]
            return cls(patch=patch, merge=merge, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS, rounding="nearest")
        if vision.get("model_type") == "pixtral":
            return cls(patch=patch, merge=config.get("spatial_merge_size", 1), max_side=size)
        if not isinstance(size, int):
            raise ConfigError(f"vision_config has image_size {size!r}; wanted one number of pixels, or state the rule")
        points = config.get("image_grid_pinpoints") or ()
        return cls(patch=patch, side=size, pinpoints=tuple((height, width) for height, width in points))

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1 or (self.side is not None and self.side < self.patch):
            raise ConfigError(
                f"patches of {self.patch} pixels, merged by {self.merge}, in images of {self.side}; wanted a patch and a "
                "merge of at least 1, and a side of at least one patch"
            )
        if self.max_pixels is not None and self.max_pixels < max(self.min_pixels, self.step**2):
            raise ConfigError(
                f"max_pixels is {self.max_pixels}; wanted at least min_pixels {self.min_pixels} and one merged patch, "
                f"{self.step**2}"
            )

    @property
    def step(self) -> int:
        """Number of pixels, `patch * merge`, that the sides of resized images are multiples of."""
        return self.patch * self.merge

    def images(self, width: int, height: int) -> tuple[int, ...]:
        """Return the number of patches per encoder input made from an image of this size in pixels: the image, then each crop."""
        count = 1
        if self.pinpoints and self.side is not None:
            best_height, best_width = max(self.pinpoints, key=lambda point: _fit(point, width, height))
            count += (best_height // self.side) * (best_width // self.side)
        return (self.patches(width, height),) * count

    def patches(self, width: int, height: int) -> int:
        """Return the number of patches of an image of `width` by `height` pixels, without crops."""
        if self.side is not None:
            return (self.side // self.patch) ** 2
        if self.max_side is not None and max(width, height) > self.max_side:
            scale = self.max_side / max(width, height)
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        sides = [self._rounded(width), self._rounded(height)]
        area = sides[0] * sides[1]
        if self.max_pixels is not None and area > self.max_pixels:
            shrink = sqrt(width * height / self.max_pixels)
            sides = [max(1, floor(side / shrink / self.step)) * self.step for side in (width, height)]
        elif area < self.min_pixels:
            grow = sqrt(self.min_pixels / (width * height))
            sides = [ceil(side * grow / self.step) * self.step for side in (width, height)]
        return (sides[0] // self.patch) * (sides[1] // self.patch)

    def _rounded(self, side: int) -> int:
        count = ceil(side / self.step) if self.rounding == "up" else round(side / self.step)
        return max(1, count) * self.step


def _fit(point: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    scale = min(point[1] / width, point[0] / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - point[0] * point[1]  # most pixels kept, then fewest left empty


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
