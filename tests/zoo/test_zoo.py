"""Every family trains eagerly on every batch the zoo gives it."""

from __future__ import annotations

import pytest
import torch

from zoo import ALL, FAMILIES, PARITY_FAMILIES, Family, samples


def _loss(family: Family, batch: dict[str, object], model: torch.nn.Module) -> torch.Tensor:
    loss = model(**batch)["loss"]
    assert torch.isfinite(loss)
    return loss


def test_zoo_has_enough_families() -> None:
    assert len(FAMILIES) >= 170


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_family_trains_eagerly_on_both_batches(name: str) -> None:
    family = ALL[name]
    model = family.build()
    first = _loss(family, family.batch(), model)
    first.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    again = _loss(family, family.batch(), family.build())
    assert first.item() == again.item(), "the model or its batch is random"
    _loss(family, family.second_batch(), model).backward()
    if family.text_only:
        _loss(family, family.text_only_batch(), model).backward()


@pytest.mark.parametrize("name", PARITY_FAMILIES)
def test_samples_are_single_conversations_of_mixed_lengths_and_media(name: str) -> None:
    drawn = samples(ALL[name], 8, seed=0)
    assert {sample["input_ids"].shape[0] for sample in drawn} == {1}
    assert len({sample["input_ids"].shape[1] for sample in drawn}) > 2
    keys = [set(sample) for sample in drawn]
    assert keys[6] < keys[0], "a sample without media has fewer inputs"
