"""Samples are joined and padded as the models expect, and misfits are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.oracles.one_process import split_microbatches
from torch import Tensor

from mmcompile.data.collate import Value, check_labels, collate, padded_alike
from mmcompile.errors import BatchError


def text(*ids: int, **more: Value) -> dict[str, Value]:
    return {"input_ids": torch.tensor([ids]), **more}


def rows(value: Value) -> list[object]:
    assert isinstance(value, Tensor)
    return value.tolist()


def test_texts_are_padded_on_the_right_and_a_mask_is_made() -> None:
    batch = collate(
        [text(5, 6, 7, labels=torch.tensor([[5, 6, 7]])), text(8, labels=torch.tensor([[8]]))], {"input_ids": 2}
    )
    assert rows(batch["input_ids"]) == [[5, 6, 7], [8, 2, 2]]
    assert rows(batch["attention_mask"]) == [[1, 1, 1], [1, 0, 0]]
    assert rows(batch["labels"]) == [[5, 6, 7], [8, -100, -100]]


def test_equal_lengths_need_no_mask_and_given_masks_are_padded() -> None:
    assert collate([text(1, 2), text(3, 4)]).keys() == {"input_ids"}
    batch = collate([text(1, 2, attention_mask=torch.tensor([[0, 1]])), text(3)])
    assert rows(batch["attention_mask"]) == [[0, 1], [1, 0]]


def test_images_of_some_samples_are_joined_on_dim_0() -> None:
    batch = collate(
        [
            text(1, pixel_values=torch.ones(2, 3, 4, 4), image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]])),
            text(2),
            text(3, pixel_values=torch.full((1, 3, 4, 6), 2.0), image_grid_thw=torch.tensor([[1, 4, 4]])),
        ]
    )
    pixels = batch["pixel_values"]
    assert isinstance(pixels, Tensor)
    assert pixels.shape == (3, 3, 4, 6)
    assert pixels[:2, ..., 4:].abs().sum() == 0
    assert rows(batch["image_grid_thw"]) == [[1, 2, 2], [1, 2, 4], [1, 4, 4]]


def test_media_are_padded_to_the_largest_and_texts_are_not() -> None:
    short = {"input_ids": torch.ones(1, 3), "pixels": torch.ones(1, 1, 5), "mask": torch.ones(1, 3, 1)}
    long = {"input_ids": torch.ones(4), "pixels": torch.ones(1, 2, 3), "mask": torch.ones(1, 4, 2), "text_only": True}
    first, second = padded_alike([short, long], {"pixels": 7})
    shapes = [{name: tuple(v.shape) for name, v in row.items() if isinstance(v, Tensor)} for row in (first, second)]
    assert shapes[0] == {"input_ids": (1, 3), "pixels": (1, 2, 5), "mask": (1, 3, 2)}
    assert shapes[1] == {"input_ids": (1, 4), "pixels": (1, 2, 5), "mask": (1, 4, 2)}
    assert first["pixels"].tolist() == [[[1] * 5, [7] * 5]]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    together, alone = collate([short, long], {"pixels": 7}), collate([first, second], {"pixels": 7})
    assert together.keys() == alone.keys()
    assert all(torch.equal(v, alone[name]) for name, v in together.items() if isinstance(v, Tensor))  # pyright: ignore[reportArgumentType]


def test_one_dimensional_texts_gain_the_batch_dim() -> None:
    sample = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, 2]), "sizes": torch.tensor([7])}
    batch = collate([sample, sample])
    assert rows(batch["labels"]) == [[1, 2], [1, 2]]
    assert rows(batch["sizes"]) == [7, 7]


def test_plain_values_pass_if_equal() -> None:
    assert collate([text(1, interpolate=True), text(2, interpolate=True)])["interpolate"] is True
    with pytest.raises(BatchError, match="'interpolate' is True in sample 0 and False in sample 1: wanted equal"):
        collate([text(1, interpolate=True), text(2, interpolate=False)])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"input_ids": [1, 2]}, "'input_ids' is a tensor in sample 0 and list in sample 1"),
        (
            {"input_ids": torch.ones(1, 2)},
            r"'input_ids' of sample 1 has shape \(1, 2\) and dtype torch.float32; sample 0 has",
        ),
        ({"input_ids": torch.ones(1, 2, 1, dtype=torch.int64)}, "wanted the same number of dims"),
    ],
)
def test_misfits_are_named(second: dict[str, Value], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        collate([text(1, 2), second])


def test_lists_and_empty_batches_are_refused() -> None:
    with pytest.raises(BatchError, match='call the processor with return_tensors="pt"'):
        collate([{"input_ids": [1, 2]}])  # type: ignore[dict-item]
    with pytest.raises(BatchError, match="no samples to collate"):
        collate([])


@pytest.mark.parametrize(
    ("samples", "microbatches", "expected"),
    [
        (4, 2, ((0, 1), (2, 3))),
        (5, 3, ((0, 1), (2, 3), (4,))),
        (2, 4, ((0,), (1,))),
        (1, 1, ((0,),)),
    ],
)
def test_microbatches_are_contiguous_and_near_equal(
    samples: int, microbatches: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert split_microbatches(samples, microbatches) == expected


def test_a_step_needs_a_label() -> None:
    ignored = text(1, labels=torch.tensor([[-100]]))
    check_labels([ignored, text(1, labels=torch.tensor([[1]]))])
    check_labels([text(1)])
    check_labels([text(1, labels=torch.tensor([-100.0]))])
    with pytest.raises(BatchError, match="every label of the step is -100"):
        check_labels([ignored, ignored])


@dataclass
class Boxes:
    corners: Tensor
    format: str


def test_nested_inputs_are_joined_leaf_by_leaf() -> None:
    def sample(number: int) -> dict[str, Value]:
        part = torch.full((1, number), number)
        targets = [{"boxes": torch.full((number, 4), float(number)), "classes": torch.arange(number)}]
        found = {"obj": (part, part * 2), "boxes": Boxes(part, "xyxy")}
        return text(5, labels=torch.tensor([[5]]), targets=targets, found=found)

    batch: Any = collate([sample(1), sample(2)])
    assert [len(target["classes"]) for target in batch["targets"]] == [1, 2]
    assert rows(batch["found"]["obj"][1]) == [[2, 0], [4, 4]]
    assert rows(batch["found"]["boxes"].corners) == [[1, 0], [2, 2]] and batch["found"]["boxes"].format == "xyxy"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"masks": torch.ones(1, 2)}, "'found' has boxes in sample 0 and masks in sample 1"),
        ([torch.ones(1, 2)], "'found' is a dict in sample 0 and a list in sample 1"),
        ({"boxes": torch.ones(1, 2).int()}, "'found.boxes' of sample 1 has shape"),
    ],
)
def test_misfits_of_nested_inputs_are_named(second: Value, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        collate([text(5, found={"boxes": torch.ones(1, 2)}), text(5, found=second)])
