"""Work items of an attention launch, longest first; long lists of tiles are split so that all programs end together.

The model of a launch, in tiles [Empirical]: an item of n tiles takes n + 1.5, and 2 more if it writes a partial result
that has to be merged; programs take the next item of the list as they become free.
"""

from __future__ import annotations

import numpy as np

ITEM_COST = 1.5
PARTIAL_COST = 2.0
CAPS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers that `best_cap` tries as the maximum number of tiles in a work item, which one kernel program computes at a time."""
_TOLERANCE = 0.05
"""Fraction of the ideal time of a launch (equal work per program) that splitting a block's tiles over items has to save."""


def work_items(bounds: np.ndarray, cap: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Split the tiles of every block into items of nearly equal size and at most `cap` tiles, longest items first.

    Args:
        bounds: int32 [rows, 4], the `bounds` of `TileLists`.
        cap: maximum number of tiles in an item; None for one item per block.

    Returns:
        items int32 [items, 8] and splits int32 [split rows, 3], as in `TileLists`. A row without tiles has an item too,
        which writes the result of a query that sees no key.
    """
    tiles = bounds[:, 3] - bounds[:, 0]
    pieces = _pieces(tiles, cap)
    row = np.repeat(np.arange(len(bounds), dtype=np.int32), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin, end = (bounds[row, 0] + tiles[row] * (piece + side) // pieces[row] for side in (0, 1))
    split = pieces > 1
    slot = np.where(split[row], np.cumsum(split[row]) - 1, -1)
    items = np.empty((len(row), 8), dtype=np.int32)
    items[:, 0], items[:, 1] = row, slot
    for index in range(3):
        items[:, 2 + 2 * index] = np.clip(bounds[row, index], begin, end)
        items[:, 3 + 2 * index] = np.clip(bounds[row, index + 1], begin, end)
    last_slot = np.cumsum(pieces[split])
    splits = np.stack([np.flatnonzero(split), last_slot - pieces[split], last_slot], axis=-1).astype(np.int32)
    return items[np.argsort(begin - end, kind="stable")], splits


def best_cap(tiles: np.ndarray, programs: int, heads: int) -> int | None:
    """Return the maximum number of tiles per item with which a launch ends first; None if splits gain under 5 % of ideal time.

    Args:
        tiles: [rows] number of tiles of each block.
        programs: number of items in flight at a time.
        heads: number of heads in one launch; each head runs all rows.
    """
    whole = tiles + ITEM_COST
    ideal = heads * whole.sum() / programs
    if whole.max(initial=0) <= _TOLERANCE * ideal:  # greedy lists end at most one item late
        return None
    unsplit = _makespan(whole, programs, heads)
    if unsplit <= (1 + _TOLERANCE) * ideal:
        return None
    spans = {cap: _makespan(_split_costs(tiles, cap), programs, heads) for cap in CAPS if cap < tiles.max()}
    cap = min(spans, key=lambda x: (spans[x], -x), default=None)
    return cap if cap is not None and spans[cap] < unsplit - _TOLERANCE * ideal else None


def _pieces(tiles: np.ndarray, cap: int | None) -> np.ndarray:
    return np.ones_like(tiles) if cap is None else np.maximum(1, -(-tiles // cap))


def _split_costs(tiles: np.ndarray, cap: int) -> np.ndarray:
    pieces = _pieces(tiles, cap)
    return np.repeat(tiles / pieces + ITEM_COST + PARTIAL_COST * (pieces > 1), pieces)


def _makespan(costs: np.ndarray, programs: int, heads: int) -> float:
    """Return the time in which a launch is done, in units of the time of one tile; items start longest first.

    Items are given to programs in rounds: one item to each program, the longest to the least loaded one. Items shorter than 1 %
    of the ideal time fill the programs evenly.

    Args:
        costs: time of each item, float64 [items]; every head runs all items.
    """
    costs = np.repeat(np.sort(costs)[::-1], heads)
    total = costs.sum()
    load = np.zeros(programs)
    for first in range(0, len(costs), programs):
        if costs[first] <= 0.01 * total / programs:
            return max(load.max(), total / programs + costs[first])
        part = costs[first : first + programs]
        load.sort()
        load[: len(part)] += part
    return load.max()
