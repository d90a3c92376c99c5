"""Batches of free sizes: any number of pictures of any size, or of clips of any length, and text of any length."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import torch

from zoo.family import IGNORE, Batch, Draw, Family, Size, cast_floats
from zoo.parts import AUDIO, IMAGE, VISION_END, VISION_START

_SPECIAL = 990
"""First token id that is no text."""
_TYPED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
"""Families that also take the kind of each token."""
Make = Callable[[Draw, random.Random, int, int], Batch]
"""Function (draw, rng, number of media, rows of text) -> batch."""


def free_batches(family: Family, count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Return batches of a family with any number of samples and media that it takes; in `FREE_FAMILIES`, media of free sizes."""
    samples, media = (
        range(min(pair), max(pair) + 1)
        for pair in ((family.first.samples, family.second.samples), (family.first.media, family.second.media))
    )
    found: list[Batch] = []
    for seed in range(count):
        rng = random.Random(f"{family.name} {seed}")
        if family.name in _MAKERS:
            found.append(free_batch(family.name, seed, rng.randint(1, 4), dtype))
            continue
        size = Size(
            samples=rng.choice(samples), length=family.first.length + rng.randint(0, 24), media=rng.choice(media)
        )
        found.append(family.draw(size, seed=100 + seed, dtype=dtype))
    return found


def free_batch(name: str, seed: int, media: int, dtype: torch.dtype = torch.float32, *, rows: int = 2) -> Batch:
    """Return a batch of a family with `media` pictures or clips, whose sizes and places are drawn from `seed`."""
    if not media:
        batch = _text(Draw(seed), random.Random(seed), (), IMAGE, rows)
        return {**batch, "mm_token_type_ids": torch.zeros_like(batch["input_ids"]).int()} if name in _TYPED else batch
    return cast_floats(_MAKERS[name](Draw(seed), random.Random(seed), media, rows), dtype)


def _text(
    draw: Draw, rng: random.Random, runs: Sequence[int], token: int, num_rows: int, around: Sequence[int] = ()
) -> Batch:
    """Return rows of text with a run of placeholders for each medium, which may stand in any row; padded right."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    places = sorted(rng.randrange(num_rows) for _ in runs)  # media come in the order of their placeholders
    for place, run in zip(places, runs, strict=True):
        words = draw.tokens(1, rng.randint(2, 6))[0].tolist()
        rows[place] += [*words, *around[:1], *[token] * run, *around[1:]]
    for row in rows:
        row += draw.tokens(1, rng.randint(6, 30))[0].tolist()
    if num_rows > 1 and len({len(row) for row in rows}) == 1:
        rows[0] += draw.tokens(1, 3)[0].tolist()
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = torch.where((ids >= _SPECIAL) | (mask == 0), IGNORE, ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _grids(patch: int, *, frames: int = 2, types: bool = True, square: bool = False, sizes: bool = False) -> Make:
    """Pictures as rows of patches, one after the other, with a grid [time, height, width] each; four patches a placeholder."""

    def make(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
        grids = [(1, 2 * rng.randint(2, 8), 2 * rng.randint(2, 8)) for _ in range(media)]
        counts = [height * width for _, height, width in grids]
        batch = _text(draw, rng, [count // 4 for count in counts], IMAGE, rows, (VISION_START, VISION_END))
        batch["pixel_values"] = draw.normal(sum(counts), 3 * frames * patch**2)
        batch["image_grid_thw"] = torch.tensor(grids)
        if square:
            batch["pixel_values"] = batch["pixel_values"].view(-1, 3, patch, patch)
        if sizes:
            batch["image_merge_sizes"] = torch.full((media,), 2)
        if types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        return batch

    return make


def _padded_pictures(merge: int) -> Make:
    """Pictures in the corner of a canvas, with their sizes in pixels; of `merge` tokens or more: Mistral3 fails on one."""

    def make(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
        sizes = [(28 * rng.randint(1, 4), 28 * rng.randint(merge, 4)) for _ in range(media)]
        batch = _text(draw, rng, [(h // 14 // merge) * (w // 14 // merge) for h, w in sizes], IMAGE, rows)
        canvas = torch.zeros(media, 3, max(h for h, _ in sizes), max(w for _, w in sizes))
        for index, (height, width) in enumerate(sizes):
            canvas[index, :, :height, :width] = draw.normal(3, height, width)
        return {**batch, "pixel_values": canvas, "image_sizes": torch.tensor(sizes)}

    return make


def _tiled(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
    """Pictures as tiles of the best resolution, whose padding is cut off the features (LLaVA-Next)."""
    from transformers.image_processing_utils import select_best_resolution

    sizes = [(rng.randint(30, 150), rng.randint(30, 150)) for _ in range(media)]
    tiles, runs = [], []
    for height, width in sizes:
        high, wide = (
            side // 56 for side in select_best_resolution((height, width), [[56, 112], [112, 56], [112, 112]])
        )
        tiles.append(1 + high * wide)
        runs.append(16 + _unpadded(height, width, high * 4, wide * 4))
    batch = _text(draw, rng, runs, IMAGE, rows)
    pixels = torch.zeros(media, max(tiles), 3, 56, 56)
    for index, count in enumerate(tiles):
        pixels[index, :count] = draw.normal(count, 3, 56, 56)
    return {**batch, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _unpadded(height: int, width: int, rows: int, columns: int) -> int:
    """Return the tokens of a picture's features without padding, with a newline after each row."""
    if width / height > columns / rows:
        kept = round(height * (columns / width), 7)
        rows -= 2 * ((rows - int(kept)) // 2)
    else:
        kept = round(width * (rows / height), 7)
        columns -= 2 * ((columns - int(kept)) // 2)
    return rows * (columns + 1)


def _masked_pictures(tokens: int) -> Make:
    """As many canvases in each row as the fullest has, some empty, with a mask of pixels (Idefics)."""

    def make(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
        counts = [media, *(rng.randint(1, media) for _ in range(rows - 1))]
        texts = [
            draw.tokens(1, 3)[0].tolist() + [IMAGE] * (tokens * count) + draw.tokens(1, rng.randint(6, 30))[0].tolist()
            for count in counts
        ]
        length = max(map(len, texts))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in texts])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in texts])
        labels = torch.where((ids >= _SPECIAL) | (mask == 0), IGNORE, ids)
        pixels, seen = torch.zeros(rows, media, 3, 56, 56), torch.zeros(rows, media, 56, 56, dtype=torch.long)
        for row, count in enumerate(counts):
            for index in range(count):
                height, width = 14 * rng.randint(1, 4), 14 * rng.randint(1, 4)
                pixels[row, index, :, :height, :width] = draw.normal(3, height, width)
                seen[row, index, :height, :width] = 1
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "pixel_values": pixels,
            "pixel_attention_mask": seen,
        }

    return make


