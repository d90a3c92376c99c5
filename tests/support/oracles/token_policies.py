"""Distributions of token blocks beside ours: those of other systems, and one without equal counts.

lpt         ours
lpt_free    longest processing time first without equal counts: ranks hold up to `token_cap` times the mean of tokens
ptrr        blocks by descending work, dealt in serpentine order
zigzag      each rank gets one piece from the front and the mirrored piece from the back
stripe      blocks dealt in order
contiguous  equal consecutive pieces
random      equal counts, shuffled
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from mmcompile.kernels.bitfield_attention.masks.classify import BLOCK
from mmcompile.kernels.bitfield_attention.parallel.token_blocks import distribute, padded_length, token_index


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

    blocks: Tensor = field(repr=False)
    """[ranks, blocks of a rank]; -1 where there is none."""
    tokens: int
    block: int
    work: tuple[int, ...]
    """Of each rank."""

    @property
    def order(self) -> Tensor:
        """Token of each row of each rank."""
        return token_index(self.blocks, self.tokens, self.block)

    @property
    def local_tokens(self) -> int:
        return self.order.shape[1]

    @property
    def balance(self) -> float:
        """Maximum over mean of the ranks' work."""
        total = sum(self.work)
        return max(self.work) * len(self.work) / total if total else 1.0

    @property
    def token_skew(self) -> float:
        """A rank's rows over the mean number of tokens."""
        return self.order.numel() / self.tokens

    def restore(self) -> Tensor:
        """`gathered[restore]` is in token order."""
        order = self.order.flatten()
        rows = (order >= 0).nonzero().squeeze(1)
        return torch.empty(self.tokens, dtype=torch.int64).scatter_(0, order[rows], rows)


def token_blocks(
    workload: Tensor | np.ndarray | Sequence[int],
    *,
    tokens: int,
    ranks: int,
    block: int = BLOCK,
    policy: str = BlockPolicy.LPT,
    seed: int = 0,
    token_cap: float = 1.25,
) -> TokenBlocks:
    """Assign every block of a sequence to a rank; the first arguments are those of `distribute`."""
    work = np.asarray(workload, dtype=np.int64)
    work = work.sum(0) if work.ndim == 2 else work
    padded = np.zeros(padded_length(tokens, ranks, block) // block, dtype=np.int64)
    padded[: len(work)] = work
    if policy == BlockPolicy.LPT:
        owned = list(distribute(workload, tokens=tokens, ranks=ranks, block=block).numpy())
    elif policy == BlockPolicy.LPT_FREE:
        each = len(padded) // ranks
        owned = _lpt_free(padded, ranks, max(each, int(token_cap * each)))
    else:
        owned = list(_equal_counts(padded, ranks, BlockPolicy(policy), seed))
    most = max(map(len, owned))
    blocks = np.stack([np.pad(np.sort(own), (0, most - len(own)), constant_values=-1) for own in owned])
    blocks[blocks >= len(work)] = -1
    return TokenBlocks(
        blocks=torch.from_numpy(blocks),
        tokens=tokens,
        block=block,
        work=tuple(int(padded[row].sum()) for row in owned),
    )


def _lpt_free(work: np.ndarray, ranks: int, most: int) -> list[np.ndarray]:
    owned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for block in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owned[rank].append(block)
        if len(owned[rank]) < most:
            heapq.heappush(heap, (load + int(work[block]), rank))
    return [np.array(own, dtype=np.int64) for own in owned]


def _equal_counts(work: np.ndarray, ranks: int, policy: BlockPolicy, seed: int) -> np.ndarray:
    """[ranks, blocks of a rank]."""
    blocks, each = np.arange(len(work)), len(work) // ranks
    if policy is BlockPolicy.PTRR:
        dealt = np.argsort(-work, kind="stable").reshape(each, ranks)
        dealt[1::2] = dealt[1::2, ::-1].copy()
        return dealt.T
    if policy is BlockPolicy.STRIPE:
        return blocks.reshape(each, ranks).T
    if policy is BlockPolicy.RANDOM:
        return np.random.default_rng(seed).permutation(len(work)).reshape(ranks, each)
    if policy is BlockPolicy.CONTIGUOUS:
        return blocks.reshape(ranks, each)
    front = ranks * -(-each // 2)
    return np.concatenate([blocks[:front].reshape(ranks, -1), blocks[front:].reshape(ranks, -1)[::-1]], axis=1)
