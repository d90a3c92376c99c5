"""Streams of microbatches from the families' own processors: they run in eager, differ, and are the same in every process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zoo import ALL
from zoo.family import IGNORE, Batch
from zoo.streams import STREAM_FAMILIES, stream
from zoo.streams.tokenizer import FIRST_SPECIAL

FEW, MANY = 4, 40
# Glm4vProcessor (transformers 5.24) makes a list of tensors an array.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NO_MEDIA = {"input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids"}


@pytest.mark.parametrize("name", STREAM_FAMILIES)
def test_each_batch_runs_in_eager(name: str) -> None:
    model = ALL[name].build()
    for batch in stream(name, FEW):
        loss = model(**batch)["loss"]
        loss.backward()
        assert math.isfinite(loss.item())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("name", STREAM_FAMILIES)
def test_batches_have_free_sizes_and_some_have_no_media(name: str) -> None:
    batches = list(stream(name, MANY))
    assert len({_shapes(batch) for batch in batches}) > 0.8 * MANY  # texts alone may be equally long
    assert 0 < sum(batch.keys() <= NO_MEDIA for batch in batches) < MANY / 2
    for batch in batches:
        special = batch["input_ids"] >= FIRST_SPECIAL
        assert special.any() == (not batch.keys() <= NO_MEDIA)
        assert (batch["labels"][special | (batch["attention_mask"] == 0)] == IGNORE).all()
        assert (batch["labels"] != IGNORE).any(-1).all(), "a row without text"


def test_a_stream_is_the_same_each_time() -> None:
    for one, other in zip(stream("qwen2_5_omni", FEW), stream("qwen2_5_omni", FEW), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def _shapes(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, Tensor))
