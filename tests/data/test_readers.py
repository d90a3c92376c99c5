"""Shapes from files, processed samples and names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from mmcompile.data.images import PatchRule
from mmcompile.data.readers import ReadOptions, read_stats, shapes_of_folder, shapes_of_jsonl
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.data.synthetic import SYNTHETIC_DATASETS, synthetic
from mmcompile.errors import ConfigError


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_lines_of_shapes(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "shapes.jsonl",
        '{"name": "cat", "text_tokens": 40, "images": [576, 64]}',
        "",
        '{"text_tokens": 3, "audios": [1500]}',
    )
    assert list(shapes_of_jsonl(path)) == [
        SampleShape(name="cat", text_tokens=40, images=(576, 64)),
        SampleShape(name="line 3", text_tokens=3, audios=(1500,)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{",
            "line 2: Input data was truncated; a line is one object with the fields name, text_tokens, images, audios",
        ),
        ("[3]", "line 2: Expected `object`, got `array`"),
        ('{"images": [3]}', "line 2: Object missing required field `text_tokens`"),
        ('{"text_tokens": 3, "image": [3]}', "line 2: unknown field 'image'"),
        ('{"text_tokens": 3, "images": 3}', r"line 2: Expected `array`, got `int` - at `\$.images`"),
        ('{"text_tokens": 3, "images": [-1]}', "line 2: a length below zero"),
        ('{"text_tokens": 2.5}', r"line 2: Expected `int`, got `float` - at `\$.text_tokens`"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "shapes.jsonl", '{"text_tokens": 1}', line)
    with pytest.raises(ConfigError, match=message):
        list(shapes_of_jsonl(path))


def test_a_folder_of_images_with_captions(tmp_path: Path) -> None:
    for name, size in {"a.png": (56, 56), "b/c.JPG": (100, 40), "d.webp": (28, 28)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", size).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("four words are here\n")
    write_lines(tmp_path / "metadata.jsonl", '{"file_name": "b/c.JPG", "text": "three more words", "width": 3}')
    options = ReadOptions(rule=PatchRule(patch=14, merge=2), prompt_tokens=5)
    assert list(shapes_of_folder(tmp_path, options)) == [
        SampleShape(name="a.png", text_tokens=10, images=(16,)),
        SampleShape(name="b/c.JPG", text_tokens=9, images=(8 * 4,)),
        SampleShape(name="d.webp", text_tokens=5, images=(4,)),
    ]


def test_without_a_tokenizer_tokens_are_estimated(tmp_path: Path) -> None:
    Image.new("RGB", (14, 14)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x" * 41)
    assert [shape.text_tokens for shape in shapes_of_folder(tmp_path)] == [11]


def test_a_folder_without_images_and_captions_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no images under .*; looked for .bmp, .gif"):
        list(shapes_of_folder(tmp_path))
    Image.new("RGB", (14, 14)).save(tmp_path / "a.png")
    write_lines(tmp_path / "captions.jsonl", '{"file_name": "a.png"}')
    with pytest.raises(ConfigError, match="captions.jsonl, line 1: .*`text`; a line has file_name and text"):
        list(shapes_of_folder(tmp_path))


def test_read_stats_takes_every_source(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (336, 100)).save(folder / "a.png")
    rule = PatchRule(patch=14, side=336)
    assert read_stats(folder, ReadOptions(rule=rule)).samples[0].images == (576,)
    lines = write_lines(tmp_path / "shapes.jsonl", *(json.dumps({"text_tokens": n}) for n in range(9)))
    stats = read_stats(lines)
    assert stats.count == 9 and stats.name == str(lines)
    assert read_stats(lines, ReadOptions(max_samples=4)).count == 4
    assert read_stats(stats.save(tmp_path / "saved.json")) == stats
    assert read_stats("synthetic:llava-150k:100:3").samples == tuple(synthetic("llava-150k", 100, 3))
    assert read_stats("synthetic:cocoqa").count == 4096


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "cannot read a dataset from nowhere: wanted a folder of images, a .jsonl"),
        ("none.jsonl", "cannot read none.jsonl: .*No such file"),
        ("none.json", "cannot read dataset statistics none.json: No such file"),
        ("synthetic:mnist", "no synthetic dataset 'mnist'; there are synthchartnet, llava-150k"),
        ("synthetic:chartqa:many", "wanted synthetic:NAME.*with whole numbers"),
        ("synthetic:chartqa:0", "0 samples of chartqa; wanted at least 1"),
    ],
)
def test_sources_that_are_none(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_stats(source)


@pytest.mark.parametrize("name", list(SYNTHETIC_DATASETS))
def test_synthetic_datasets_follow_their_table(name: str) -> None:
    mix = SYNTHETIC_DATASETS[name]
    drawn = list(synthetic(name, 3000, seed=1))
    assert drawn == list(synthetic(name, 3000, seed=1)) != list(synthetic(name, 3000, seed=2))
    weights = {part.name: part.weight / sum(p.weight for p in mix.parts) for part in mix.parts}
    means = sum(weights[part.name] * part.text.mean for part in mix.parts)
    stats = DatasetStats.of(drawn, name=name)
    assert stats.spreads["text tokens"].mean == pytest.approx(means, rel=0.1)
    for part in mix.parts:
        low, high = part.patches.least, part.patches.most
        assert not part.images[1] or all(
            size % part.patches.step == 0 or size in (low, high) for shape in drawn for size in shape.images
        )
    with_images = sum(weights[part.name] for part in mix.parts if part.images[1])
    assert stats.shares["images"] == pytest.approx(with_images, abs=0.03)


def test_the_mix_of_dflop_has_its_shares() -> None:
    stats = DatasetStats.of(synthetic("dflop-mix", 4000), name="mix")
    single = sum(len(shape.images) == 1 for shape in stats.samples) / len(stats.samples)
    assert single == pytest.approx(65 / 185, abs=0.03)
    assert stats.spreads["images"].percentiles[-1] == 32
    videos = [shape for shape in stats.samples if len(shape.images) > 6]
    assert all(len(set(shape.images)) == 1 for shape in videos)
