"""Sizes of samples: lengths from inputs by name, rows by geometry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo

from mmcompile.data.sample import SampleShape
from mmcompile.ir.capture import capture
from mmcompile.passes.cost.cost import Cost
from mmcompile.planner.plan.geometry import Geometry, MediaInput
from mmcompile.planner.pricing.geometries import geometries
from mmcompile.planner.pricing.sample_sizes import SampleSizes, media_lengths, text_lengths

VISION = Geometry(
    component="vision",
    modality="image",
    rows_per_unit=0.5,
    pairs_per_unit=0.25,
    media=(MediaInput(name="pixel_values", item_dims=3, patch=(14, 14)),),
)
HEARING = Geometry(
    component="hearing",
    modality="audio",
    rows_per_unit=1.0,
    pairs_per_unit=1.0,
    media=(MediaInput(name="input_features", item_dims=2, length=50.0, elements=80 * 100),),
)
TEXT = Geometry(
    component="text",
    modality="text",
    rows_per_unit=1.0,
    pairs_per_unit=1.0,
    tokens_per_patch=0.25,
    tokens_per_frame=0.5,
)
BOTH = Geometry(
    component="both",
    modality="sample",
    rows_per_unit=3.0,
    pairs_per_unit=9.0,
    sources=("pixel_values", "input_features"),
)


def test_rows_of_shapes() -> None:
    shapes = [
        SampleShape(name="a", text_tokens=10),
        SampleShape(name="b", text_tokens=4, images=(16, 8)),
        SampleShape(name="c", text_tokens=0, audios=(20,)),
    ]
    sizes = SampleSizes.of_shapes(shapes)
    assert sizes.rows(VISION).rows.tolist() == [0, 12, 0]
    assert sizes.rows(VISION).squares.tolist() == [0, 0.25 * (256 + 64), 0]
    assert sizes.rows(HEARING).rows.tolist() == [0, 0, 20]
    assert sizes.rows(TEXT).rows.tolist() == [10, 4 + 6, 10]
    assert sizes.rows(TEXT).squares.tolist() == [100, 100, 100]
    assert sizes.rows(BOTH).rows.tolist() == [0, 3, 3]


def test_rows_of_samples() -> None:
    samples = [
        {"input_ids": torch.ones(1, 10, dtype=torch.int64)},
        {"input_ids": torch.ones(10, dtype=torch.int64), "pixel_values": torch.zeros(1, 2, 3, 28, 56)},
        {"input_ids": torch.ones(1, 9, dtype=torch.int64), "input_features": torch.zeros(2, 80, 50)},
    ]
    sizes = SampleSizes.of_samples(samples, (VISION, HEARING, TEXT, BOTH))
    assert sizes.rows(VISION).rows.tolist() == [0, 8, 0]
    assert sizes.rows(HEARING).rows.tolist() == [0, 0, 50]
    assert sizes.rows(HEARING).squares.tolist() == [0, 0, 2 * 25**2]
    assert sizes.rows(TEXT).rows.tolist() == [10, 10, 9]
    assert sizes.rows(BOTH).rows.tolist() == [0, 3, 3]


def test_packed_sounds_are_as_long_as_their_marks() -> None:
    packed = MediaInput(name="input_features", item_dims=2, length=100.0, elements=200, mask="feature_mask")
    mask = torch.zeros(2, 300, dtype=torch.int64)
    mask[0, :120], mask[1, :300] = 1, 1
    sample = {"input_features": torch.zeros(2, 80, 300), "feature_mask": mask}
    assert media_lengths(sample, "audio", (packed,)) == [60.0, 150.0]


def test_one_of_two_encoders_of_a_modality_gets_only_samples_with_its_inputs() -> None:
    media = (*VISION.media, MediaInput(name="pixel_values_videos", item_dims=3, patch=(14, 14)))
    pictures = replace(VISION, media=media, sources=("pixel_values",))
    films = replace(VISION, component="films", media=media, sources=("pixel_values_videos",))
    samples = [{"pixel_values": torch.zeros(1, 3, 28, 28)}, {"pixel_values_videos": torch.zeros(1, 8, 3, 28, 28)}, {}]
    sizes = SampleSizes.of_samples(samples, (pictures, films))
    assert sizes.rows(pictures).rows.tolist() == [2, 0, 0]
    assert sizes.rows(films).rows.tolist() == [0, 16, 0]


def test_a_grid_tells_more_than_a_shape() -> None:
    sample = {"pixel_values": torch.zeros(1, 3, 28, 28), "video_grid_thw": torch.tensor([[2, 4, 4], [1, 2, 2]])}
    assert media_lengths(sample, "image", VISION.media) == [32.0, 4.0]
    assert media_lengths(sample, "audio", HEARING.media) == []
    assert media_lengths({"pixel_values": sample["pixel_values"]}, "image", VISION.media) == [4.0]
    assert media_lengths({"pixel_values": None}, "image", VISION.media) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32, torch.bfloat16])
def test_padding_is_not_counted(dtype: torch.dtype) -> None:
    ids = torch.ones(2, 6, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=dtype)
    assert text_lengths({"input_ids": ids, "attention_mask": mask}) == [4.0, 5.0]
    assert text_lengths({"input_ids": ids[:1], "attention_mask": mask[:1]}) == [4.0]
    assert text_lengths({"input_ids": ids[0], "attention_mask": mask[0]}) == [4.0]


def test_a_mask_of_something_else_is_none_of_the_text() -> None:
    sample = {"labels": torch.ones(1, 6, dtype=torch.int64), "attention_mask": torch.ones(1, 3000)}
    assert text_lengths(sample) == [6.0]
    assert text_lengths({"pixel_values": torch.zeros(1, 3, 28, 28)}) == []


def test_texts_are_told_by_ids_of_the_decoder_too() -> None:
    ids = torch.ones(1, 5, dtype=torch.int64)
    assert text_lengths({"decoder_input_ids": ids}) == text_lengths({"labels": ids}) == [5.0]
    assert text_lengths({"input_ids": torch.zeros(1, 5)}) == []


@pytest.mark.parametrize(("family", "mask"), [("qwen2_5_omni", "feature_attention_mask"), ("qwen2_audio", "")])
def test_a_model_that_packs_its_sounds_is_told_from_one_that_pads_them(family: str, mask: str) -> None:
    chosen = zoo.ALL[family]
    model, batch = chosen.build(), chosen.batch()
    graph = capture(model, batch).graph
    found = geometries(graph, Cost().run(graph).loads, batch)
    (sounds,) = found["audio_tower"].media
    assert (sounds.name, sounds.mask) == ("input_features", mask)
    half = dict(chosen.draw(replace(chosen.first, samples=1), seed=1))
    half["feature_attention_mask"] = half["feature_attention_mask"].clone()
    half["feature_attention_mask"][:, 40:] = 0
    rows = SampleSizes.of_samples([half], found.values()).rows(found["audio_tower"]).rows
    assert rows.tolist() == [20.0 if mask else 40.0]
