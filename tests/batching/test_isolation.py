"""Packing is refused where documents of one row could meet, with the op and the module; else it is stated why they cannot."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import ALL, samples

from mmcompile.batching.isolation import check_packing
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan_record import Packing

_WIDTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """What a language model does with position_ids and tokens."""

    masks: bool = True
    """Its mask tells documents apart."""
    positions: bool = True
    """Learned positions are looked up by position_ids."""
    mixes: str = "nothing"
    shifts: bool = True


class Language(nn.Module):
    """One attention over learned positions."""

    def __init__(self, habits: Habits) -> None:
        super().__init__()
        self.habits = habits
        self.embed = nn.Embedding(50, _WIDTH)
        self.places = nn.Embedding(40, _WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.conv = nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1)
        self.head = nn.Linear(_WIDTH, 50)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        """[1, T] -> the loss."""
        length = input_ids.shape[1]
        counted = torch.arange(length)[None]
        hidden = self.embed(input_ids) + self.places(position_ids if self.habits.positions else counted)
        q, k, v = self.qkv(hidden).view(1, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        document = (position_ids == 0).cumsum(-1)
        mask = (counted[:, :, None] >= counted[:, None]) & (document[:, :, None] == document[:, None])
        given = {"attn_mask": mask[:, None]} if self.habits.masks else {"is_causal": True}
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, **given).transpose(1, 2).reshape(1, length, -1)  # type: ignore[arg-type]
        if self.habits.mixes == "mean":
            hidden = hidden + hidden.mean(1, keepdim=True)
        if self.habits.mixes == "convolution":
            hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)[0]
        if self.habits.shifts:
            return F.cross_entropy(logits[:-1], labels[0, 1:], ignore_index=-100)
        return F.cross_entropy(logits, labels[0], ignore_index=-100)


def text(length: int) -> dict[str, Tensor]:
    ids = torch.arange(1, length + 1)[None]
    return {"input_ids": ids, "labels": ids}


def checked(habits: Habits) -> Packing:
    return check_packing(Language(habits), [text(7), text(11)])


def test_documents_under_a_mask_of_blocks_are_isolated() -> None:
    found = checked(Habits())
    assert found.isolates
    assert str(found) == (
        "packing: documents are isolated (masks made from position_ids are block-diagonal, and nothing else mixes tokens)"
    )


REFUSED = {
    "a causal mask alone": (Habits(masks=False), "it has no mask that tells documents apart"),
    "absolute positions": (Habits(positions=False), "depend on the rest of the row, as absolute positions do"),
    "a mean": (Habits(mixes="mean"), "mean = aten.mean in .* it reduces over the tokens"),
    "a convolution": (Habits(mixes="convolution"), "conv1d = aten.conv1d in module conv is not token-wise"),
    "labels in place": (Habits(shifts=False), "counts the first label of a row, so it does not shift labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lets_documents_meet_is_refused(name: str) -> None:
    habits, message = REFUSED[name]
    found = checked(habits)
    assert not found.isolates
    assert str(found).startswith("packing refused: ")
    with pytest.raises(AssertionError, match=message):  # `match` searches as regular expressions do
        raise AssertionError(found.reason)


FAMILIES = {
    "lfm2_vl": "conv1d = aten.conv1d in module model.language_model.layers.0.conv is not token-wise",
    "two_encoder_net": "TwoEncoderNet.forward takes no position_ids",
    "florence2": "Florence2ForConditionalGeneration.forward takes no position_ids",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_cannot_isolate(name: str) -> None:
    found = check_packing(ALL[name].build(), samples(ALL[name], 2, seed=1, media=(1,)))
    assert not found.isolates
    assert FAMILIES[name] in found.reason


def test_one_sample_shows_nothing() -> None:
    with pytest.raises(ConfigError, match="packing is checked on two samples in one row, got 1"):
        check_packing(Language(Habits()), [text(3)])
