"""`TensorShard`: parts of a tensor, block by block."""

from __future__ import annotations

import re

import pytest
import sympy
import torch

from mmcompile.ir.tensor_shard import TensorShard


def test_a_rank_holds_its_part_of_each_block() -> None:
    shard = TensorShard(dim=0, blocks=(4, 2), count=2)
    tensor = torch.tensor([0, 1, 2, 3, 10, 11])
    assert [shard.part(tensor, index).tolist() for index in range(2)] == [[0, 1, 10], [2, 3, 11]]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("blocks", [(8,), (4, 8), (4, 4, 4)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_join_to_the_whole(dim: int, blocks: tuple[int, ...], count: int) -> None:
    shape = [3, 5, 2]
    shape[dim] = sum(blocks)
    tensor, shard = torch.randn(shape), TensorShard(dim=dim, blocks=blocks, count=count)
    parts = [shard.part(tensor, index) for index in range(count)]
    assert {part.shape for part in parts} == {torch.Size(shard.local_shape(shape))}
    assert torch.equal(shard.joined(parts), tensor)
    assert sum(part.sum() for part in parts) == pytest.approx(float(tensor.sum()), rel=1e-3)


def test_sizes_over_symbols() -> None:
    tokens = sympy.Symbol("s0", integer=True, positive=True)
    assert TensorShard(dim=1, blocks=(8,), count=4).local_sizes((tokens, 8)) == (tokens, 2)
    assert TensorShard(dim=0, blocks=(8, 8), count=4).local_sizes((tokens * 8, 3)) == (tokens * 2, 3)


def test_errors() -> None:
    with pytest.raises(ValueError, match=re.escape("blocks [4, 6] in 4 parts: 6 is no multiple of 4")):
        TensorShard(dim=0, blocks=(4, 6), count=4)
    shard = TensorShard(dim=1, blocks=(4,), count=2)
    with pytest.raises(ValueError, match=re.escape("shape [2, 6] where dim 1 should have size 4")):
        shard.part(torch.ones(2, 6), 0)
    with pytest.raises(ValueError, match="no part 2 of 2"):
        shard.part(torch.ones(2, 4), 2)
    with pytest.raises(ValueError, match="got 1 parts, wanted 2"):
        shard.joined([torch.ones(2, 2)])
    with pytest.raises(ValueError, match=re.escape("shape [2, 4] where dim 1 should have size 2")):
        shard.joined([torch.ones(2, 4), torch.ones(2, 4)])
