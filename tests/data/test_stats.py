"""`DatasetStats`: what is kept, what is printed, and the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import NUM_WORST, DatasetStats
from mmcompile.errors import ConfigError


def shapes(count: int) -> Iterator[SampleShape]:
    for index in range(count):
        images = (64,) * (index % 3)
        yield SampleShape(name=f"s{index}", text_tokens=10 + index % 7, images=images, audios=(50,) * (index % 2))


def test_percentiles_are_those_of_numpy() -> None:
    drawn = np.random.default_rng(0).integers(1, 1000, size=500)
    stats = DatasetStats.of((SampleShape(name=str(i), text_tokens=int(n)) for i, n in enumerate(drawn)), name="text")
    spread = stats.spreads["text tokens"]
    assert spread.mean == pytest.approx(drawn.mean()) and spread.std == pytest.approx(drawn.std())
    assert spread.percentiles[3] == np.percentile(drawn, 50) and spread.percentiles[-1] == drawn.max()
    assert "patches" not in stats.spreads and not stats.correlations


def test_images_and_sounds_are_counted_one_by_one_and_per_sample() -> None:
    stats = DatasetStats.of(shapes(300), name="toy")
    assert stats.spreads["patches per image"].mean == 64 and stats.spreads["images"].mean == 1
    assert stats.spreads["patches"].percentiles[-1] == 128 and stats.spreads["frames"].mean == 25
    assert stats.shares == pytest.approx({"images": 2 / 3, "sounds": 0.5, "text": 1})


def test_correlation_is_pearsons() -> None:
    twice = [SampleShape(name=str(n), text_tokens=2 * n, images=(n,)) for n in range(1, 50)]
    against = [SampleShape(name=str(n), text_tokens=100 - n, images=(n,)) for n in range(1, 50)]
    assert DatasetStats.of(twice, name="a").correlations["patches ~ text tokens"] == pytest.approx(1)
    assert DatasetStats.of(against, name="b").correlations["patches ~ text tokens"] == pytest.approx(-1)


def test_a_large_dataset_is_sampled_uniformly_and_counted_exactly() -> None:
    wide = (SampleShape(name=str(n), text_tokens=n) for n in range(20_000))
    stats = DatasetStats.of(wide, name="wide", max_samples=2_000)
    kept = np.array([shape.text_tokens for shape in stats.samples])
    assert stats.count == 20_000 and len(kept) == 2_000 and stats.is_sampled
    assert len(set(kept.tolist())) == 2_000
    shares, _ = np.histogram(kept, bins=10, range=(0, 20_000))
    assert shares.min() > 140 and shares.max() < 260  # 200 each, 4.5 standard deviations


def test_the_worst_are_exact_where_the_dataset_was_sampled() -> None:
    wide = [SampleShape(name=str(n), text_tokens=(n * 7919) % 5003) for n in range(5003)]
    stats = DatasetStats.of(wide, name="wide", max_samples=100)
    worst = {entry.measure: entry.samples for entry in stats.worst}
    assert [shape.text_tokens for shape in worst["text tokens"]] == list(range(5002, 5002 - NUM_WORST, -1))
    assert "patches" not in worst
    assert worst["text tokens"][0] in stats.heaviest() and len(stats.heaviest()) <= 100 + 2 * NUM_WORST


def test_of_equally_heavy_samples_the_earlier_are_named() -> None:
    stats = DatasetStats.of((SampleShape(name=str(n), text_tokens=5) for n in range(200)), name="equal")
    assert [shape.name for shape in stats.worst[0].samples[:3]] == ["0", "1", "2"]


def test_progress_is_called_with_the_samples_read() -> None:
    calls: list[int] = []
    DatasetStats.of(shapes(2_500), name="toy", progress=calls.append)
    assert calls == [1_000, 2_000, 2_500]


def test_json_and_file_round_trip(tmp_path: Path) -> None:
    stats = DatasetStats.of(shapes(100), name="toy")
    assert DatasetStats.from_json(stats.to_json()) == stats
    assert DatasetStats.load(stats.save(tmp_path / "stats.json")) == stats


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 99}', "have version 99, this mmcompile reads 1"),
        ("[1, 2]", "this is no dataset statistics"),
        ('{"version": 1, "name": "x"}', "missing required field `count`"),
        ("not json", "this is no dataset statistics"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetStats.from_json(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read dataset statistics .*none.json: No such file"):
        DatasetStats.load(tmp_path / "none.json")


def test_text() -> None:
    text = str(DatasetStats.of(shapes(300), name="toy"))
    assert text.splitlines()[0] == "toy: 300 samples, 67% with images, 50% with sounds, 100% with text"
    assert "patches per image        64        0" in text
    assert "most patches: s2 (128), s5 (128), s8 (128)" in text


def test_an_empty_dataset_prints_too() -> None:
    assert str(DatasetStats.of([], name="none")).splitlines()[0] == "none: 0 samples"
