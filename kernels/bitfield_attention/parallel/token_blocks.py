"""`distribute`: assignment of tokens to context-parallel ranks, balanced by attention work.

Attention dominates long sequences, and under a multimodal mask its work differs from token to token. The unit is a
block of consecutive tokens; the work of a block of queries is the number of key blocks it sees, which
`mmcompile.kernels.bitfield_attention.masks.classify.Masks.workload` counts without building the mask. Blocks are
assigned by LPT (longest processing time first) with as many blocks on every rank.

Rows that no token fills are free (index -1). Their mask word is 0: no token sees them, and they see none.

Source: LPT over token blocks, Cornstarch (arXiv 2503.11367, section 4.3); the bound of LPT, Graham 1969.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from heapq import heappop, heapreplace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.masks.classify import BLOCK

_MIN_BLOCK = 16
"""Minimum number of tokens in a block: the shortest dim of a tensor-core tile."""
_MIN_BLOCKS_PER_RANK = 4
_TARGET_BALANCE = 1.004
"""Ratio of the largest to the mean work of ranks at which the assignment of blocks is good enough."""
_SPLITS_PER_RANK = 4
_PAIRED_BLOCKS = 7
"""Number of blocks that each of two ranks gives up to share them out again: 14 blocks can be halved in 3432 ways."""
_FREE = -1


def choose_block(tokens: int, ranks: int) -> int:
    """Return the largest power of two from 16 to 128 that leaves each rank at least 4 blocks; 16 if none does.

    A block shorter than a tile of the kernel mixes distant tokens in one tile, which then is rarely empty; fewer than 4
    blocks per rank cannot be balanced.
    """
    block = BLOCK
    while block > _MIN_BLOCK and tokens < block * ranks * _MIN_BLOCKS_PER_RANK:
        block //= 2
    return block


def padded_length(tokens: int, ranks: int, block: int | None = None) -> int:
    """Return `tokens` rounded up so that every rank has the same number of whole blocks; `block` defaults to `choose_block`."""
    unit = ranks * (block or choose_block(tokens, ranks))
    return max(1, -(-tokens // unit)) * unit


def distribute(workload: Tensor | np.ndarray | Sequence[int], *, tokens: int, ranks: int, block: int = BLOCK) -> Tensor:
    """Assign every block of a sequence to a rank. The same input gives the same result on every machine.

    Args:
        workload: [blocks] or [rows, blocks] int64 work of each block of queries; rows of one microbatch share the
            distribution, so their work is added.
        tokens: length of the sequence; blocks = ceil(tokens / block).
        ranks: number of context-parallel ranks.
        block: number of tokens in a block.

    Returns:
        Block indices of each rank, int64 [ranks, blocks per rank], ascending; the last blocks may be past the end.

    Raises:
        ConfigError: sizes that do not fit each other.
    """
    if ranks < 1:
        raise ConfigError(f"tokens need at least 1 rank, got {ranks}")
    work = np.asarray(workload, dtype=np.int64)
    work = work.sum(0) if work.ndim == 2 else work
    if tokens < 1 or work.shape != (-(-tokens // block),):
        raise ConfigError(
            f"{tokens} tokens in blocks of {block} need the work of {-(-tokens // block)} blocks, got {list(work.shape)}"
        )
    padded = np.zeros(padded_length(tokens, ranks, block) // block, dtype=np.int64)
    padded[: len(work)] = work
    return torch.from_numpy(np.sort(_evened(padded, _lpt(padded, ranks))))


def token_index(blocks: Tensor, tokens: int, block: int) -> Tensor:
    """Return the token index of each row of every rank; -1 for free rows. Gathered keys and values have this order.

    Args:
        blocks: [ranks, blocks per rank] block indices, negative or past the end for none.
        tokens: length of the sequence.
        block: number of tokens in a block.

    Returns:
        int64 [ranks, blocks per rank * block].
    """
    index = (blocks.unsqueeze(-1) * block + torch.arange(block)).flatten(1)
    return index.masked_fill_((index < 0) | (index >= tokens), _FREE)


def _lpt(work: np.ndarray, ranks: int) -> np.ndarray:
    """Assign the same number of blocks to every rank: by descending work, each to the least loaded rank that may still take one.

    Returns:
        Block indices of each rank, int64 [ranks, blocks per rank].
    """
    order = np.argsort(-work, kind="stable")
    # One integer holds work and rank, so that the heap compares no tuples.
    heap, room, owners = list(range(ranks)), [len(work) // ranks] * ranks, array("q")
    for load in (work[order] * ranks).tolist():
        least = heap[0]
        rank = least % ranks
        owners.append(rank)
        room[rank] -= 1
        if room[rank]:
            heapreplace(heap, least + load)
        else:
            heappop(heap)
    owner = np.empty(len(work), dtype=np.uint16)  # sorted in linear time
    owner[order] = owners
    return np.argsort(owner, kind="stable").reshape(ranks, -1)


def _evened(work: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Exchange blocks between the rank with the most work and one with little, until work is even or no exchange helps.

    LPT alone ends uneven with few blocks per rank, as it has no small blocks left to balance the last large ones.
    """
    load = work[owned].sum(1)
    ranks, total = len(owned), int(load.sum())
    goal = max(-(-total // ranks), int(_TARGET_BALANCE * total / ranks))
    tries = _SPLITS_PER_RANK * ranks
    while tries > 0 and load.max() > goal:
        high = int(load.argmax())
        for low in np.argsort(load, kind="stable").tolist():
            tries -= 1
            pair = _split(work, owned[high], owned[low], int(load[high] - load[low]))
            if pair is not None:
                owned[high], owned[low] = pair
                load[[high, low]] = work[owned[[high, low]]].sum(1)
                break
        else:
            break
    return owned


def _split(work: np.ndarray, heavy: np.ndarray, light: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Share out a few blocks of two ranks again, as evenly as possible by work; no rank's number of blocks changes.

    Args:
        work: work of every block.
        heavy, light: block indices of the rank with more work and of the rank with less.
        gap: difference between the ranks' work.

    Returns:
        New block indices of (heavy, light); None if the gap would not shrink.
    """
    few = min(len(heavy), _PAIRED_BLOCKS)
    give, take = (_spaced(blocks, work, few) for blocks in (heavy, light))
    both = np.concatenate([heavy[give], light[take]])
    halves = _halves(few)
    moved = work[heavy[give]].sum() - halves @ work[both]
    rest = np.abs(gap - 2 * moved)
    best = int(rest.argmin())
    if rest[best] >= gap:
        return None
    chosen = halves[best].astype(bool)
    heavy, light = heavy.copy(), light.copy()
    heavy[give], light[take] = both[chosen], both[~chosen]
    return heavy, light


def _spaced(blocks: np.ndarray, work: np.ndarray, few: int) -> np.ndarray:
    return np.argsort(work[blocks], kind="stable")[np.linspace(0, len(blocks) - 1, few).astype(np.int64)]


@cache
def _halves(few: int) -> np.ndarray:
    """Return all ways to choose `few` of 2 * few items, int64 [ways, 2 * few]: 1 if the item is chosen, else 0."""
    choices = list(combinations(range(2 * few), few))
    halves = np.zeros((len(choices), 2 * few), dtype=np.int64)
    np.put_along_axis(halves, np.array(choices), 1, axis=1)
    return halves
