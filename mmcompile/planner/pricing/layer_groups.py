"""`LayerGroups`: layers of a component that cost the same at every load, so that one of each is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.passes.cost.cost_table import GrowingCost

Shares = tuple[tuple[int, TensorShare], ...]
"""(Number of ranks, what they share)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Layers of one component that cost the same at every load."""

    first: int
    """The first of them."""
    kind: str
    merges: bool
    shares: Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroups:
    of_layer: NDArray[np.int64]
    """[layers]: the group of each."""
    groups: tuple[LayerGroup, ...]

    @classmethod
    def of(
        cls,
        growing: Sequence[GrowingCost] | Sequence[LayerCost],
        kinds: Sequence[str],
        merges: Sequence[bool],
        shares: Sequence[Shares],
    ) -> LayerGroups:
        number: dict[tuple[GrowingCost | LayerCost, str, bool, Shares], int] = {}
        groups: list[LayerGroup] = []
        of_layer: list[int] = []
        for index, key in enumerate(zip(growing, kinds, merges, shares, strict=True)):
            if key not in number:
                number[key] = len(groups)
                groups.append(LayerGroup(first=index, kind=key[1], merges=key[2], shares=key[3]))
            of_layer.append(number[key])
        return cls(of_layer=np.array(of_layer), groups=tuple(groups))
