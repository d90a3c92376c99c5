"""Parts of a tensor dim that consists of blocks, each of which is divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def block_part(x: torch.Tensor, dim: int, blocks: Sequence[int], index: int, count: int) -> torch.Tensor:
    """Return rank `index`'s parts of all blocks along `dim`, concatenated; a view if there is one block.

    Blocks (4, 2) of a dim of size 6 over `count` = 2 ranks: rank 0 has elements 0, 1 and 4, rank 1 has 2, 3 and 5.

    Args:
        dim: dim that consists of blocks.
        blocks: sizes of the blocks along `dim`, each a multiple of `count`.
        index: rank in the group, 0 to count - 1.
        count: number of ranks.
    """
    pieces = [x.narrow(dim, start, length) for start, length in block_ranges(blocks, index, count)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join_blocks(parts: Sequence[torch.Tensor], dim: int, blocks: Sequence[int]) -> torch.Tensor:
    """Join the parts of all ranks, in rank order, into the whole tensor, which has blocks of sizes `blocks` along `dim`.

    A rank's part is an equal part of each block: [0, 1, 4] and [2, 3, 5] of blocks of sizes (4, 2) -> [0, 1, 2, 3, 4, 5].
    """
    sizes = [block // len(parts) for block in blocks]
    pieces = [part.split(sizes, dim) for part in parts]
    return torch.cat([piece for of_block in zip(*pieces, strict=True) for piece in of_block], dim)


def block_ranges(blocks: Sequence[int], index: int, count: int) -> list[tuple[int, int]]:
    """Return (start, length) of rank `index`'s part of each block, in elements of the whole dim.

    Blocks of sizes (4, 2) over `count` = 2 ranks: [(0, 2), (4, 1)] for rank 0, and [(2, 2), (5, 1)] for rank 1.
    """
    ranges, begin = [], 0
    for block in blocks:
        length = block // count
        ranges.append((begin + index * length, length))
        begin += block
    return ranges


def resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    """Return the shape of a tensor with another size along `dim`."""
    shape = list(x.shape)
    shape[dim] = size
    return shape
