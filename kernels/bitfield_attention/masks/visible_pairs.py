"""Exact number of visible (query, key) pairs of a mask, counted without the mask: the work of attention."""

from __future__ import annotations

import numpy as np
import torch

from mmcompile.kernels.bitfield_attention.masks.classify import check_arguments
from mmcompile.kernels.bitfield_attention.masks.words import MAX_DOCUMENT, MAX_INSTANCE

_POSITION_BITS = 32


def visible_pairs(
    words: torch.Tensor,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    *,
    window: int | None = None,
) -> int:
    """Count pairs (query, key) in which the query sees the key, over the batch.

    pairs = causal pairs inside documents + pairs inside islands - causal pairs inside islands; keys before a query are
    counted by binary search among the sorted positions of each distinct set of modality bits, O(tokens log tokens) for
    each set.

    Args:
        words: [batch, Tq] int64. positions: [batch, Tq] integer, or None for 0, 1, 2, ...
        kv_words, kv_positions: words and positions of the keys, [batch, Tk]; None for those of the queries.
        window: reach of the causal term in tokens, or None.

    Raises:
        MaskError: words or positions of a wrong dtype or shape.
    """
    check_arguments(words, positions, kv_words, kv_positions, window)
    if kv_words is None:
        kv_words, kv_positions = words, positions if kv_positions is None else kv_positions
    queries, keys = _rows(words, positions), _rows(kv_words, kv_positions)
    return sum(_row_pairs(*query, *key, window) for query, key in zip(queries, keys, strict=True))


def _rows(words: torch.Tensor, positions: torch.Tensor | None) -> list[tuple[np.ndarray, np.ndarray]]:
    if positions is None:
        positions = torch.arange(words.shape[1]).expand_as(words)
    return list(zip(words.cpu().numpy(), positions.long().cpu().numpy(), strict=True))


def _row_pairs(
    words: np.ndarray, positions: np.ndarray, kv_words: np.ndarray, kv_positions: np.ndarray, window: int | None
) -> int:
    document, kv_document = (x >> 48 & MAX_DOCUMENT for x in (words, kv_words))
    island, kv_island = (x >> 32 & (MAX_DOCUMENT << 16 | MAX_INSTANCE) for x in (words, kv_words))
    inside, kv_inside = ((x & MAX_INSTANCE != 0) & (x > MAX_INSTANCE) for x in (island, kv_island))
    causal, real = (words < 0) & (document != 0), kv_document != 0
    query, key = (document, words, positions), (kv_document, kv_words, kv_positions)
    by_document = _causal_pairs(_take(query, causal), _take(key, real), window)
    query, key = (island, words, positions), (kv_island, kv_words, kv_positions)
    by_island = _causal_pairs(_take(query, causal & inside), _take(key, kv_inside), window)
    return by_document - by_island + _equal_pairs(island[inside], kv_island[kv_inside])


def _take(arrays: tuple[np.ndarray, ...], where: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(x[where] for x in arrays)


def _causal_pairs(query: tuple[np.ndarray, ...], key: tuple[np.ndarray, ...], window: int | None) -> int:
    """Count (query, key) pairs with equal group id in which the key is not later, is in the window, and shares a modality bit.

    Args:
        query, key: (group id, word, position), each with one entry per token; a group is a document or an island.
        window: causal reach in tokens, or None.
    """
    (group, words, positions), (kv_group, kv_words, kv_positions) = query, key
    bits, kv_bits = words & 0xFFFFFFFF, kv_words & 0xFFFFFFFF
    latest = group << _POSITION_BITS | positions
    reach = positions + 1 if window is None else np.minimum(positions + 1, window)
    earliest = latest - reach + 1
    kv_places = kv_group << _POSITION_BITS | kv_positions
    pairs = 0
    for alike in np.unique(kv_bits):
        meets, places = (bits & alike) != 0, np.sort(kv_places[kv_bits == alike])
        upto, before = (
            np.searchsorted(places, latest[meets], "right"),
            np.searchsorted(places, earliest[meets], "left"),
        )
        pairs += int(upto.sum() - before.sum())
    return pairs


def _equal_pairs(ids: np.ndarray, kv_ids: np.ndarray) -> int:
    values, counts = np.unique(ids, return_counts=True)
    kv_values, kv_counts = np.unique(kv_ids, return_counts=True)
    _, left, right = np.intersect1d(values, kv_values, assume_unique=True, return_indices=True)
    return int((counts[left] * kv_counts[right]).sum())
