"""Samples are packed into one row without padding; each document keeps its own positions; misfits are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mmcompile.batching.pack import Packer
from mmcompile.data.collate import Value, collate
from mmcompile.errors import BatchError, PlanError


class Text(nn.Module):
    """Takes what a language model takes."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        raise AssertionError("packing calls no forward")


PACKER = Packer.of(Text())


def text(*ids: int, **more: Value) -> dict[str, Value]:
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([ids]), **more}


def rows(value: Value) -> list[object]:
    assert isinstance(value, Tensor)
    return value.tolist()


def test_documents_stand_in_one_row_with_positions_of_their_own() -> None:
    batch = PACKER.pack([text(5, 6, 7), text(8), text(9, 10)])
    assert rows(batch["input_ids"]) == [[5, 6, 7, 8, 9, 10]]
    assert rows(batch["position_ids"]) == [[0, 1, 2, 0, 0, 1]]
    assert rows(batch["labels"]) == [[-100, 6, 7, -100, -100, 10]]
    assert "attention_mask" not in batch


def test_padding_on_either_side_is_cut_away() -> None:
    left = text(0, 0, 5, 6, attention_mask=torch.tensor([[0, 0, 1, 1]]), token_type_ids=torch.tensor([[9, 9, 1, 2]]))
    right = text(7, 8, 0, attention_mask=torch.tensor([[1, 1, 0]]), token_type_ids=torch.tensor([[3, 4, 9]]))
    for sample in (left, right):
        labels = sample["labels"]
        assert isinstance(labels, Tensor)
        labels[labels == 0] = -100
    batch = PACKER.pack([left, right])
    assert rows(batch["input_ids"]) == [[5, 6, 7, 8]]
    assert rows(batch["token_type_ids"]) == [[1, 2, 3, 4]]
    assert rows(batch["position_ids"]) == [[0, 1, 0, 1]]


def test_valid_tokens_are_those_of_the_padded_batch() -> None:
    samples = [text(*range(1, length)) for length in (2, 5, 9, 4)]
    packed, padded = PACKER.pack(samples)["labels"], collate(samples)["labels"]
    assert isinstance(packed, Tensor) and isinstance(padded, Tensor)
    assert int((packed[:, 1:] != -100).sum()) == int((padded[:, 1:] != -100).sum()) == 12


def test_samples_are_left_as_they_are() -> None:
    sample = text(5, 6)
    PACKER.pack([sample, sample])
    assert rows(sample["labels"]) == [[5, 6]] and sample.keys() == {"input_ids", "labels"}


def test_media_are_joined_as_in_a_padded_batch() -> None:
    samples = [
        text(1, 2, pixel_values=torch.ones(2, 3, 4, 4), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]])),
        text(3),
        # As many patches as tokens: still no values of tokens.
        text(4, 5, pixel_values=torch.ones(1, 3, 4, 6), image_grid_thw=torch.tensor([[1, 4]]).repeat(1, 2)[:, :3]),
    ]
    packed, padded = PACKER.pack(samples), collate(samples)
    for name in ("pixel_values", "image_grid_thw"):
        assert rows(packed[name]) == rows(padded[name])
    mask = {"feature_attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    assert PACKER.pack([text(1, 2, **mask), text(3, 4, **mask)])["feature_attention_mask"].shape == (2, 2)  # type: ignore[union-attr]


def test_padding_of_media_is_the_callers() -> None:
    packer = Packer.of(Text(), {"input_features": -1.0})
    batch = packer.pack([text(1, input_features=torch.zeros(1, 2)), text(2, input_features=torch.zeros(1, 1))])
    assert rows(batch["input_features"]) == [[0.0, 0.0], [0.0, -1.0]]


def test_positions_of_a_sample_are_used_as_they_are() -> None:
    own = torch.arange(8).view(4, 1, 2)
    batch = PACKER.pack([text(5, 6, position_ids=own), text(7, 8, position_ids=own)])
    assert isinstance(batch["position_ids"], Tensor)
    assert torch.equal(batch["position_ids"], torch.cat([own, own], dim=-1))


def test_one_dimensional_texts_gain_the_batch_dim() -> None:
    sample: dict[str, Value] = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}
    assert rows(PACKER.pack([sample, sample])["labels"]) == [[-100, 2, -100, 2]]


BAD: dict[str, tuple[list[dict[str, Value]], str]] = {
    "none": ([], "no samples to pack: got an empty list"),
    "no text": ([{"pixel_values": torch.ones(1)}], r"sample 7 cannot be packed: wanted input_ids .* got none"),
    "two rows": ([{"input_ids": torch.ones(2, 3, dtype=torch.int64)}], r"sample 7 .* got shape \(2, 3\)"),
    "all padding": ([text(1, 2, attention_mask=torch.zeros(1, 2))], "sample 7 .* hides all of its 2 tokens"),
    "a square mask": (
        [text(1, 2, attention_mask=torch.ones(1, 1, 2, 2))],
        r"its attention_mask is shape \(1, 1, 2, 2\)",
    ),
    "labels on padding": (
        [text(5, 6), text(7, 8, attention_mask=torch.tensor([[1, 0]]))],
        "sample 8 cannot be packed: 1 labels of its padding",
    ),
    "values of some tokens": (
        [text(5, 6), text(7, 8, token_type_ids=torch.ones(1, 2, dtype=torch.int64))],
        "'token_type_ids' has a value for every token of sample 8, and some samples have none",
    ),
    "other dtypes": (
        [text(5), {"input_ids": torch.tensor([[5]]), "labels": torch.tensor([[5]], dtype=torch.int32)}],
        "'labels' of sample 8 has shape .* and dtype torch.int32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_misfit_is_named(name: str) -> None:
    samples, message = BAD[name]
    with pytest.raises(BatchError, match=message):
        PACKER.pack(samples, range(7, 7 + len(samples)))


def test_a_model_without_positions_cannot_be_packed_for() -> None:
    with pytest.raises(PlanError, match=r"Linear.forward takes no input_ids, so it cannot know where documents begin"):
        Packer.of(nn.Linear(1, 1))
