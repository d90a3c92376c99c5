"""`BlockPlan`: the tiles of a mask that a kernel visits, how it masks each, and the launch order of the work.

Tiles are classed from per-block summaries of words, never from a [Tq, Tk] mask:

    EMPTY    no pair visible: never visited
    FULL     every pair visible: no mask
    ROW      one document, every key before every query: a query sees all keys of the tile or none
    GENERAL  the mask is evaluated for every pair
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from mmcompile.errors import MaskError
from mmcompile.kernels.bitfield_attention.masks.classify import BLOCK as BLOCK
from mmcompile.kernels.bitfield_attention.masks.classify import Masks, unpack_classes
from mmcompile.kernels.bitfield_attention.masks.classify import TileClass as TileClass
from mmcompile.kernels.bitfield_attention.masks.launch_order import best_cap, work_items
from mmcompile.kernels.bitfield_attention.masks.visible_pairs import visible_pairs as visible_pairs

_CELLS_AT_ONCE = 1 << 21
_CLASSES = (TileClass.FULL, TileClass.ROW, TileClass.GENERAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLists:
    """Lists of the tiles that each block of queries (or of keys) visits, none of them EMPTY: FULL, then ROW, then GENERAL.

    The lists of all blocks are in `other`, one after another; `bounds` has the begin and end of each.
    """

    bounds: torch.Tensor = field(repr=False)
    """Offsets of each block's tiles in `other`, int32 [batch * blocks, 4]: begin of FULL, of ROW, of GENERAL, and the end."""
    other: torch.Tensor = field(repr=False)
    """Indices of the visited blocks, int32 [tiles]: of keys for each block of queries, or of queries for each block of keys.

    They ascend within each tile class (FULL, ROW, GENERAL) of a block's list.
    """
    items: torch.Tensor = field(repr=False)
    """Work items in launch order (longest first), int32 [items, 8].

    An item is: row of `bounds`, slot, begin and end of FULL, of ROW, of GENERAL. Slot -1 marks the only item of a block,
    which writes the result itself; another slot is the index of a partial result.
    """
    splits: torch.Tensor = field(repr=False)
    """Blocks with several items, int32 [split blocks, 3]: block (row of `bounds`), first and end index of its partial results."""
    num_slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """Tiles and work items of one attention call, shared by all its heads and by all layers with the same words and window."""

    batch: int
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    window: int | None
    queries: TileLists
    """Blocks of keys that each block of queries visits, for the forward and dQ."""
    keys: TileLists
    """Blocks of queries that each block of keys visits, for dK and dV."""


def plan_blocks(
    words: torch.Tensor,
    positions: torch.Tensor | None = None,
    kv_words: torch.Tensor | None = None,
    kv_positions: torch.Tensor | None = None,
    *,
    window: int | None = None,
    block_q: int = BLOCK,
    block_kv: int = BLOCK,
    cap: int | Literal["auto"] | None = None,
    num_programs: int = 264,
    heads_per_launch: int = 1,
) -> BlockPlan:
    """Plan the tiles of one attention call, on the CPU; the lists go to the device of `words`.

    Args:
        words, positions, kv_words, kv_positions, window, block_q, block_kv: mask and blocks, as for `classify.Masks`.
        cap: maximum number of tiles in one work item; None never splits, "auto" takes the fastest by the model of
            `launch_order`.
        num_programs: number of items in flight at a time, for "auto" (two per multiprocessor of an H100).
        heads_per_launch: number of heads in one launch, for "auto".

    Returns:
        The plan. Every tile that is not EMPTY is in exactly one item of `queries` and one of `keys`, and every block
        has an item that writes its result.

    Raises:
        MaskError: words or positions of a wrong dtype or shape, a cap below 1, or more than 2^31 tiles.
    """
    if isinstance(cap, int) and cap < 1:
        raise MaskError(f"an item of at most {cap} tiles does nothing; wanted a cap of 1 or more, None or 'auto'")
    masks = Masks(words, positions, kv_words, kv_positions, window=window, block_q=block_q, block_kv=block_kv)
    packed = masks.packed()
    by_query, by_key = (_compress(rows(packed, masks.blocks_kv)) for rows in (_query_rows, _key_rows))
    queries, keys = (
        _tile_lists(
            bounds,
            other,
            best_cap(bounds[:, 3] - bounds[:, 0], num_programs, heads_per_launch) if cap == "auto" else cap,
            words.device,
        )
        for bounds, other in (by_query, by_key)
    )
    return BlockPlan(
        batch=masks.batch,
        q_len=masks.q_len,
        kv_len=masks.kv_len,
        block_q=block_q,
        block_kv=block_kv,
        window=window,
        queries=queries,
        keys=keys,
    )


def _query_rows(packed: np.ndarray, blocks_kv: int) -> Iterator[np.ndarray]:
    flat = packed.reshape(-1, packed.shape[-1])
    step = max(1, _CELLS_AT_ONCE // blocks_kv)
    for first in range(0, len(flat), step):
        yield unpack_classes(flat[first : first + step])[:, :blocks_kv]


def _key_rows(packed: np.ndarray, blocks_kv: int) -> Iterator[np.ndarray]:
    blocks_q = packed.shape[1]
    rows = max(1, _CELLS_AT_ONCE // (blocks_q * blocks_kv))
    columns = blocks_kv if rows > 1 else max(4, _CELLS_AT_ONCE // blocks_q // 4 * 4)
    for first in range(0, len(packed), rows):
        for column in range(0, blocks_kv, columns):
            classes = unpack_classes(packed[first : first + rows, :, column // 4 : -(-(column + columns) // 4)])
            classes = classes[..., : min(columns, blocks_kv - column)].swapaxes(1, 2)
            yield np.ascontiguousarray(classes).reshape(-1, blocks_q)


def _compress(chunks: Iterator[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    bounds, other, begin = [], [], 0
    for classes in chunks:
        cells = np.arange(len(classes) + 1) * classes.shape[1]
        found = [np.flatnonzero(classes == kind) for kind in _CLASSES]
        ends = np.stack([np.searchsorted(flat, cells) for flat in found])  # within the class
        counts = np.diff(ends)
        places = np.cumsum(counts.T).reshape(counts.T.shape)
        tiles = np.empty(sum(map(len, found)), dtype=np.int32)
        for flat, count, end, place in zip(found, counts, ends[:, 1:], places.T, strict=True):
            tiles[np.arange(len(flat)) + np.repeat(place - end, count)] = flat - np.repeat(cells[:-1], count)
        bounds.append(np.concatenate([places[:, :1] - counts[:1].T, places], axis=1) + begin)
        other.append(tiles)
        begin += len(tiles)
    if begin > np.iinfo(np.int32).max:
        raise MaskError(
            f"a plan of {begin} tiles; offsets hold {np.iinfo(np.int32).max}: use larger blocks or shorter rows"
        )
    return np.concatenate(bounds).astype(np.int32), np.concatenate(other)


def _tile_lists(bounds: np.ndarray, other: np.ndarray, cap: int | None, device: torch.device) -> TileLists:
    items, splits = work_items(bounds, cap)
    return TileLists(
        bounds=torch.from_numpy(bounds).to(device),
        other=torch.from_numpy(other).to(device),
        items=torch.from_numpy(items).to(device),
        splits=torch.from_numpy(splits).to(device),
        num_slots=int(splits[-1, 2]) if len(splits) else 0,
    )