def _padded_patches(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
    """Pictures as at most 64 patches each, with their number high and wide (LFM2-VL)."""
    shapes = [(2 * rng.randint(1, 4), 2 * rng.randint(1, 4)) for _ in range(media)]
    batch = _text(draw, rng, [height * width // 4 for height, width in shapes], IMAGE, rows)
    pixels, seen = torch.zeros(media, 64, 3 * 14 * 14), torch.zeros(media, 64, dtype=torch.long)
    for index, (height, width) in enumerate(shapes):
        pixels[index, : height * width] = draw.normal(height * width, 3 * 14 * 14)
        seen[index, : height * width] = 1
    return {
        **batch,
        "pixel_values": pixels,
        "spatial_shapes": torch.tensor(shapes),
        "pixel_attention_mask": seen,
    }


def _clips(draw: Draw, rng: random.Random, media: int, rows: int) -> Batch:
    """Clips of at most 80 frames; a quarter of their frames are placeholders (Qwen2-Audio)."""
    lengths = [rng.randint(20, 80) for _ in range(media)]
    runs = [(((length - 1) // 2 + 1) - 2) // 2 + 1 for length in lengths]
    seen = torch.zeros(media, 80, dtype=torch.long)
    for index, length in enumerate(lengths):
        seen[index, :length] = 1
    batch = _text(draw, rng, runs, AUDIO, rows)
    return {**batch, "input_features": draw.normal(media, 16, 80), "feature_attention_mask": seen}


_MAKERS: Mapping[str, Make] = {
    "qwen2_vl": _grids(14),
    "qwen2_5_vl": _grids(14),
    "qwen3_vl": _grids(16),
    "qwen3_5": _grids(16),
    "glm4v": _grids(14),
    "video_llama_3": _grids(14, frames=1, types=False, sizes=True),
    "kimi_k25": _grids(14, frames=1, types=False, square=True),
    "pixtral": _padded_pictures(1),
    "mistral3": _padded_pictures(2),
    "llava_next": _tiled,
    "llava_onevision": _tiled,
    "idefics2": _masked_pictures(8),
    "idefics3": _masked_pictures(4),
    "smolvlm": _masked_pictures(4),
    "lfm2_vl": _padded_patches,
    "qwen2_audio": _clips,
}

FREE_FAMILIES: tuple[str, ...] = tuple(_MAKERS)
