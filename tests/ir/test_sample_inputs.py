"""Example batches follow the conventions of a model: crops, marks around placeholders, as many rows as the model makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import FAMILIES

from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import IGNORE, example_batch


@pytest.mark.parametrize(
    "family", ["llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni"]
)
def test_the_model_accepts_its_example(family: str) -> None:
    model = FAMILIES[family].build()
    batch = example_batch(model, text_tokens=32, image_size=112)
    loss = model(**batch, use_cache=False).loss
    assert torch.isfinite(loss)


def test_marks_enclose_placeholders_and_are_text() -> None:
    model: Any = FAMILIES["qwen2_5_omni"].build()
    batch = example_batch(model, text_tokens=32, image_size=112)
    ids = batch["input_ids"][0]
    places = ids.eq(model.config.image_token_id).nonzero().flatten()
    assert ids[places[0] - 1] == model.config.vision_start_token_id
    assert ids[places[-1] + 1] == model.config.vision_end_token_id
    assert (batch["labels"][0][places] == IGNORE).all()
    assert batch["labels"][0][places[0] - 1] != IGNORE


def test_too_little_text_around_images_is_refused() -> None:
    model = FAMILIES["llava"].build()
    with pytest.raises(ConfigError, match="too few around 4 images or sounds; use at least 9"):
        example_batch(model, text_tokens=8, images=4)
