"""Masks from parts and from ids, against masks written by hand; errors of what a word cannot hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.masks_oracle import dense_mask

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.builder import (
    AUDIO,
    IMAGE,
    Audio,
    Document,
    Image,
    Padding,
    Part,
    Prefix,
    Text,
    Video,
    build_mask,
)
from mmcompile.kernels.bitfield_attention.masks.convert import check_words, words_from_ids
from mmcompile.kernels.bitfield_attention.masks.words import (
    MAX_DOCUMENT,
    MAX_INSTANCE,
    NUM_MODALITIES,
    document,
    instance,
    pack,
)

# Rows see columns marked x.
LAYOUTS: dict[str, tuple[tuple[Document, ...], str]] = {
    "causal": (
        (Document((Text(4),)),),
        """
        x...
        xx..
        xxx.
        xxxx
        """,
    ),
    "encoder output before the text": (
        (Document((Image(2), Text(2))),),
        """
        xx..
        xx..
        xxx.
        xxxx
        """,
    ),
    "two images inside text": (
        (Document((Text(1), Image(2), Text(1), Image(2), Text(1))),),
        """
        x......
        .xx....
        .xx....
        xxxx...
        ....xx.
        ....xx.
        xxxxxxx
        """,
    ),
    "images that see what is before them": (
        (Document((Text(1), Image(2, sees_earlier=True), Text(1), Image(2, sees_earlier=True), Text(1))),),
        """
        x......
        xxx....
        xxx....
        xxxx...
        xxxxxx.
        xxxxxx.
        xxxxxxx
        """,
    ),
    "images that see each other": (
        (Document((Image(1, island="all"), Text(1), Image(2, island="all"), Audio(1))),),
        """
        x.xx.
        xx...
        x.xx.
        x.xx.
        ....x
        """,
    ),
    "packed": (
        (Document((Text(1), Image(1), Text(1))), Document((Image(1), Text(2)))),
        """
        x.....
        .x....
        xxx...
        ...x..
        ...xx.
        ...xxx
        """,
    ),
    "prefix": (
        (Document((Prefix(3), Text(2))),),
        """
        xxx..
        xxx..
        xxx..
        xxxx.
        xxxxx
        """,
    ),
    "block-causal video": (
        (Document((Text(1), Video(frames=2, tokens_per_frame=2), Text(1))),),
        """
        x.....
        xxx...
        xxx...
        xxxxx.
        xxxxx.
        xxxxxx
        """,
    ),
    "text that reads some modalities": (
        (Document((Image(1), Audio(1), Text(1, sees=(IMAGE,)), Text(1, sees=(AUDIO,)), Text(1, sees=()), Text(1))),),
        """
        x.....
        .x....
        x.x...
        .xxx..
        ..xxx.
        xxxxxx
        """,
    ),
    "padding inside": (
        (Document((Text(1), Padding(2), Text(1))),),
        """
        x...
        ....
        ....
        x..x
        """,
    ),
}


def drawn(picture: str) -> torch.Tensor:
    return torch.tensor([[cell == "x" for cell in line] for line in picture.split()])


@pytest.mark.parametrize(("row", "picture"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_equal_masks_drawn_by_hand(row: tuple[Document, ...], picture: str) -> None:
    words, positions = build_mask([row])
    check_words(words, positions)
    assert torch.equal(dense_mask(words, positions)[0], drawn(picture))


def test_shorter_rows_are_padded() -> None:
    words, positions = build_mask([[Document((Text(2),))], [Document((Text(3),))], []], length=5)
    assert words.dtype == torch.int64 and positions.dtype == torch.int32
    assert (words != 0).sum(1).tolist() == [2, 3, 0]
    assert torch.equal(positions, torch.arange(5, dtype=torch.int32).expand(3, 5))
    assert not dense_mask(words, positions)[2].any()


PARTS = st.one_of(
    st.builds(Text, st.integers(1, 5)),
    st.builds(Image, st.integers(1, 5), sees_earlier=st.booleans()),
    st.builds(Audio, st.integers(1, 5)),
    st.builds(Video, frames=st.integers(1, 3), tokens_per_frame=st.integers(1, 3)),
)
DOCUMENTS = st.builds(Document, st.lists(PARTS, min_size=1, max_size=4).map(tuple))


@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_documents_packed_are_documents_alone(documents: list[Document]) -> None:
    packed = dense_mask(*build_mask([documents]))[0]
    alone = [dense_mask(*build_mask([[one]]))[0] for one in documents]
    assert torch.equal(packed, torch.block_diag(*alone).bool())


def test_the_last_document_and_island_fit() -> None:
    words, _ = build_mask([[Document((Text(1),))] * MAX_DOCUMENT])
    assert document(words)[0, -1] == MAX_DOCUMENT
    words, _ = build_mask([[Document((Video(frames=MAX_INSTANCE, tokens_per_frame=1),))]])
    assert instance(words)[0, -1] == MAX_INSTANCE


@pytest.mark.parametrize(
    ("row", "message"),
    (
        ([Document((Text(1),))] * (MAX_DOCUMENT + 1), "row 1 packs 32768 documents"),
        ([Document((Video(frames=MAX_INSTANCE + 1, tokens_per_frame=1),))], "row 1, document 0 has 65536 islands"),
        ([Document((Text(1), Image(1, modality=32)))], "row 1, document 0, part 1 names modality 32"),
        ([Document((Text(1, sees=(-1,)),))], "names modality -1"),
        ([Document((Text(0),))], "has 0 tokens"),
        ([Document((Video(frames=0, tokens_per_frame=1),))], "has 0 frames"),
        ([Document((Text(70_000),))], "row 1 has 70000 tokens; wanted at most 66000"),
    ),
)
def test_what_a_word_cannot_hold_is_an_error(row: list[Document], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        build_mask([[], row], length=66_000)


def test_words_from_ids_compose_as_libraries_do() -> None:
    """(causal or same block) and same document and not padding."""
    documents = torch.randint(0, 4, (2, 50)).sort(dim=1, descending=True).values
    blocks = torch.randint(-1, 3, (2, 50))
    words = words_from_ids(documents, blocks + 1)
    same = blocks[:, :, None].eq(blocks[:, None]) & blocks.ge(0)[:, None]
    packed = documents[:, :, None].eq(documents[:, None]) & documents.ne(0)[:, None]
    expected = (torch.ones(50, 50).tril().bool() | same) & packed
    positions = torch.arange(50, dtype=torch.int32).expand(2, 50)
    assert torch.equal(dense_mask(words, positions), expected)


def test_words_from_ids_of_bidirectional_tokens_and_modalities() -> None:
    documents = torch.ones(1, 4, dtype=torch.int32)
    words = words_from_ids(
        documents,
        torch.tensor([[1, 1, 0, -7]]),
        causal=torch.tensor([[False, False, True, True]]),
        modalities=torch.tensor([[2, 2, 1, 3]]),
    )
    expected = """
        xx..
        xx..
        ..x.
        xxxx
        """
    assert torch.equal(dense_mask(words, torch.arange(4)[None])[0], drawn(expected))


IDS = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"documents": IDS * (MAX_DOCUMENT + 1)}, "document ids: row 0, token 0 has 32768; wanted 0..32767"),
        ({"documents": -IDS}, "has -1"),
        ({"documents": IDS, "islands": IDS * (MAX_INSTANCE + 1)}, "island ids: .* wanted 0..65535"),
        ({"documents": IDS, "modalities": IDS << 32}, "modality bits"),
        ({"documents": IDS.float()}, "documents are torch.float32"),
        ({"documents": IDS.bool()}, "documents are torch.bool"),
        ({"documents": IDS, "islands": IDS[:1]}, "islands are torch.int64"),
        ({"documents": IDS, "causal": IDS}, "causal are torch.int64 .* wanted bool"),
    ),
)
def test_ids_out_of_range_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        words_from_ids(**arguments)


def cornstarch_mask(row: list[int]) -> torch.Tensor:
    """The published predicate, token by token."""
    low = (1 << 62) - 1
    mask = torch.zeros(len(row), len(row), dtype=torch.bool)
    for q, query in enumerate(row):
        for k, key in enumerate(row):
            if query & 1:
                mask[q, k] = k <= q and (query & key & low) != 0
            else:
                mask[q, k] = (query & low) == (key & low) != 0
    return mask


def from_cornstarch(bitfields: torch.Tensor) -> torch.Tensor:
    """The words [batch, tokens] of Cornstarch's bitfields: one document, an island for every distinct bitfield without text.

    A token with bit 0 set is text: it sees earlier tokens that share one of the low 62 bits. Any other token sees those with
    equal low 62 bits; 0 is padding. Source: `cornstarch/kernel/bitfield_attention.py`.
    """
    low = bitfields & ((1 << 62) - 1)
    text = (low & 1) != 0
    distinct, index = torch.unique(torch.where(text, 0, low), return_inverse=True)
    index = index if distinct[0] == 0 else index + 1  # 0 is text and padding
    return pack(
        causal=text,
        document=(low != 0).long(),
        instance=torch.where(text, 0, index),
        modalities=low & ((1 << NUM_MODALITIES) - 1),
    )


@given(
    st.lists(
        st.sampled_from((0, 1, 0b111, 0b011, 0b10, 0b100, 1 << 40, (1 << 62) | 0b11, (1 << 62) | 0b10)), min_size=1
    )
)
@settings(deadline=None, max_examples=100)
def test_bitfields_of_the_papers_mean_the_same(row: list[int]) -> None:
    words = from_cornstarch(torch.tensor([row]))
    assert torch.equal(dense_mask(words, torch.arange(len(row))[None])[0], cornstarch_mask(row))


def valid() -> tuple[torch.Tensor, torch.Tensor]:
    parts: tuple[Part, ...] = (Text(3), Image(3))
    return build_mask([[Document(parts), Document(parts)]])


@pytest.mark.parametrize("places", ([0, 1, 2, 3, 4, 4], [0, 2, 1, 3, 4, 5], [0, 0, 0, 0, 0, 0]))
def test_positions_must_increase_inside_a_document(places: list[int]) -> None:
    words, positions = valid()
    positions[0, 6:] = torch.tensor(places)
    with pytest.raises(MaskError, match="row 0, document 2: token .* wanted increasing positions"):
        check_words(words, positions)


def test_positions_may_restart_in_the_next_document() -> None:
    words, positions = valid()
    positions[0, 6:] = torch.arange(6)
    check_words(words, positions)


def test_check_words_names_what_is_wrong() -> None:
    words, positions = valid()
    with pytest.raises(MaskError, match="words are torch.int32"):
        check_words(words.int(), positions)
    with pytest.raises(MaskError, match="positions are torch.int64"):
        check_words(words, positions.long())
    with pytest.raises(MaskError, match="position -12"):
        check_words(words, positions - 12)
    words[0, 3] = 5
    with pytest.raises(MaskError, match="token 3 is of document 0"):
        check_words(words, positions)
