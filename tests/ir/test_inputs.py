"""Batches as graphs take them: flat, with positions, and refused where placeholders have no media, whatever inputs are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ALL

from mmcompile.errors import BatchError
from mmcompile.ir.inputs import FlatBatch, completed

IMAGE, VIDEO, AUDIO = 90, 91, 92


class Model(nn.Module):
    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def forward(self, **inputs: Any) -> None: ...


def batch(*tokens: int, **media: int) -> dict[str, Any]:
    ids = torch.tensor([[1, *tokens, 2]])
    return {"input_ids": ids, "attention_mask": ids, **{name: torch.ones([2] * rank) for name, rank in media.items()}}


def test_codes_are_media() -> None:
    given = batch(IMAGE, AUDIO, AUDIO, pixel_values=4)
    codes, grid = torch.randint(2, 9, (1, 3, 2)), torch.tensor([[1, 2, 2]])
    model = Model(image_token_id=IMAGE, audio_token_id=AUDIO)
    assert "audio_codes" in completed(model, given | {"audio_codes": codes})
    many = batch(*[IMAGE] * 4, *[AUDIO] * 4, pixel_values=4)
    with pytest.raises(BatchError, match="only pixel_values"):
        completed(model, many | {"image_grid": grid})


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"video_token_id": VIDEO}, batch(VIDEO, pixel_values=5)),
        ({"audio_token_id": AUDIO}, batch(AUDIO, input_values=2)),
        ({"image_token_id": IMAGE, "video_token_id": IMAGE}, batch(IMAGE, anything=4)),
        ({"image_token_id": IMAGE, "audio_token_index": AUDIO}, batch(IMAGE, AUDIO, one=4, other=3)),
        ({"image_token_id": IMAGE}, batch(5, 6)),
        ({"image_token_id": IMAGE}, batch(5, 6, pixel_values=4)),
    ],
)
def test_media_are_not_told_by_their_names(config: dict[str, int], given: dict[str, Any]) -> None:
    assert completed(Model(**config), given) == given


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (batch(IMAGE, IMAGE), r"2 image placeholders \(token 90\) but the batch has no media; got inputs input_ids"),
        (batch(IMAGE, AUDIO, pixel_values=4), r"1 image .* and 1 audio .* but the batch has only pixel_values"),
    ],
)
def test_placeholders_without_media_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BatchError, match=reason):
        completed(Model(image_token_id=IMAGE, audio_token_id=AUDIO), given)


def test_a_flat_batch_gives_its_arguments_back() -> None:
    given = {
        "x": torch.ones(2),
        "sizes": [(1, 2)],
        "targets": [{"boxes": torch.zeros(2), "name": "a"}, {"boxes": torch.ones(1), "name": "b"}],
    }
    flat = FlatBatch(given)
    assert list(flat) == [
        "x",
        "sizes",
        "targets__0__boxes",
        "targets__0__name",
        "targets__1__boxes",
        "targets__1__name",
    ]
    other = {**flat, "targets__0__boxes": torch.full((2,), 3.0)}
    arguments = flat.arguments(other)
    assert arguments.keys() == given.keys()
    assert arguments["targets"][0] == {"boxes": other["targets__0__boxes"], "name": "a"}
    assert completed(Model(), flat) is flat


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_positions_are_found_through_a_peft_wrapper() -> None:
    """Else every padding pattern would be a capture of its own."""
    import peft

    family = ALL["qwen2_5_vl"]
    wrapped = peft.get_peft_model(family.build(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = completed(wrapped, family.batch())
    assert torch.equal(found["position_ids"], completed(family.build(), family.batch())["position_ids"])
