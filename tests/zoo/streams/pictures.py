"""Picture processors written by hand: for four families transformers has only ones that require torchvision.

Each gives the inputs, dtypes, layouts and token counts of the processor of the same family; pixels are resized by Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import make_flat_list_of_images
from transformers.processing_utils import ImagesKwargs


class _Pictures(PilBackend):
    """A picture processor that gives all of a batch's pictures at once."""

    def preprocess(self, images: Any, **_: Any) -> BatchFeature:
        """Return the inputs of all pictures, in the order of their placeholders."""
        flat: Any = make_flat_list_of_images(images)
        return BatchFeature(self.inputs(flat))

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the model's inputs, and what the family's processor reads to write placeholders."""
        raise NotImplementedError


def _normalised(picture: Image.Image) -> Tensor:
    """Return pixels from -1 to 1, float32 [3, height, width]."""
    return torch.from_numpy(np.asarray(picture, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1


def _resized(picture: Image.Image, height: int, width: int) -> Image.Image:
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _on_canvas(picture: Image.Image, height: int, width: int, colour: int) -> Image.Image:
    """Return the picture in the upper left corner of a canvas."""
    canvas = Image.new("RGB", (width, height), (colour, colour, colour))
    canvas.paste(picture, (0, 0))
    return canvas


def _tiles(pixels: Tensor, side: int) -> Tensor:
    """Return square tiles, row by row: [tiles, 3, side, side]."""
    _, height, width = pixels.shape
    cut = pixels.view(3, height // side, side, width // side, side)
    return cut.permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)


class KimiPictures(_Pictures):
    """Kimi K2.5: shrunk to a budget of patches, padded to whole merged patches; rows of patches and a grid each."""

    model_input_names = ["pixel_values", "image_grid_thw"]
    patch_size, merge_size, max_patches = 14, 2, 144

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        patches, grids, factor = [], [], self.patch_size * self.merge_size
        for picture in pictures:
            budget = max(1, picture.height // self.patch_size) * max(1, picture.width // self.patch_size)
            scale = min(1.0, math.sqrt(self.max_patches / budget))
            height, width = int(picture.height * scale), int(picture.width * scale)
            high, wide = (-(-side // factor) * factor for side in (height, width))
            pixels = _normalised(_on_canvas(_resized(picture, height, width), high, wide, 0))
            patches.append(_tiles(pixels, self.patch_size))
            grids.append([1, high // self.patch_size, wide // self.patch_size])
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


class TileOptions(ImagesKwargs, total=False):
    """Options that LFM2-VL's processor passes to its picture processor."""

    return_row_col_info: bool


