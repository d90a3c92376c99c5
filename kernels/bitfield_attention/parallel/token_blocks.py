"""`TokenBlocks`: assignment of tokens to context-parallel ranks, balanced by attention work.

Attention dominates long sequences, and under a multimodal mask its work differs from token to token. The unit is a
block of consecutive tokens; the work of a block of queries is the number of key blocks it sees, which
`mmcompile.kernels.bitfield_attention.masks.block_plan.workload` counts without building the mask.

    lpt         longest processing time first, every rank the same number of blocks (default)
    lpt_free    lpt without equal counts: best balance, but ranks hold up to `token_cap` times the mean of tokens
    ptrr        blocks by descending work, dealt in serpentine order
    zigzag      each rank gets one piece from the front and the mirrored piece from the back
    stripe      blocks dealt in order
    contiguous  equal consecutive pieces
    random      equal counts, shuffled

Ranks that hold fewer tokens than the longest are filled up with free rows (index -1), whose mask word is 0: no token
sees them, and they see none.

Source: LPT over token blocks, Cornstarch (arXiv 2503.11367, section 4.3); the bound of LPT, Graham 1969.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from heapq import heappop, heapreplace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from mmcompile.errors import ConfigError
from mmcompile.kernels.bitfield_attention.masks.block_plan import BLOCK

_MIN_BLOCK = 16
"""Minimum number of tokens in a block: the shortest dim of a tensor-core tile."""
_MIN_BLOCKS_PER_RANK = 4
_TARGET_BALANCE = 1.004
"""Maximum over mean of ranks' work at which equal-count LPT is not refined any more."""
_TOKEN_CAP = 1.25
"""Default `token_cap` of `lpt_free`: maximum number of a rank's blocks over the mean."""

_SPLITS_PER_RANK = 4
_PAIRED_BLOCKS = 7
"""Number of blocks that each of two ranks gives up to be shared out anew: 14 blocks can be halved in 3432 ways."""
_FREE = -1


