"""Nodes we author for attention: words of a mask, and positions."""

from __future__ import annotations

import pytest
import torch

from mmcompile.errors import MaskError
from mmcompile.ir.nodes import attention_words, token_positions
from mmcompile.kernels.bitfield_attention.masks.words import PADDING, visible

VALID = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[-3, -3, -3, 5, 5, 5], [1, 1, 1, 1, 2, 2]])
ISLANDS = torch.tensor([[-1, 0, 0, -1, 0, 0], [7, 7, 7, 7, -1, -1]])
PLACE = torch.arange(6)


def dense(valid: torch.Tensor, documents: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """[B, T, T]: the equation of the docstring."""
    same = documents[:, :, None] == documents[:, None, :]
    return (valid != 0)[:, None, :] & (valid != 0)[:, :, None] & same & near


def seen(words: torch.Tensor) -> torch.Tensor:
    place = PLACE.expand_as(words)
    return visible(words, place, words, place)


def test_words_say_documents_islands_and_padding() -> None:
    words = attention_words(VALID, DOCUMENTS, ISLANDS, True, None, 2, 6)
    assert words.dtype == torch.int64 and words.shape == (2, 6)
    island = (ISLANDS[:, :, None] == ISLANDS[:, None, :]) & (ISLANDS >= 0)[:, :, None]
    causal = PLACE[None, :] <= PLACE[:, None]
    assert torch.equal(seen(words), dense(VALID, DOCUMENTS, causal | island))
    assert torch.equal(words == PADDING, VALID == 0)


def test_tensors_may_broadcast_or_be_absent() -> None:
    bare = attention_words(None, None, None, True, None, 2, 6)
    assert torch.equal(seen(bare), (PLACE[None, :] <= PLACE[:, None]).expand(2, 6, 6))
    row = attention_words(torch.tensor([True] * 5 + [False]), PLACE // 3, None, False, None, 2, 6)
    assert torch.equal(seen(row)[0], dense(PLACE[None] < 5, (PLACE // 3)[None], torch.tensor(True))[0])
    assert torch.equal(row[0], row[1])


def test_without_causality_a_token_sees_its_document() -> None:
    words = attention_words(VALID, DOCUMENTS, None, False, None, 2, 6)
    assert torch.equal(seen(words), dense(VALID, DOCUMENTS, torch.tensor(True)))


@pytest.mark.parametrize(("window", "fits"), [(4, True), (3, False)])
def test_islands_must_fit_a_window_that_cuts_them(window: int, fits: bool) -> None:
    """Padding and another document do not belong to an island of that number."""
    islands = torch.tensor([[0, 0, 0, -1, 0, 0], [9, 9, 9, 4, 4, 9]])
    valid = torch.tensor([[1] * 6, [0, 1, 1, 1, 1, 1]])
    documents = torch.tensor([[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 1, 2]])
    islands[1, 4] = 9
    if fits:
        assert attention_words(valid, documents, islands, True, window, 2, 6).shape == (2, 6)
        return
    with pytest.raises(
        MaskError, match=r"row 1: an island reaches from token 1 to 4, 4 tokens, .* sliding window of 3"
    ):
        attention_words(valid, documents, islands, True, window, 2, 6)


def test_ids_must_fit_a_word() -> None:
    many = torch.arange(40_000)[None]
    with pytest.raises(MaskError, match=r"document ids: row 0, token 32767 has 32768; wanted 0..32767"):
        attention_words(None, many, None, True, None, 1, 40_000)
    with pytest.raises(MaskError, match=r"island ids: row 0, token 1 has 70001; wanted 0..65535"):
        attention_words(None, None, torch.tensor([[0, 70_000]]), True, None, 1, 2)


def test_positions_count_tokens() -> None:
    positions = token_positions(torch.zeros(2, 3, dtype=torch.int64))
    assert positions.dtype == torch.int32
    assert positions.tolist() == [[0, 1, 2]] * 2
