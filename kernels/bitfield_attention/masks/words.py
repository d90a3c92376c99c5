"""BAM-64: a multimodal attention mask as one int64 word per token.

    bit 63      C     causal: sees earlier tokens of its document whose modality bits it shares
    bits 62..48 DOC   document (packed sample), 1..32767; 0 is padding
    bits 47..32 INST  bidirectional island inside the document (one image, one clip), 1..65535; 0 is none
    bits 31..0  MOD   modality bits; bit 0 is text

    visible(q, k) = DOC(q) = DOC(k) != 0
                    and (C(q) and pos(k) <= pos(q) and MOD(q) & MOD(k) != 0 and pos(q) - pos(k) < window
                         or INST(q) = INST(k) != 0)

`pos` counts tokens before any context-parallel permutation; it is never the rotary position. A sliding window bounds
the causal term only.

Source: the bitfield of Cornstarch (arXiv 2503.11367, section 4.3), with document and island ids as equality fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_DOCUMENT = (1 << 15) - 1
MAX_INSTANCE = (1 << 16) - 1
NUM_MODALITIES = 32
PADDING = 0
"""Word of a padding token, which sees no token and is seen by none."""


def pack(
    *, causal: torch.Tensor, document: torch.Tensor, instance: torch.Tensor, modalities: torch.Tensor
) -> torch.Tensor:
    """Pack fields into words. Values must be in range; the functions that take user input check them.

    Args:
        causal: bool of any shape, True for a token that sees earlier ones.
        document, instance, modalities: int64 of the same shape.

    Returns:
        int64 words; padding (document 0) is the word 0, regardless of the other fields.
    """
    word = (document << 48) | (instance << 32) | modalities
    word = torch.where(causal, word | torch.iinfo(torch.int64).min, word)
    return torch.where(document == 0, torch.zeros_like(word), word)


def document(words: torch.Tensor) -> torch.Tensor:
    """Return the document id of each word, int64; the mask after the shift removes the sign bits of negative words."""
    return (words >> 48) & MAX_DOCUMENT


def instance(words: torch.Tensor) -> torch.Tensor:
    """Return the island id of each mask word, int64; 0 for none. Tokens of one island see each other in both directions."""
    return (words >> 32) & MAX_INSTANCE


def visible(
    words: torch.Tensor,
    positions: torch.Tensor,
    kv_words: torch.Tensor,
    kv_positions: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Return the attention mask that the mask words of queries and keys encode, for tiles small enough to hold it.

    Args:
        words, positions: [..., Tq], int64 words (as `pack` returns) and positions of queries.
        kv_words, kv_positions: [..., Tk], of keys.
        window: causal reach in tokens, or None.

    Returns:
        [..., Tq, Tk] bool, True where the query sees the key.
    """
    query, key = words[..., :, None], kv_words[..., None, :]
    ahead = positions[..., :, None] - kv_positions[..., None, :]
    causal = (query < 0) & (ahead >= 0) & ((query & key & 0xFFFFFFFF) != 0)
    if window is not None:
        causal &= ahead < window
    differ = query ^ key
    same_document = ((differ & (MAX_DOCUMENT << 48)) == 0) & (document(kv_words) != 0)[..., None, :]
    island = ((differ & (MAX_INSTANCE << 32)) == 0) & (instance(kv_words) != 0)[..., None, :]
    return same_document & (causal | island)


@dataclass(frozen=True, slots=True)
class MaskWords:
    """Words and positions of the queries and keys of one attention call; evaluates the mask of any tile of them."""

    words: torch.Tensor
    """Mask words of the queries, int64 [B, Tq]."""
    positions: torch.Tensor
    """Positions of the queries, integers [B, Tq]."""
    kv_words: torch.Tensor
    """Mask words of the keys, int64 [B, Tk]."""
    kv_positions: torch.Tensor
    """Positions of the keys, integers [B, Tk]."""
    window: int | None = None
    """Number of tokens that the causal term reaches back; None for no limit."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Words and positions of the queries, then of the keys."""
        return self.words, self.positions, self.kv_words, self.kv_positions

    def tile(self, rows: slice, queries: slice | torch.Tensor, keys: slice | torch.Tensor) -> torch.Tensor:
        """Return the mask of a tile: bool [rows, queries, keys]."""
        query = self.words[rows, queries], self.positions[rows, queries]
        return visible(*query, self.kv_words[rows, keys], self.kv_positions[rows, keys], self.window)