class BlockPolicy(StrEnum):
    """Rule that assigns blocks to ranks, described in the module docstring."""

    LPT = "lpt"
    LPT_FREE = "lpt_free"
    PTRR = "ptrr"
    ZIGZAG = "zigzag"
    STRIPE = "stripe"
    CONTIGUOUS = "contiguous"
    RANDOM = "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBlocks:
    """Token blocks of every rank. The blocks of a rank ascend, so that its tokens keep their order."""

    policy: BlockPolicy
    tokens: int
    """Number of tokens of the sequence, without free rows."""
    block: int
    """Number of tokens in a block."""
    blocks: Tensor = field(repr=False)
    """Block indices of each rank, int64 [ranks, blocks per rank]; -1 fills ranks that have fewer."""
    work: tuple[int, ...]
    """Attention work of each rank, in the unit of the given workload."""

    @property
    def num_ranks(self) -> int:
        """Return the number of context-parallel ranks."""
        return self.blocks.shape[0]

    @property
    def local_tokens(self) -> int:
        """Return the number of token rows on every rank, free rows included."""
        return self.blocks.shape[1] * self.block

    @property
    def balance(self) -> float:
        """Return maximum over mean of the ranks' work: the time of attention relative to the ideal, 1.0."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    @property
    def token_skew(self) -> float:
        """Return a rank's rows over the mean number of tokens: the time of all but attention, relative to the ideal, 1.0."""
        return self.local_tokens * self.num_ranks / self.tokens

    def index(self, rank: int) -> Tensor:
        """Return the token index of each row of a rank, int64 [local_tokens]; -1 for free rows."""
        return self._tokens_of(self.blocks[rank])

    def rearrange(self) -> Tensor:
        """Return `index` of all ranks, int64 [ranks, local_tokens]. Gathered keys and values have this order."""
        return self._tokens_of(self.blocks)

    def restore(self) -> Tensor:
        """Return the index of each token in `rearrange().flatten()`, int64 [tokens]: `gathered[restore]` is in token order."""
        order = self.rearrange().flatten()
        rows = (order >= 0).nonzero().squeeze(1)
        return torch.empty(self.tokens, dtype=torch.int64).scatter_(0, order[rows], rows)

    def _tokens_of(self, blocks: Tensor) -> Tensor:
        tokens = (blocks.unsqueeze(-1) * self.block + torch.arange(self.block)).flatten(-2)
        free = (tokens < 0) | (tokens >= self.tokens)
        return tokens.masked_fill_(free, _FREE)


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
    """Return the number of rows of all ranks under equal block counts; `block` defaults to `choose_block`."""
    unit = ranks * (block or choose_block(tokens, ranks))
    return max(1, -(-tokens // unit)) * unit


def distribute(
    workload: Tensor | np.ndarray | Sequence[int],
    *,
    tokens: int,
    ranks: int,
    block: int = BLOCK,
    policy: BlockPolicy | str = BlockPolicy.LPT,
    seed: int | None = None,
    token_cap: float | None = None,
) -> TokenBlocks:
    """Assign every block of a sequence to a rank. The same input gives the same result on every machine.

    Args:
        workload: [blocks] or [rows, blocks] int64 work of each block of queries; rows of one microbatch share the
            distribution, so their work is added.
        tokens: length of the sequence; blocks = ceil(tokens / block).
        ranks: number of context-parallel ranks.
        block: number of tokens in a block.
        policy: rule of assignment, described in the module docstring.
        seed: random seed of the policy `random`; default 0.
        token_cap: option of `lpt_free`: no rank holds more than this times the mean number of blocks; default 1.25.

    Raises:
        ConfigError: sizes that do not fit each other, an unknown policy, or an option that the policy does not read.
    """
    policy = _check(policy, ranks, seed, token_cap)
    work = np.asarray(workload, dtype=np.int64)
    work = work.sum(0) if work.ndim == 2 else work
    if tokens < 1 or work.shape != (-(-tokens // block),):
        raise ConfigError(
            f"{tokens} tokens in blocks of {block} need the work of {-(-tokens // block)} blocks, got {list(work.shape)}"
        )
    padded = np.zeros(padded_length(tokens, ranks, block) // block, dtype=np.int64)
    padded[: len(work)] = work
    owned = _assign(padded, ranks, policy, seed or 0, token_cap or _TOKEN_CAP)
    return TokenBlocks(
        policy=policy,
        tokens=tokens,
        block=block,
        blocks=torch.from_numpy(_table(owned, len(work))),
        work=tuple(int(padded[blocks].sum()) for blocks in owned),
    )


def _check(policy: str, ranks: int, seed: int | None, token_cap: float | None) -> BlockPolicy:
    if policy not in list(BlockPolicy):
        raise ConfigError(f"no distribution is called {policy!r}; choose one of {', '.join(BlockPolicy)}")
    if ranks < 1:
        raise ConfigError(f"tokens need at least 1 rank, got {ranks}")
    if seed is not None and policy != BlockPolicy.RANDOM:
        raise ConfigError(f"seed has no effect on the distribution {str(policy)!r}, only on 'random'; leave it out")
    if token_cap is not None and policy != BlockPolicy.LPT_FREE:
        raise ConfigError(
            f"token_cap has no effect on the distribution {str(policy)!r}, only on 'lpt_free'; leave it out"
        )
    if token_cap is not None and token_cap < 1:
        raise ConfigError(f"token_cap must be at least 1, or tokens are left over; got {token_cap}")
    return BlockPolicy(policy)


def _assign(work: np.ndarray, ranks: int, policy: BlockPolicy, seed: int, cap: float) -> list[np.ndarray]:
    """Return block indices of every rank, ascending. The number of blocks in `work` is a multiple of `ranks`."""
    each = len(work) // ranks
    if policy is BlockPolicy.LPT:
        owned = _evened(work, _lpt(work, ranks, each))
    elif policy is BlockPolicy.LPT_FREE:
        owned = list(_lpt(work, ranks, max(each, int(cap * each))))
    elif policy is BlockPolicy.PTRR:
        dealt = np.argsort(-work, kind="stable").reshape(each, ranks)
        dealt[1::2] = dealt[1::2, ::-1].copy()
        owned = list(dealt.T)
    else:
        owned = list(_in_order(len(work), ranks, policy, seed))
    return [np.sort(blocks) for blocks in owned]


def _in_order(num_blocks: int, ranks: int, policy: BlockPolicy, seed: int) -> np.ndarray:
    """Return the blocks of each rank, [ranks, blocks per rank] indices, by a policy that ignores the work, such as `zigzag`."""
    blocks, each = np.arange(num_blocks), num_blocks // ranks
    if policy is BlockPolicy.STRIPE:
        return blocks.reshape(each, ranks).T
    if policy is BlockPolicy.RANDOM:
        return np.random.default_rng(seed).permutation(num_blocks).reshape(ranks, each)
    if policy is BlockPolicy.CONTIGUOUS:
        return blocks.reshape(ranks, each)
    front = ranks * -(-each // 2)
    return np.concatenate([blocks[:front].reshape(ranks, -1), blocks[front:].reshape(ranks, -1)[::-1]], axis=1)


def _lpt(work: np.ndarray, ranks: int, most: int) -> list[np.ndarray]:
    """Assign blocks in descending work, each to the rank with the least work so far among those with fewer than `most` blocks."""
    order = np.argsort(-work, kind="stable")
    # One integer holds work and rank, so that the heap compares no tuples.
    heap, room, owners = list(range(ranks)), [most] * ranks, array("q")
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
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=ranks))[:-1])


def _evened(work: np.ndarray, owned: list[np.ndarray]) -> list[np.ndarray]:
    """Redistribute blocks between the rank with the most work and a rank with little, until balanced or no pair gains.

    With equal counts, LPT has no small blocks left to balance the last large ones; this matters with few blocks per rank.
    """
    load = np.array([work[blocks].sum() for blocks in owned])
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
                load[[high, low]] = [work[blocks].sum() for blocks in pair]
                break
        else:
            break
    return owned


def _split(work: np.ndarray, heavy: np.ndarray, light: np.ndarray, gap: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Share out a few blocks of two ranks anew, as evenly as possible by work; no rank's number of blocks changes.

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
    """Return `few` positions in `blocks`, whose blocks are evenly spaced in the order by work, from the least to the most."""
    return np.argsort(work[blocks], kind="stable")[np.linspace(0, len(blocks) - 1, few).astype(np.int64)]


@cache
def _halves(few: int) -> np.ndarray:
    """Return all ways to choose `few` of 2 * few items, int64 [ways, 2 * few]: 1 if the item is chosen, else 0."""
    choices = list(combinations(range(2 * few), few))
    halves = np.zeros((len(choices), 2 * few), dtype=np.int64)
    np.put_along_axis(halves, np.array(choices), 1, axis=1)
    return halves


def _table(owned: list[np.ndarray], num_blocks: int) -> np.ndarray:
    """Return the blocks of ranks, [ranks, maximum blocks per rank] indices; -1 fills rows and replaces blocks past the end."""
    table = np.full((len(owned), max(map(len, owned))), _FREE, dtype=np.int64)
    for rank, blocks in enumerate(owned):
        table[rank, : len(blocks)] = np.where(blocks < num_blocks, blocks, _FREE)
    return table
