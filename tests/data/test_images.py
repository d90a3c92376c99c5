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
        (PatchRule(patch=14), (1, 1), 1),
    ],
)
def test_patches(rule: PatchRule, size: tuple[int, int], patches: int) -> None:
    assert rule.patches(*size) == patches


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: PatchRule(patch=0), "a patch and a merge of at least 1"),
        (lambda: PatchRule(patch=14, side=7), "a side of at least one patch"),
    ],
)
def test_rules_that_make_no_patch_are_refused(rule: Callable[[], PatchRule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule()


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
