"""`Holding`: what a rank's tensor is of the whole parameter, and which boxes of the whole that makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mmcompile.ir.graph import ParameterSpec
from mmcompile.ir.tensor_shard import TensorShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a whole tensor, and where it is in the part of it that a rank holds."""

    offsets: tuple[int, ...]
    """Of its first element in the whole."""
    inside: tuple[int, ...]
    """Of its first element in the part."""
    sizes: tuple[int, ...]

    def of(self, part: Tensor) -> Tensor:
        """The view of a part that is this box."""
        return part[tuple(slice(at, at + size) for at, size in zip(self.inside, self.sizes, strict=True))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a rank holds under some name."""

    whole: str
    """Original name of the parameter."""
    shard: TensorShard | None = None
    """None: it is the whole."""
    index: int = 0
    """Which part it is."""

    @classmethod
    def of(cls, spec: ParameterSpec) -> Holding:
        return cls(whole=spec.whole_name, shard=spec.shard, index=spec.index)

    def shape_of_whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole, by that of a part."""
        return part if self.shard is None else _with(part, self.shard.dim, self.shard.size)

    def shape_of_part(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a part, by that of the whole."""
        return whole if self.shard is None else self.shard.local_shape(whole)

    def boxes(self, whole: tuple[int, ...]) -> tuple[Box, ...]:
        """Boxes that make the part, by the shape of the whole: one for each block."""
        return tuple(self._boxes(whole))

    def _boxes(self, whole: tuple[int, ...]) -> Iterator[Box]:
        zeros = (0,) * len(whole)
        if self.shard is None:
            yield Box(offsets=zeros, inside=zeros, sizes=whole)
            return
        dim, begin, inside = self.shard.dim, 0, 0
        for block in self.shard.blocks:
            width = block // self.shard.count
            yield Box(
                offsets=_with(zeros, dim, begin + self.index * width),
                inside=_with(zeros, dim, inside),
                sizes=_with(whole, dim, width),
            )
            begin, inside = begin + block, inside + width


def _with(sizes: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
