"""`TensorShard`: the parts of a tensor that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from mmcompile.kernels.tensor_parallel.blocks import block_part, join_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """A dim split over ranks, block by block.

    Along `dim` the tensor consists of blocks that follow each other, and of each block a rank holds one of `count` equal parts:

        blocks (4, 2), count 2:   a a a a b b   ->   rank 0: a a b   rank 1: a a b

    A projection to queries, keys and values in one weight is three blocks, so every rank gets heads of all three.

    With `replicas` > 1, the replicas of each rank shard its part once more (FSDP). Then there are `count / replicas` ranks, and
    each computes with `replicas` consecutive parts joined.
    """

    dim: int
    blocks: tuple[int, ...]
    count: int
    replicas: int = 1
    """Number of replicas that shard the part of each tensor-parallel rank; 1 if each replica holds the whole part."""

    def __post_init__(self) -> None:
        for block in self.blocks:
            if block % self.count:
                blocks = list(self.blocks)
                raise ValueError(f"blocks {blocks} in {self.count} parts: {block} is no multiple of {self.count}")

    def spread(self, replicas: int) -> TensorShard:
        """Return this sharding with each part split into `replicas` parts. Raises ValueError if a block does not divide."""
        return replace(self, count=self.count * replicas, replicas=self.replicas * replicas)

    def index(self, rank: int) -> int:
        """Return the number, from 0 to `count` - 1, of the part that replica 0 of rank `rank` holds.

        Args:
            rank: tensor-parallel rank; ignored if the tensor is not sharded over ranks.
        """
        return rank % (self.count // self.replicas) * self.replicas

    @property
    def size(self) -> int:
        """Size of the dim in the whole tensor."""
        return sum(self.blocks)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return part number `index` of a whole tensor: a view if there is one block.

        Raises ValueError: the tensor's size is not that of this sharding, or there is no such part.
        """
        self._check(tensor.shape, self.size)
        if not 0 <= index < self.count:
            raise ValueError(f"there is no part {index} of {self.count}")
        return block_part(tensor, self.dim, self.blocks, index, self.count)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor, from the parts of all ranks in order: the inverse of `part`."""
        if len(parts) != self.count:
            raise ValueError(f"got {len(parts)} parts, wanted {self.count}")
        for part in parts:
            self._check(part.shape, self.size // self.count)
        return join_blocks(parts, self.dim, self.blocks)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of `shape`."""
        self._check(shape, self.size)
        return (*shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :])

    def local_sizes(self, sizes: Sequence[int | sympy.Expr]) -> tuple[int | sympy.Expr, ...]:
        """Return the shape of a part of a tensor of shape `sizes`, whose entries may be expressions over size symbols."""
        size = sizes[self.dim]
        local = size // self.count if isinstance(size, int) else size / self.count
        return (*sizes[: self.dim], local, *sizes[self.dim + 1 :])

    def _check(self, shape: Sequence[int], wanted: int) -> None:
        if not self.dim < len(shape) or shape[self.dim] != wanted:
            raise ValueError(f"a tensor of shape {list(shape)} where dim {self.dim} should have size {wanted}")