class Lfm2VlPictures(_Pictures):
    """LFM2-VL: small pictures whole, large ones as tiles and a thumbnail; 64 rows of patches each, masked where empty."""

    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]
    valid_kwargs = TileOptions
    encoder_patch_size, downsample_factor, tile_size = 14, 2, 112
    min_image_tokens, max_image_tokens, max_tiles = 4, 16, 4
    use_thumbnail, do_image_splitting, max_pixels_tolerance = True, True, 2.0

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        parts, grids = [], []
        sizes = [self._whole(picture) for picture in pictures]
        for picture, (height, width) in zip(pictures, sizes, strict=True):
            rows, columns = self._grid(picture)
            if rows * columns > 1:
                cut = _resized(picture, rows * self.tile_size, columns * self.tile_size)
                parts += list(_tiles(_normalised(cut), self.tile_size))
            parts.append(_normalised(_resized(picture, height, width)))
            grids.append((rows, columns))
        packed = [self._packed(part) for part in parts]
        return {
            "pixel_values": torch.stack([rows for rows, _, _ in packed]),
            "pixel_attention_mask": torch.stack([seen for _, seen, _ in packed]),
            "spatial_shapes": torch.tensor([shape for _, _, shape in packed]),
            "image_rows": [rows for rows, _ in grids],
            "image_cols": [columns for _, columns in grids],
            "image_sizes": [list(size) for size in sizes],
        }

    def _whole(self, picture: Image.Image) -> tuple[int, int]:
        """Return height and width in which the picture has as many tokens as it may have."""
        factor = self.encoder_patch_size * self.downsample_factor
        least, most = (tokens * factor**2 for tokens in (self.min_image_tokens, self.max_image_tokens))
        area = picture.height * picture.width
        height, width = (max(factor, round(side / factor) * factor) for side in (picture.height, picture.width))
        if height * width > most:
            shrink = math.sqrt(area / most)
            height, width = (max(factor, int(side / shrink / factor) * factor) for side in picture.size[::-1])
        elif height * width < least:
            grow = math.sqrt(least / area)
            height, width = (math.ceil(side * grow / factor) * factor for side in picture.size[::-1])
        return height, width

    def _grid(self, picture: Image.Image) -> tuple[int, int]:
        """Return rows and columns of tiles."""
        factor = self.encoder_patch_size * self.downsample_factor
        height, width = (max(factor, round(side / factor) * factor) for side in (picture.height, picture.width))
        if height * width <= self.max_image_tokens * factor**2 * self.max_pixels_tolerance:
            return 1, 1
        grids = [(rows, columns) for rows in range(1, 5) for columns in range(1, 5) if 2 <= rows * columns <= 4]
        return min(grids, key=lambda grid: abs(picture.width / picture.height - grid[1] / grid[0]))

    def _packed(self, pixels: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
        side, most = self.encoder_patch_size, (self.tile_size // self.encoder_patch_size) ** 2
        high, wide = pixels.shape[1] // side, pixels.shape[2] // side
        rows, seen = torch.zeros(most, 3 * side**2), torch.zeros(most, dtype=torch.int32)
        rows[: high * wide] = _tiles(pixels, side).permute(0, 2, 3, 1).reshape(high * wide, -1)
        seen[: high * wide] = 1
        return rows, seen, (high, wide)


class Phi4Pictures(_Pictures):
    """Phi-4-multimodal: a thumbnail and as many crops as the picture needs, with masks of patches that are no padding."""

    model_input_names = ["image_pixel_values", "image_sizes", "image_attention_mask"]
    crop, patch_size, dynamic_hd = 56, 14, 16

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        cut = [self._cut(picture) for picture in pictures]
        most = max(len(crops) for crops, _, _ in cut)
        side = self.crop // self.patch_size
        pixels = torch.zeros(len(cut), most, 3, self.crop, self.crop)
        seen = torch.ones(len(cut), most, side, side)
        for index, (crops, masks, _) in enumerate(cut):
            pixels[index, : len(crops)], seen[index, : len(masks)] = crops, masks
        return {
            "image_pixel_values": pixels,
            "image_sizes": torch.tensor([size for _, _, size in cut]),
            "image_attention_mask": seen,
            "num_img_tokens": [self._tokens(masks, size) for _, masks, size in cut],
        }

    def _cut(self, picture: Image.Image) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Return thumbnail and crops, their masks, and height and width of the canvas."""
        high, wide = (math.ceil(side / self.crop) * self.crop for side in (picture.height, picture.width))
        scale = min(high / picture.height, wide / picture.width)
        height, width = int(picture.height * scale), int(picture.width * scale)
        pixels = _normalised(_on_canvas(_resized(picture, height, width), high, wide, 255))
        thumbnail = torch.nn.functional.interpolate(pixels[None], (self.crop,) * 2, mode="bicubic")
        seen = torch.ones(high // self.patch_size, wide // self.patch_size)
        seen[seen.shape[0] - (high - height) // self.patch_size :] = 0
        seen[:, seen.shape[1] - (wide - width) // self.patch_size :] = 0
        side = self.crop // self.patch_size
        masks = _tiles(seen.expand(3, -1, -1), side)[:, 0]
        return (
            torch.cat([thumbnail, _tiles(pixels, self.crop)]),
            torch.cat([torch.ones(1, side, side), masks]),
            (high, wide),
        )

    def _tokens(self, masks: Tensor, size: tuple[int, int]) -> int:
        """Return the tokens of a picture: thumbnail and crops at half the resolution, each row with a newline."""
        rows, columns = (side // self.crop for side in size)
        half = masks[1:, ::2, ::2]
        side = half.shape[-1]
        whole = half.view(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)
        return side * (side + 1) + 1 + int(whole.sum()) + int(whole[:, 0].sum())


class Llama4Pictures(_Pictures):
    """Llama 4: tiles of the canvas that fits best, up to four, and a whole picture where there are several."""

    model_input_names = ["pixel_values"]
    side, max_patches = 56, 4

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        tiles, ratios = [], []
        for picture in pictures:
            rows, columns = self._canvas(picture)
            high, wide = (
                min(max(own, self.side), count * self.side)
                for own, count in ((picture.height, rows), (picture.width, columns))
            )
            scale = min(high / picture.height, wide / picture.width)
            shrunk = _resized(picture, max(1, int(picture.height * scale)), max(1, int(picture.width * scale)))
            tiles.append(_tiles(_normalised(_on_canvas(shrunk, rows * self.side, columns * self.side, 0)), self.side))
            if rows * columns > 1:
                tiles.append(_normalised(_resized(picture, self.side, self.side))[None])
            ratios.append([rows, columns])
        return {"pixel_values": torch.cat(tiles), "aspect_ratios": torch.tensor(ratios)}

    def _canvas(self, picture: Image.Image) -> tuple[int, int]:
        """Return rows and columns of the smallest canvas that need not shrink the picture, else of the one that shrinks least."""
        grids = [(rows, columns) for rows in range(1, 5) for columns in range(1, 5) if rows * columns <= 4]
        scales = {
            grid: min(grid[0] * self.side / picture.height, grid[1] * self.side / picture.width) for grid in grids
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        chosen = min(larger) if larger else max(scales.values())
        return min((grid for grid in grids if scales[grid] == chosen), key=lambda grid: grid[0] * grid[1])
