"""Gradients of parameters on several ranks: summed while backwards run, the same bits on all owners, in real processes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.processes.gradient_ranks import Case, Gradients, Held, summed
from torch import Tensor, nn

from mmcompile.config import Reduction
from mmcompile.errors import EngineError
from mmcompile.runtime.comm.groups import Groups, Lane, wait
from mmcompile.runtime.optim.gradient_bucket import OwnerSet, gradient_tags
from mmcompile.runtime.optim.gradients import GradientSums

NUM_RANKS = 4
ALL = (0, 1, 2, 3)
REDUCTIONS: tuple[Reduction, ...] = ("fast", "fp64", "fixed")


def case_of(
    sizes: Mapping[str, int | Sequence[int]],
    owners: Mapping[str, tuple[int, ...]],
    givers: Mapping[str, tuple[int, ...]] | None = None,
    *,
    num_backwards: Sequence[int] = (1, 1, 1, 1),
    dtypes: Mapping[str, torch.dtype] | None = None,
    absent: Sequence[tuple[int, str]] = (),
    extra: Mapping[str, tuple[int, ...]] | None = None,
    updaters: Mapping[str, int] | None = None,
    masters: bool = False,
    earlier: int = 0,
) -> Case:
    """Random gradients of parameters by name, of very different sizes.

    Args:
        givers: as `OwnerSet.givers`; by default all owners.
        num_backwards: of each rank, for each of its parameters; they touch one or two parameters each, in an order of its own.
        absent: (rank, name) of gradients that are None though the rank ran backwards.
        extra: ranks that run backwards though they are no givers: what they get must not count.
        updaters: as `OwnerSet.updater`, by name.
        masters, earlier: as of the case.
    """
    generator = torch.Generator().manual_seed(len(sizes))
    givers = {**owners, **(givers or {})}
    values = {name: torch.zeros(size, dtype=(dtypes or {}).get(name)) for name, size in sizes.items()}

    def given(rank: int, name: str) -> Tensor | None:
        noise = torch.randn(values[name].shape, generator=generator, dtype=torch.float64)
        exponents = torch.randint(-30, 3, values[name].shape, generator=generator)
        return None if (rank, name) in absent else torch.ldexp(noise, exponents).to(values[name].dtype)

    def backwards(rank: int) -> tuple[Gradients, ...]:
        touched = [n for n in owners if rank in (*givers[n], *(extra or {}).get(n, ()))] * num_backwards[rank]
        touched = [touched[i] for i in torch.randperm(len(touched), generator=generator).tolist()]
        pairs = [touched[i : i + 2] for i in range(0, len(touched), 2)]
        # A name that comes twice in a pair is touched once there.
        return tuple({name: given(rank, name) for name in pair} for pair in pairs)

    ends: dict[tuple[tuple[int, ...], tuple[int, ...], int | None], list[str]] = {}
    for name in sorted(owners, reverse=True):
        if len(owners[name]) > 1:
            ends.setdefault((owners[name], givers[name], (updaters or {}).get(name)), []).append(name)
    return Case(
        reduction="fast",
        shared=tuple(OwnerSet(names=tuple(n), owners=a, givers=b, updater=c) for (a, b, c), n in ends.items()),
        held=tuple(tuple(name for name in owners if rank in owners[name]) for rank in range(NUM_RANKS)),
        backwards=tuple(backwards(rank) for rank in range(NUM_RANKS)),
        values=values,
        masters=masters,
        earlier=earlier,
    )


CASES = {
    # Two replicas of two stages with a tied weight, sets of owners that overlap, and what one rank has alone.
    "overlapping": case_of(
        {"tied": (50, 3), "first": 7, "last": 9, "odd": 20_011, "alone": (3, 5)},
        {"tied": ALL, "first": (0, 1), "last": (2, 3), "odd": (1, 2, 3), "alone": (2,)},
        num_backwards=(3, 1, 4, 2),
    ),
    "one in parts": case_of(
        {"wide": (1000, 301), "bias": 5, "empty": 0}, dict.fromkeys(("wide", "bias", "empty"), ALL)
    ),
    "many buckets": case_of(
        {f"big.{i}": 5000 * i for i in range(9)}, {f"big.{i}": (1, 3) for i in range(9)}, num_backwards=(0, 2, 0, 3)
    ),
    "dtypes": case_of(
        {"half": 40_000, "double": 12, "single": 3, "half alone": 70},
        {**dict.fromkeys(("half", "double", "single"), (0, 2, 3)), "half alone": (1,)},
        num_backwards=(2, 3, 1, 5),
        dtypes={"half": torch.bfloat16, "double": torch.float64, "half alone": torch.bfloat16},
    ),
    "some have none": case_of(
        {"seen": 300, "once": 4, "never": 5, "never alone": 6},
        {**dict.fromkeys(("seen", "once", "never"), ALL), "never alone": (3,)},
        num_backwards=(2, 2, 1, 1),
        absent=[
            (1, "seen"),
            *((rank, "once") for rank in (0, 1, 3)),
            *((rank, "never") for rank in ALL),
            (3, "never alone"),
        ],
    ),
    "some gave none": case_of(
        {"images": 30_000, "unused": 8, "sounds": 11},
        {"images": ALL, "unused": ALL, "sounds": (1, 2)},
        {"images": (1, 2), "unused": (), "sounds": (2,)},
        num_backwards=(0, 1, 3, 0),
    ),
    # Two replicas of two shards: what shards hold whole has the same gradient on both, of which one counts.
    "shards": case_of(
        {"norm": 300, "cut@0": (40, 30), "cut@1": (40, 30)},
        {"norm": ALL, "cut@0": (0, 2), "cut@1": (1, 3)},
        {"norm": (0, 2)},
        extra={"norm": (1, 3)},
        num_backwards=(2, 2, 1, 1),
    ),
    # One rank updates each parameter; it may have no gradient itself, or one that does not count.
    "one updates": case_of(
        {"norm": 300, "wide": (200, 301), "tail": 7, "cut@0": (40, 30), "cut@1": (40, 30), "odd": 9, "alone": 5},
        {
            **dict.fromkeys(("norm", "wide", "tail"), ALL),
            "cut@0": (0, 2),
            "cut@1": (1, 3),
            "odd": (1, 2),
            "alone": (3,),
        },
        {"norm": (0, 2), "tail": (0,), "odd": (2,)},
        extra={"norm": (1, 3)},
        updaters={"norm": 1, "wide": 2, "tail": 3, "cut@0": 0, "cut@1": 3, "odd": 1},
        num_backwards=(2, 2, 3, 1),
        absent=[(0, "tail")],
    ),
    "masters": case_of(
        {"half": 40_000, "updated": 700, "single": 30, "alone": (7, 5), "never": 3},
        {**dict.fromkeys(("half", "updated", "single", "never"), (0, 1, 3)), "alone": (2,)},
        updaters={"updated": 3},
        num_backwards=(3, 2, 4, 5),
        dtypes=dict.fromkeys(("half", "updated", "alone", "never"), torch.bfloat16),
        absent=[(rank, "never") for rank in (0, 1, 3)],
        masters=True,
    ),
    # Backwards of several calls, after which some ranks have no more to run.
    "calls": case_of(
        {"both": 20_000, "updated": 30, "half": 50, "alone": (4, 4), "half alone": 9},
        {"both": (0, 1, 2), "updated": ALL, "half": (1, 3), "alone": (2,), "half alone": (3,)},
        updaters={"updated": 0},
        num_backwards=(1, 2, 3, 4),
        dtypes=dict.fromkeys(("half", "half alone"), torch.bfloat16),
        masters=True,
        earlier=2,
    ),
}
KEYS = list(product(CASES, REDUCTIONS))


def spread(seed: int) -> tuple[Case, list[Gradients]]:
    """The same seven microbatches, with an order and ranks that depend on the seed, on one rank to four; and the microbatches."""
    sizes = {"weight": (70, 111), "bias": (9,)}
    draw = torch.Generator().manual_seed(0)
    microbatches: list[Gradients] = [
        {name: torch.ldexp(torch.randn(size, generator=draw), torch.randint(-40, 9, size, generator=draw))
         for name, size in sizes.items()}
        for _ in range(7)
    ]  # fmt: skip
    other = torch.Generator().manual_seed(seed)
    owners = tuple(range(1 + seed % NUM_RANKS))
    rank_of = torch.randint(0, len(owners), (len(microbatches),), generator=other).tolist()
    order = torch.randperm(len(microbatches), generator=other).tolist()
    shared = OwnerSet(names=tuple(sizes), owners=owners, givers=tuple(sorted(set(rank_of))))
    case = Case(
        reduction="fixed",
        shared=(shared,) if len(owners) > 1 else (),
        held=tuple(tuple(sizes) if rank in owners else () for rank in range(NUM_RANKS)),
        backwards=tuple(tuple(microbatches[i] for i in order if rank_of[i] == rank) for rank in range(NUM_RANKS)),
        values={name: torch.zeros(size) for name, size in sizes.items()},
    )
    return case, microbatches


NUM_SPREADS = 16
BAD = {"plain": 1.0, "huge": 2.0**23, "infinite": -math.inf, "nan": math.nan, "near": -(2.0**23) + 1}


def bad_case() -> Case:
    """Rank 1 meets values that cannot be added, each followed by one that can."""
    names = tuple(BAD)
    zeros = {name: torch.zeros(3) for name in names}
    mine = {name: torch.tensor([0.5, value, 0.0]) for name, value in BAD.items()}
    return Case(
        reduction="fixed",
        shared=(OwnerSet(names=names, owners=(0, 1), givers=(0, 1)),),
        held=(names, names, (), ()),
        backwards=((zeros,), (mine, zeros), (), ()),
        values=zeros,
    )


@pytest.fixture(scope="module")
def ranks() -> list[list[Held]]:
    """All cases with all reductions, then all spreads, then the bad one."""
    cases = [replace(CASES[name], reduction=reduction) for name, reduction in KEYS]
    cases += [spread(seed)[0] for seed in range(NUM_SPREADS)]
    return summed([*cases, bad_case()], NUM_RANKS)


@pytest.mark.parametrize(("name", "reduction"), KEYS)
def test_all_owners_hold_the_same_sum(name: str, reduction: Reduction, ranks: list[list[Held]]) -> None:
    case, held = CASES[name], ranks[KEYS.index((name, reduction))]
    assert [mine.faults for mine in held] == [{}] * NUM_RANKS
    for parameter, value in case.values.items():
        owners = [rank for rank in range(NUM_RANKS) if parameter in case.held[rank]]
        item = next((item for item in case.shared if parameter in item.names), None)
        updater = None if item is None else item.updater
        if updater is not None:
            assert [held[rank].gradients[parameter] for rank in owners if rank != updater] == [None] * (len(owners) - 1)
        got = [held[rank].gradients[parameter] for rank in (owners if updater is None else [updater])]
        parts = [
            [gradient for given in case.backwards[rank] if (gradient := given.get(parameter)) is not None]
            for rank in (owners if item is None else item.givers)
        ]
        wide = case.masters and value.dtype == torch.bfloat16
        if not any(parts):
            assert got == [None] * len(got), parameter
            continue
        if wide:
            # What is added is rounded to bfloat16, sums are not.
            parts = [[gradient.float() for gradient in part] for part in parts]
        wanted, error = _sum(reduction, [part for part in parts if part])
        for gradient in got:
            assert gradient is not None and gradient.shape == value.shape
            assert gradient.dtype == (torch.float32 if wide else value.dtype)
            assert np.all(np.abs(_numpy(gradient) - wanted) <= error), parameter
            assert torch.equal(gradient, got[0] if got[0] is not None else gradient), parameter


def _sum(reduction: Reduction, parts: Sequence[Sequence[Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """What a reduction must give, and how far it may be off, for gradients by rank and backward; as float64."""
    dtype = parts[0][0].dtype
    if reduction == "fast":
        # In the dtype on a rank, in float32 or wider between ranks.
        wide = torch.promote_types(dtype, torch.float32)
        own = [functools.reduce(operator.add, part).to(wide) for part in parts]
        total = _numpy(functools.reduce(operator.add, own).to(dtype))
        return total, np.zeros_like(total)
    terms = [[_numpy(gradient) for gradient in part] for part in parts]
    if reduction == "fp64":
        total = functools.reduce(operator.add, [functools.reduce(operator.add, part) for part in terms])
        total = _numpy(torch.from_numpy(total).to(dtype))
        return total, np.zeros_like(total)
    return _exact([term for part in terms for term in part], torch.finfo(dtype).eps)


def _exact(terms: Sequence[np.ndarray], eps: float) -> tuple[np.ndarray, np.ndarray]:
    """The exact sum rounded to float64, and the documented error of fixed point, with that of rounding to a dtype."""
    stacked = np.stack([term.reshape(-1) for term in terms])
    total = np.array([math.fsum(column) for column in stacked.T.tolist()]).reshape(terms[0].shape)
    return total, len(terms) * 2.0**-65 + np.abs(total) * (2.0**-52 + eps / 2)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def test_fixed_has_the_same_bits_however_microbatches_are_spread(ranks: list[list[Held]]) -> None:
    found: dict[str, Tensor] = {}
    for seed in range(NUM_SPREADS):
        case, microbatches = spread(seed)
        for rank in range(NUM_RANKS):
            for name, gradient in ranks[len(KEYS) + seed][rank].gradients.items():
                assert gradient is not None and case.held[rank]
                assert torch.equal(gradient, found.setdefault(name, gradient)), (name, seed, rank)
    for name, gradient in found.items():
        terms = [_numpy(given) for microbatch in microbatches if (given := microbatch[name]) is not None]
        wanted, error = _exact(terms, torch.finfo(torch.float32).eps)
        assert np.all(np.abs(_numpy(gradient) - wanted) <= error)
        # The order matters to float32.
        forward, back = (functools.reduce(operator.add, map(np.float32, order)) for order in (terms, terms[::-1]))
        assert not np.array_equal(forward, back) or name == "bias"


def test_gradients_that_fixed_cannot_add_are_found(ranks: list[list[Held]]) -> None:
    held = ranks[-1]
    assert held[0].faults == {}
    found = held[1].faults
    assert found.keys() == {"huge", "infinite", "nan"}
    assert found["huge"] == 2.0**23 and found["infinite"] == math.inf and math.isnan(found["nan"])
    near = held[0].gradients["near"]
    assert near is not None and near.tolist() == [0.5, BAD["near"], 0.0]


def test_a_bucket_travels_before_the_last_backward() -> None:
    """Rank 1 is written by hand: it answers the first bucket's message, and only then may rank 0 run its second backward."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    tags = [gradient_tags(0, 2, 0), gradient_tags(1, 2, 0)]
    owners, answer, count = (0, 1), 7, 5000

    def groups(rank: int) -> Groups:
        return Groups.connect(store, rank, 2, torch.device("cpu"), local=True)

    def rank_0() -> list[Tensor | None]:
        mine = groups(0)
        parameters = {name: nn.Parameter(torch.zeros(count)) for name in ("early", "late")}
        # Unlike givers keep the two in buckets of their own.
        shared = [
            OwnerSet(names=("early",), owners=owners, givers=(0,)),
            OwnerSet(names=("late",), owners=owners, givers=(0, 1)),
        ]
        sums = GradientSums(mine, parameters, shared, {"early": 1, "late": 1})
        parameters["early"].sum().backward()
        sums.ran(["early"])
        assert parameters["early"].grad is None
        seen = torch.zeros(1)
        wait(mine.receive_control(seen, 1, answer))
        (2 * parameters["late"]).sum().backward()
        sums.ran(["late"])
        assert sums.finish() == {}
        return [parameter.grad for parameter in parameters.values()]

    def rank_1() -> Tensor:
        mine = groups(1)
        there, back = Lane(source=0, target=1, name="gradients"), Lane(source=1, target=0, name="gradients")
        # Parts are of 4096 elements; 5000 gradients and one flag, which starts at a multiple of 64.
        part, rest = torch.zeros(5056 + 1 - 4096), torch.zeros(4096)
        wait(mine.receive(part, there, tags[0][0]))
        seen = mine.send_control(torch.ones(1), 0, answer)
        ones = torch.ones(4096)
        other = torch.zeros_like(part)
        works = [
            seen,
            mine.receive(rest, there, tags[0][1]),
            mine.send(part, back, tags[0][1]),
            mine.send(ones, back, tags[1][0]),
            mine.receive(other, there, tags[1][0]),
            mine.receive(torch.zeros(4096), there, tags[1][1]),
            mine.send(other, back, tags[1][1]),
        ]
        for work in works:
            wait(work)
        return torch.cat([rest, part])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(rank_0), pool.submit(rank_1)
        early, late = first.result(timeout=60)
        assert second.result(timeout=60)[:count].tolist() == [1.0] * count
    assert early is not None and early.tolist() == [1.0] * count
    assert late is not None and late.tolist() == [3.0] * 4096 + [2.0] * (count - 4096)


def test_more_backwards_than_fixed_can_add_are_refused() -> None:
    groups = Groups.connect(dist.HashStore(), 0, 1, torch.device("cpu"), local=True)  # pyright: ignore[reportPrivateImportUsage]
    parameters = {"weight": nn.Parameter(torch.zeros(2))}
    GradientSums(groups, parameters, (), {"weight": 2**20 - 1}, reduction="fixed")
    with pytest.raises(
        EngineError, match=r"weight has gradients of up to 1,048,576 backwards in a step; .* at most 1,048,575"
    ):
        GradientSums(groups, parameters, (), {"weight": 2**20}, reduction="fixed")


def test_tags_of_buckets_are_all_different_and_run_out() -> None:
    places = 1000
    room = (2**31 - 16 - 2**30) // (2 * places)
    tags = [
        tag
        for place in (0, 1, places - 1)
        for bucket in (0, 1, room - 1)
        for tag in gradient_tags(place, places, bucket)
    ]
    assert len(set(tags)) == len(tags) and min(tags) >= 2**30 and max(tags) < 2**31 - 16
    with pytest.raises(EngineError, match=rf"more than {room} buckets, of 1000 sets"):
        gradient_tags(0, places, room)
