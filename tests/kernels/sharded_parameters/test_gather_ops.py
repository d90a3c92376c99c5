"""The ops of replicas that share parameters, on real groups of several ranks, each a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmcompile.errors import ConfigError
from mmcompile.kernels.process_groups import register_group
from mmcompile.kernels.sharded_parameters.gather_ops import gather_parameter, scatter_gradient

RANKS = 3
SHAPE = (RANKS * 3, RANKS * 2)
LAYOUTS = [(0, (9,)), (1, (6,)), (0, (6, 3)), (1, (3, 3))]
"""(dim, blocks along it)."""
Layout = tuple[int, tuple[int, ...]]


def on_ranks(task: Callable[[int, str], Tensor]) -> list[Tensor]:
    """What each rank makes. Args of `task`: the rank, and what it calls the group."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    connect: Any = dist.ProcessGroupGloo  # its stub lacks a default

    def run(rank: int) -> Tensor:
        group = connect(store, rank, RANKS)
        register_group(f"rank {rank}", group)
        return task(rank, f"rank {rank}")

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def whole(dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parts(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """Of every rank: its third of each block."""
    dim, blocks = layout
    pieces = [block.chunk(RANKS, dim) for block in tensor.split(blocks, dim)]
    return [torch.cat([block[rank] for block in pieces], dim) for rank in range(RANKS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_gathered_and_gradients_added_up(dtype: torch.dtype, layout: Layout) -> None:
    """The loss of rank r is the sum of weight * factor_r, so that its gradient is factor_r."""
    weight, factors = whole(dtype, 0), [whole(dtype, 1 + rank) for rank in range(RANKS)]
    seen: dict[int, Tensor] = {}

    def task(rank: int, group: str) -> Tensor:
        part = parts(weight, layout)[rank].clone().requires_grad_()
        seen[rank] = gather_parameter(part, group, RANKS, *layout)
        (seen[rank] * factors[rank]).sum().backward()
        assert part.grad is not None
        return part.grad

    gradients = on_ranks(task)
    assert all(torch.equal(gathered, weight) for gathered in seen.values())
    # Half precision is added up in float32, and rounded once: within half a unit of the exact sum, but for float32's own error.
    exact = torch.stack([factor.double() for factor in factors]).sum(0)
    exact, found = torch.cat(parts(exact, layout)), torch.cat(gradients)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert (
        (found.double() - exact).abs() <= unit * exact.abs() * 0.5 + (1e-14 if dtype == torch.float64 else 1e-6)
    ).all()


def test_a_frozen_part_has_no_backward() -> None:
    assert not any(
        made.requires_grad for made in on_ranks(lambda _, group: gather_parameter(torch.ones(2), group, RANKS, 0, (6,)))
    )


def test_parts_need_not_be_contiguous() -> None:
    weight = whole(torch.float64, 0)

    def task(rank: int, group: str) -> Tensor:
        turned = weight.chunk(RANKS)[rank].t().contiguous().t()
        assert not turned.is_contiguous()
        gathered = gather_parameter(turned, group, RANKS, 0, (9,))
        return scatter_gradient(gathered.t().contiguous().t(), group, RANKS, 0, (9,))

    assert torch.equal(torch.cat(on_ranks(task)), RANKS * weight)


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no process group is registered as 'nobody'.*call register_group first"):
        gather_parameter(torch.ones(2), "nobody", RANKS, 0, (6,))
