"""Example batches follow the conventions of a model: crops, marks around placeholders, as many rows as the model makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import FAMILIES

from mmcompile.errors import ConfigError
from mmcompile.ir.compat import FakeTensorMode
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


def test_rows_that_depend_on_values_cannot_be_foretold_without_weights() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(
                get_text_config=lambda: SimpleNamespace(vocab_size=100),
                vision_config=SimpleNamespace(image_size=8),
                image_token_id=7,
            )
            self.weight = nn.Parameter(torch.zeros(1))

        def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values[pixel_values > 0][None, :, None] * self.weight

        def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.get_image_features(pixel_values)

    with FakeTensorMode():
        model = Picky()
    with pytest.raises(ConfigError, match="how many rows get_image_features makes depends on values of its inputs"):
        example_batch(model)
