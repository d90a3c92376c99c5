"""`TensorShard`: which part of a tensor each of several ranks holds."""

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

    So a projection to queries, keys and values in one weight is three blocks, and every rank gets heads of all three.

    Replicas may share what a rank would hold once more: then `replicas` parts that follow each other are together what one of
    `count / replicas` ranks computes with.
    """

    dim: int
    blocks: tuple[int, ...]
    count: int
    replicas: int = 1
    """That share the part of each rank that shares tensors; 1 if each holds it whole."""

    def __post_init__(self) -> None:
        uneven = [block for block in self.blocks if block % self.count]
        if uneven:
            raise ValueError(
                f"blocks {list(self.blocks)} in {self.count} parts: {uneven[0]} is no multiple of {self.count}"
            )

    def spread(self, replicas: int) -> TensorShard:
        """Each part in as many parts again. Raises ValueError if a block does not divide."""
        return replace(self, count=self.count * replicas, replicas=self.replicas * replicas)

    def index(self, rank: int, replica: int = 0) -> int:
        """Of the part that a replica of a rank holds.

        Args:
            rank: among those that share tensors; any, where they do not share this one.
        """
        return rank % (self.count // self.replicas) * self.replicas + replica

    @property
    def size(self) -> int:
        """Of the dim in the whole tensor."""
        return sum(self.blocks)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """What rank `index` holds of a whole tensor: a view where there is one block.

        Raises ValueError: the tensor has another size, or there is no such rank.
        """
        self._check(tensor.shape, self.size)
        if not 0 <= index < self.count:
            raise ValueError(f"there is no part {index} of {self.count}")
        return block_part(tensor, self.dim, self.blocks, index, self.count)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor, from the parts of all ranks in order: the inverse of `part`."""
        if len(parts) != self.count:
            raise ValueError(f"got {len(parts)} parts, wanted {self.count}")
        for part in parts:
            self._check(part.shape, self.size // self.count)
        return join_blocks(parts, self.dim, self.blocks)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a part of a tensor of `shape`."""
        self._check(shape, self.size)
        return (*shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :])

    def local_sizes(self, sizes: Sequence[int | sympy.Expr]) -> tuple[int | sympy.Expr, ...]:
        """`local_shape` over size symbols."""
        size = sizes[self.dim]
        local = size // self.count if isinstance(size, int) else size / self.count
        return (*sizes[: self.dim], local, *sizes[self.dim + 1 :])

    def _check(self, shape: Sequence[int], wanted: int) -> None:
        if not self.dim < len(shape) or shape[self.dim] != wanted:
            raise ValueError(f"a tensor of shape {list(shape)} where dim {self.dim} should have size {wanted}")
