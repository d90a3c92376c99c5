"""Work of the eager path: chunks of queries, each with the contiguous ranges of keys it visits.

A chunk holds queries of one block of one batch row, with all heads; its tiles of all classes are joined into ranges of
adjacent keys, so that one matrix product covers many tiles. A block with ROW tiles makes two chunks: the queries that
see keys of these tiles, and the rest, which skips the tiles. Batches whose rows are a single tile take several rows in
one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from mmcompile.kernels.bitfield_attention.masks.block_plan import BlockPlan
from mmcompile.kernels.bitfield_attention.masks.words import MaskWords


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRange:
    """A range of adjacent keys, multiplied with the chunk's queries in one matrix product."""

    keys: slice
    partial: tuple[slice, ...]
    """Subranges of `keys` that are not visible to every query of the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Queries that are computed together, with the key ranges that they visit."""

    rows: slice
    """Batch rows whose queries are in the chunk."""
    queries: slice | torch.Tensor
    """Queries of the chunk: all queries of a block as a slice, or indices of some of them."""
    ranges: tuple[KeyRange, ...]


def chunks(plan: BlockPlan, mask: MaskWords, num_heads: int, max_scores: int) -> Iterator[Chunk]:
    """Yield the work of an attention call as chunks, in a fixed order; every query is in one chunk.

    The keys of a chunk are read in ranges of consecutive tiles.

    Args:
        plan: block plan of the call.
        mask: words and positions that the plan was made from.
        num_heads: query heads.
        max_scores: maximum number of scores (elements) in one range, over all heads; a range has at least one tile.
    """
    if plan.q_len <= plan.block_q and plan.kv_len <= plan.block_kv:
        yield from _small(plan, num_heads, max_scores)
        return
    blocks = -(-plan.q_len // plan.block_q)
    most = max(1, max_scores // (num_heads * plan.block_q * plan.block_kv))
    other = plan.queries.other.numpy(force=True)
    for index, (full, by_row, general, end) in enumerate(plan.queries.bounds.tolist()):
        row, block = divmod(index, blocks)
        rows = slice(row, row + 1)
        queries = slice(block * plan.block_q, min(plan.q_len, (block + 1) * plan.block_q))
        tiles = other[full:by_row], other[by_row:general], other[general:end]
        for part, whole, mixed in _parts(mask, rows, queries, tiles, plan.block_kv):
            yield Chunk(rows=rows, queries=part, ranges=_ranges(whole, mixed, plan, most))


def _parts(
    mask: MaskWords, rows: slice, queries: slice, tiles: tuple[np.ndarray, np.ndarray, np.ndarray], block_kv: int
) -> Iterator[tuple[slice | torch.Tensor, np.ndarray, np.ndarray]]:
    """Yield the groups of a block's queries that visit the same tiles: (queries, tiles seen wholly, tiles seen in part).

    `tiles` are the key-block indices of the block's FULL, ROW and GENERAL tiles.
    """
    whole, by_row, mixed = tiles
    if not len(by_row):
        yield queries, whole, mixed
        return
    # A query sees all keys of a ROW tile or none: the first key answers for all.
    firsts = torch.from_numpy(by_row.astype(np.int64) * block_kv).to(mask.words.device)
    seen = mask.tile(rows, queries, firsts)[0]
    some = seen.any(1)
    by_all = seen[some].all(0).numpy(force=True)
    indices = torch.arange(queries.start, queries.stop, device=some.device)
    if some.any():
        yield indices[some], np.concatenate([whole, by_row[by_all]]), np.concatenate([mixed, by_row[~by_all]])
    if not some.all():
        yield indices[~some], whole, mixed


def _small(plan: BlockPlan, num_heads: int, max_scores: int) -> Iterator[Chunk]:
    """Yield chunks if all queries and keys of a batch row fit in one tile: each has several batch rows, all scores are masked."""
    keys = slice(0, plan.kv_len)
    together = max(1, max_scores // (num_heads * plan.block_q * plan.block_kv))
    for first in range(0, plan.batch, together):
        rows = slice(first, min(plan.batch, first + together))
        yield Chunk(rows=rows, queries=slice(0, plan.q_len), ranges=(KeyRange(keys=keys, partial=(keys,)),))


def _ranges(whole: np.ndarray, mixed: np.ndarray, plan: BlockPlan, most: int) -> tuple[KeyRange, ...]:
    """Join adjacent tiles to key ranges of at most `most` tiles; queries see `whole` tiles wholly and `mixed` tiles in part."""
    tiles = np.concatenate([whole, mixed])
    order = np.argsort(tiles, kind="stable")
    tiles, partial = tiles[order], order >= len(whole)
    ranges = []
    for begin, end in _runs(tiles):
        for first in range(begin, end, most):
            part = slice(first, min(end, first + most))
            masked = tiles[part][partial[part]]
            keys = _keys(tiles[part.start], tiles[part.stop - 1], plan)
            hidden = tuple(_keys(masked[a], masked[b - 1], plan) for a, b in _runs(masked))
            ranges.append(KeyRange(keys=keys, partial=hidden))
    return tuple(ranges)


def _runs(tiles: np.ndarray) -> list[tuple[int, int]]:
    """Return (begin, end) of each run of consecutive numbers, as positions in `tiles`, which is ascending."""
    if not len(tiles):
        return []
    cuts = np.flatnonzero(np.diff(tiles) != 1) + 1
    edges = [0, *cuts.tolist(), len(tiles)]
    return list(zip(edges, edges[1:], strict=False))


def _keys(first: int, last: int, plan: BlockPlan) -> slice:
    return slice(int(first) * plan.block_kv, min(plan.kv_len, (int(last) + 1) * plan.block_kv))
