"""Random words of every kind of mask, and the mask they stand for, both from bit strings: nothing here calls the package."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

KINDS = ("causal", "EP", "EE", "EE-Gemma", "MP", "MP-Gemma", "video", "prefix", "padded", "permuted")
"""Kinds `random_words` knows. "padded" and "permuted" take any of the others and add padding, or shuffle blocks and tokens."""

ALL_BITS = (1 << 32) - 1
_LENGTHS = (1, 2, 3, 7, 16, 25, 48)


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """Fields of one word."""

    causal: bool = True
    document: int = 1
    island: int = 0
    bits: int = ALL_BITS


def word_of(token: Token) -> int:
    """The 64-bit word, as a signed integer."""
    unsigned = int(f"{int(token.causal):01b}{token.document:015b}{token.island:016b}{token.bits:032b}", 2)
    return unsigned - (1 << 64) if token.causal else unsigned


def words_of(tokens: list[Token]) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, tokens] words and positions."""
    words = [word_of(token) for token in tokens]
    return torch.tensor([words], dtype=torch.int64), torch.arange(len(words), dtype=torch.int32)[None]


def random_words(seed: int, tokens: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of one row.

    Args:
        seed: of everything random.
        tokens: length of the row.
        kind: one of `KINDS`.

    Returns:
        [1, tokens] int64 words and [1, tokens] int32 positions; runs are short, so that small blocks meet every boundary.
    """
    rng = random.Random(f"{seed} {tokens} {kind}")
    if kind == "permuted":
        words, positions = random_words(seed, tokens, rng.choice(KINDS[:-1]))
        order = torch.tensor(_permutation(rng, tokens))
        return words[:, order], positions[:, order]
    if kind == "padded":
        return words_of(_with_padding(rng, list(_tokens(rng, tokens, rng.choice(KINDS[:-2])))))
    return words_of(list(_tokens(rng, tokens, kind)))


def random_batch(seed: int, tokens: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens] words and positions, each row of a random kind."""
    rng = random.Random(seed)
    rows = [random_words(seed * batch + row, tokens, rng.choice(KINDS)) for row in range(batch)]
    return torch.cat([words for words, _ in rows]), torch.cat([positions for _, positions in rows])


def dense_mask(
    words: torch.Tensor,
    positions: torch.Tensor,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What each query sees: bool [batch, Tq, Tk]. Keys are those of the queries where none are given."""
    if kv_words is None or kv_positions is None:
        kv_words, kv_positions = words, positions
    rows = zip(words, positions, kv_words, kv_positions, strict=True)
    return torch.stack([_row_mask(_decode(w, p), _decode(kv_w, kv_p), window) for w, p, kv_w, kv_p in rows])


def _decode(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal, document, island, bits, position of each token: int64 [5, tokens]."""
    strings = [f"{word % (1 << 64):064b}" for word in words.tolist()]
    fields = [[int(s[a:b], 2) for a, b in ((0, 1), (1, 16), (16, 32), (32, 64))] for s in strings]
    return torch.tensor([[*field, place] for field, place in zip(fields, positions.tolist(), strict=True)]).T


def _row_mask(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    causal, document, island, bits, place = query[:, :, None]
    _, kv_document, kv_island, kv_bits, kv_place = key[:, None, :]
    reach = ALL_BITS if window is None else window
    earlier = (kv_place <= place) & (kv_place > place - reach)
    meets = (causal == 1) & earlier & ((bits & kv_bits) > 0)
    return (document == kv_document) & (document > 0) & (meets | ((island == kv_island) & (island > 0)))


def _tokens(rng: random.Random, tokens: int, kind: str) -> Iterator[Token]:
    if kind.startswith("MP"):
        document = 0
        while tokens:
            document, length = document + 1, min(tokens, rng.randint(1, 90))
            parts = _tokens(rng, length, kind.replace("MP", "EE"))
            yield from (replace(token, document=document) for token in parts)
            tokens -= length
    elif kind == "causal":
        yield from [Token()] * tokens
    elif kind == "EP":
        prefix = rng.randint(0, tokens)
        yield from [Token(causal=False, island=1, bits=2)] * prefix
        yield from [Token()] * (tokens - prefix)
    elif kind == "prefix":
        prefix = rng.randint(0, tokens)
        yield from [Token(island=1)] * prefix
        yield from [Token()] * (tokens - prefix)
    else:
        yield from _interleaved(rng, tokens, kind)


def _interleaved(rng: random.Random, tokens: int, kind: str) -> Iterator[Token]:
    """Runs of text and of islands; some text reads only some modalities, and some tokens have no modality bit at all."""
    island = 0
    while tokens:
        length = min(tokens, rng.choice(_LENGTHS))
        bits = rng.choice((ALL_BITS, ALL_BITS, 0b0011, 0b0101, 0b0001, 0))
        if rng.random() < 0.5:
            yield from [Token(bits=bits)] * length
        elif kind == "EE":
            island += 1
            modality = 1 << rng.choice((1, 2, 31))
            yield from [Token(causal=False, island=_maybe_shared(rng, island), bits=modality)] * length
        else:
            island += 1
            yield from [Token(island=island, bits=bits)] * length
        tokens -= length


def _maybe_shared(rng: random.Random, island: int) -> int:
    """The island, an earlier one, or the last a word can number."""
    return rng.choice((island, island, island, rng.randint(1, island), (1 << 16) - 1))


def _with_padding(rng: random.Random, tokens: list[Token]) -> list[Token]:
    """Padding at the right, as most batches have, or here and there."""
    padding = Token(causal=False, document=0, island=0, bits=0)
    if rng.random() < 0.5:
        real = rng.randint(0, len(tokens))
        return tokens[:real] + [padding] * (len(tokens) - real)
    start = rng.randrange(len(tokens))
    return [padding if start <= i < start + 20 or rng.random() < 0.02 else token for i, token in enumerate(tokens)]


def _permutation(rng: random.Random, tokens: int) -> list[int]:
    """Blocks of 16, or single tokens, in random order."""
    size = rng.choice((1, 16))
    blocks = [list(range(first, min(first + size, tokens))) for first in range(0, tokens, size)]
    rng.shuffle(blocks)
    return [token for block in blocks for token in block]
