"""The bits of a word, and the predicate on words against one on bit strings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.masks_oracle import KINDS, Token, dense_mask, random_words, word_of

from mmcompile.kernels.bitfield_attention.masks.words import (
    MAX_DOCUMENT,
    MAX_INSTANCE,
    PADDING,
    document,
    instance,
    pack,
    visible,
)

ALL_BITS = (1 << 32) - 1

TOKENS = st.builds(
    Token,
    causal=st.booleans(),
    document=st.integers(1, MAX_DOCUMENT),
    island=st.integers(0, MAX_INSTANCE),
    bits=st.integers(0, ALL_BITS),
)


def packed(token: Token) -> torch.Tensor:
    values = (token.document, token.island, token.bits)
    fields = (torch.tensor([value], dtype=torch.int64) for value in values)
    return pack(
        causal=torch.tensor([token.causal]), **dict(zip(("document", "instance", "modalities"), fields, strict=True))
    )


@given(TOKENS)
@settings(deadline=None, max_examples=200)
def test_fields_survive_packing(token: Token) -> None:
    word = packed(token)
    assert word.item() == word_of(token)
    # The C bit is the sign.
    fields = (word < 0, document(word), instance(word), word & 0xFFFFFFFF)
    assert [x.item() for x in fields] == [token.causal, token.document, token.island, token.bits]


def test_largest_ids_and_all_bits_do_not_meet_the_sign() -> None:
    token = Token(causal=False, document=MAX_DOCUMENT, island=MAX_INSTANCE, bits=ALL_BITS)
    assert packed(token).item() == (1 << 63) - 1


def test_document_0_is_padding_whatever_the_other_fields_say() -> None:
    assert packed(Token(causal=True, document=0, island=3, bits=7)).item() == PADDING


@pytest.mark.parametrize("window", (None, 1, 20))
@pytest.mark.parametrize("kind", KINDS)
def test_predicate_equals_that_on_bit_strings(kind: str, window: int | None) -> None:
    for seed in range(5):
        words, positions = random_words(seed, 150, kind)
        got = visible(words, positions, words, positions, window)
        assert torch.equal(got, dense_mask(words, positions, window=window))


def test_no_document_sees_another_and_padding_sees_nothing() -> None:
    ids = torch.tensor([0, 1, 2, MAX_DOCUMENT])
    words = pack(
        causal=torch.ones(4, dtype=torch.bool),
        document=ids,
        instance=torch.full((4,), 5),
        modalities=torch.ones_like(ids),
    )
    assert torch.equal(visible(words, torch.arange(4), words, torch.arange(4)), torch.diag(ids != 0))
