"""Patches from widths and heights, and sizes from headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from mmcompile.data.images import PatchRule, image_size
from mmcompile.errors import ConfigError

FORMATS = ("png", "jpg", "gif", "bmp", "tiff", "webp")


@pytest.mark.parametrize(
    ("rule", "size", "patches"),
    [
        (PatchRule(patch=14, side=336), (10, 5000), 576),
        (PatchRule(patch=14, side=384), (384, 384), 729),
        (PatchRule(patch=14), (28, 42), 6),
        (PatchRule(patch=14), (29, 43), 12),
        (PatchRule(patch=14, merge=2), (29, 29), 16),
        (PatchRule(patch=14, merge=2, rounding="nearest"), (41, 30), 4),
        (PatchRule(patch=14), (1, 1), 1),
        (PatchRule(patch=14, max_side=896), (1792, 896), 64 * 32),
        (PatchRule(patch=14, max_side=896), (280, 140), 200),
        (PatchRule(patch=14, merge=2, max_pixels=28 * 28 * 100), (2800, 2800), 400),
        (PatchRule(patch=14, merge=2, min_pixels=28 * 28 * 100), (28, 28), 400),
    ],
)
def test_patches(rule: PatchRule, size: tuple[int, int], patches: int) -> None:
    assert rule.patches(*size) == patches


def test_the_native_rule_is_that_of_qwen2_vl() -> None:
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    least, most = 56 * 56, 14 * 14 * 4 * 1280
    rule = PatchRule(patch=14, merge=2, min_pixels=least, max_pixels=most, rounding="nearest")
    for width, height in np.random.default_rng(0).integers(28, 4000, size=(300, 2)).tolist():
        if max(width, height) / min(width, height) < 200:
            tall, wide = processing.smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
            assert rule.patches(width, height) == tall * wide // 14**2, (width, height)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: PatchRule(patch=0), "a patch and a merge of at least 1"),
        (lambda: PatchRule(patch=14, side=7), "a side of at least one patch"),
        (lambda: PatchRule(max_pixels=10), "max_pixels is 10; wanted at least min_pixels 0 and one merged patch, 196"),
    ],
)
def test_rules_that_make_no_patch_are_refused(rule: Callable[[], PatchRule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule()


def test_crops_are_those_of_llava_next() -> None:
    processing = pytest.importorskip("transformers.image_processing_utils")
    points = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    rule = PatchRule.of(
        {
            "vision_config": {"patch_size": 14, "image_size": 336},
            "image_grid_pinpoints": points,
            "model_type": "llava_next",
        }
    )
    for width, height in np.random.default_rng(0).integers(20, 3000, size=(300, 2)).tolist():
        tall, wide = processing.select_best_resolution((height, width), points)
        assert rule.images(width, height) == (576,) * (1 + tall * wide // 336**2), (width, height)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"vision_config": {"patch_size": 14, "image_size": 384}}, PatchRule(patch=14, side=384)),
        (
            {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
            PatchRule(patch=14, merge=2, min_pixels=3136, max_pixels=1003520, rounding="nearest"),
        ),
        (
            {"vision_config": {"patch_size": 16, "image_size": 1024, "model_type": "pixtral"}, "spatial_merge_size": 2},
            PatchRule(patch=16, merge=2, max_side=1024),
        ),
    ],
)
def test_rules_of_models(config: dict[str, object], rule: PatchRule) -> None:
    assert PatchRule.of(config) == rule


def test_a_model_without_patches_is_refused() -> None:
    with pytest.raises(ConfigError, match="a config of model_type 'whisper' tells no patch size"):
        PatchRule.of({"model_type": "whisper"})


def forbid(*_: object) -> None:
    raise AssertionError("pixels were decoded")


@pytest.mark.parametrize("suffix", FORMATS)
def test_sizes_come_from_the_header_alone(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"noise.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, size=(211, 307, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    monkeypatch.setattr(ImageFile.ImageFile, "load", forbid)
    assert image_size(path) == (307, 211)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp"])
def test_an_image_cut_off_after_its_header_has_a_size(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"noise.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, size=(211, 307, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    assert image_size(path) == (307, 211)
    with Image.open(path) as image, pytest.raises(OSError, match="truncated"):
        image.load()


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.png"
    path.write_text("not an image")
    with pytest.raises(ConfigError, match=r"cannot read the size of image .*text\.png.*; repair it or take it away"):
        image_size(path)
