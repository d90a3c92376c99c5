"""Gradients of parameters on several ranks: the same sum on all, in real processes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import pytest
import torch
from gradient_ranks import Case, Gradients, summed
from torch import Tensor

from mmcompile.runtime.gradients import Shared

NUM_RANKS = 4


def case_of(
    sizes: Mapping[str, int | Sequence[int]],
    owners: Mapping[str, tuple[int, ...]],
    givers: Mapping[str, tuple[int, ...]] | None = None,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    absent: Sequence[tuple[int, str]] = (),
) -> Case:
    """Random gradients of parameters by name.

    Args:
        givers: as `Shared.givers`; by default all owners.
        absent: (rank, name) of gradients that are None though the rank ran a backward.
    """
    generator = torch.Generator().manual_seed(len(sizes))
    givers = {**owners, **(givers or {})}
    values = {name: torch.zeros(size, dtype=(dtypes or {}).get(name)) for name, size in sizes.items()}
    gradients: list[Gradients] = []
    for rank in range(NUM_RANKS):
        mine: dict[str, Tensor | None] = {}
        for name, ranks in owners.items():
            if rank in ranks:
                has = rank in givers[name] and (rank, name) not in absent
                value = torch.randn(values[name].shape, generator=generator).to(values[name].dtype)
                mine[name] = value if has else None
        gradients.append(mine)
    ends = {(owners[name], givers[name]) for name in owners}
    return Case(
        shared=tuple(
            Shared(names=tuple(n for n in owners if (owners[n], givers[n]) == (a, b)), owners=a, givers=b)
            for a, b in sorted(ends, reverse=True)
        ),
        gradients=tuple(gradients),
        values=values,
    )


ALL = (0, 1, 2, 3)
CASES = {
    # Two replicas of two stages with a tied weight, and sets of owners that overlap.
    "overlapping": case_of(
        {"tied": (50, 3), "first": 7, "last": 9, "odd": 20_011},
        {"tied": ALL, "first": (0, 1), "last": (2, 3), "odd": (1, 2, 3)},
    ),
    "one in parts": case_of(
        {"wide": (1000, 301), "bias": 5, "empty": 0}, dict.fromkeys(("wide", "bias", "empty"), ALL)
    ),
    "many buckets": case_of({f"big.{i}": 5000 * i for i in range(9)}, {f"big.{i}": (1, 3) for i in range(9)}),
    "dtypes": case_of(
        {"half": 40_000, "double": 12, "single": 3},
        dict.fromkeys(("half", "double", "single"), (0, 2, 3)),
        dtypes={"half": torch.bfloat16, "double": torch.float64},
    ),
    "some have none": case_of(
        {"seen": 300, "once": 4, "never": 5},
        dict.fromkeys(("seen", "once", "never"), ALL),
        absent=[(1, "seen"), *((rank, "once") for rank in (0, 1, 3)), *((rank, "never") for rank in ALL)],
    ),
    "some gave none": case_of(
        {"images": 30_000, "unused": 8, "sounds": 11},
        {"images": ALL, "unused": ALL, "sounds": (1, 2)},
        {"images": (1, 2), "unused": (), "sounds": (2,)},
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Gradients]]:
    folder = tmp_path_factory.mktemp("ranks")
    return dict(zip(CASES, summed(list(CASES.values()), NUM_RANKS, folder), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_owners_hold_the_same_sum_in_order_of_ranks(name: str, found: dict[str, list[Gradients]]) -> None:
    case, ranks = CASES[name], found[name]
    for shared in case.shared:
        for parameter in shared.names:
            own = [g for rank in shared.owners if (g := case.gradients[rank][parameter]) is not None]
            held = [ranks[rank][parameter] for rank in shared.owners]
            if not own:
                assert held == [None] * len(held)
                continue
            exact = torch.stack([gradient.double() for gradient in own]).sum(0)
            exactly = functools.reduce(operator.add, [g.to(torch.promote_types(g.dtype, torch.float32)) for g in own])
            for gradient in held:
                assert gradient is not None
                assert torch.equal(gradient, exactly.to(gradient.dtype)), parameter
                step = torch.finfo(gradient.dtype).eps * len(own) * sum(g.double().abs() for g in own)
                assert bool(((gradient.double() - exact).abs() <= step).all()), parameter
