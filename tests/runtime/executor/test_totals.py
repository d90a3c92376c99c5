"""Loss, tokens and norm of a step: the same bits on all ranks, whoever computed what."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from mmcompile.batching.step_plan import MicrobatchPlan, StepPlan
from mmcompile.errors import EngineError
from mmcompile.planner.schedule.schedule import Flow
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.executor.totals import OwnTotals, add_up
from mmcompile.runtime.monitoring.metrics import StepTotals

T = TypeVar("T")
LOSSES = [0.1, 0.2, 0.3, 1e-9, 0.7, 1.1]
"""By sample; one sample a microbatch."""
NORMS = {"a": 0.3, "b": 1e-12, "c": 7.7, "d": 0.1}
NAMES = sorted(NORMS)


def plan_of(order: Sequence[int]) -> StepPlan:
    """Microbatches of one sample each, in some order."""
    flow = Flow(stages=(), edges=(), backward=())
    microbatches = tuple(
        MicrobatchPlan(index=i, samples=(sample,), pattern="", sizes={}, flow=flow, inputs=(), links=())
        for i, sample in enumerate(order)
    )
    return StepPlan(step=4, num_samples=len(order), microbatches=microbatches)


def on_ranks(num_ranks: int, function: Callable[[Groups], T]) -> list[T]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def run(rank: int) -> T:
        return function(Groups.connect(store, rank, num_ranks, torch.device("cpu"), local=True))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks), timeout=60))


def spread(num_ranks: int, seed: int) -> list[StepTotals]:
    """Totals on each rank, with losses and norms on ranks, and microbatches in an order, that depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(LOSSES), generator=generator).tolist()
    loss_rank = torch.randint(0, num_ranks, (len(LOSSES),), generator=generator).tolist()
    norm_rank = torch.randint(0, num_ranks, (len(NAMES),), generator=generator).tolist()
    plan = plan_of(order)

    def own(groups: Groups) -> StepTotals:
        losses = torch.zeros(len(order), 1, dtype=torch.float64)
        for index, sample in enumerate(order):
            if loss_rank[sample] == groups.rank:
                losses[index] = LOSSES[sample]
        norms = {name: NORMS[name] for name, rank in zip(NAMES, norm_rank, strict=True) if rank == groups.rank}
        seconds = torch.arange(len(order), dtype=torch.float64) + groups.rank
        mine = OwnTotals(losses=losses, num_tokens=groups.rank + 1, seconds=seconds, squared_norms=norms, faults=None)
        return add_up(groups, plan, mine, names=NAMES, limit=math.inf)

    return on_ranks(num_ranks, own)


def test_bits_do_not_depend_on_who_computed_what() -> None:
    # Not `sum`, which compensates rounding from Python 3.12 on.
    loss, norm = (functools.reduce(operator.add, x) for x in (LOSSES, [NORMS[name] for name in NAMES]))
    assert loss != functools.reduce(operator.add, LOSSES[::-1]), "the order matters to these numbers"
    for num_ranks, seed in [(1, 0), (1, 1), (2, 2), (3, 3), (3, 4), (4, 5)]:
        found = spread(num_ranks, seed)
        assert found == [found[0]] * num_ranks
        assert (found[0].loss, found[0].squared_norm) == (loss, norm)
        assert found[0].num_tokens == sum(range(1, num_ranks + 1))
        assert found[0].busy_s == tuple(15.0 + 6 * rank for rank in range(num_ranks))
        assert found[0].microbatch_s == tuple(float(sum(i + rank for rank in range(num_ranks))) for i in range(6))


def test_shards_of_a_loss_are_added_in_their_order() -> None:
    parts = [0.1, 0.2, 0.3]
    plan = plan_of([0])

    def own(groups: Groups, shards: Sequence[int]) -> StepTotals:
        losses = torch.zeros(1, 3, dtype=torch.float64)
        losses[0, shards[groups.rank]] = parts[shards[groups.rank]]
        none = torch.zeros(1, dtype=torch.float64)
        mine = OwnTotals(losses=losses, num_tokens=1, seconds=none, squared_norms=None, faults=None)
        return add_up(groups, plan, mine, names=NAMES, limit=math.inf)

    for shards in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        (first, *_) = on_ranks(3, lambda groups, shards=shards: own(groups, shards))
        assert first.loss == 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
        assert first.squared_norm is None


FAULTS: list[tuple[list[Mapping[str, float]], str]] = [
    ([{}, {"b": 2.0**23}], r"step 4 .* those of b of 8,388,608 or more\. Parameters are as they were"),
    ([{"d": math.inf, "a": math.nan}, {"a": math.nan}], r"those of a, d that are infinite or NaN\."),
    ([{"c": 1e30}, {"d": math.nan}], r"those of c of 8,388,608 or more, and those of d that are infinite or NaN\."),
]


@pytest.mark.parametrize(("faults", "message"), FAULTS)
def test_a_fault_is_an_error_on_all_ranks(faults: Sequence[Mapping[str, float]], message: str) -> None:
    none = torch.zeros(1, dtype=torch.float64)
    mine = OwnTotals(losses=none[:, None], num_tokens=1, seconds=none, squared_norms=None, faults={})

    def own(groups: Groups) -> str:
        with pytest.raises(EngineError, match=message) as caught:
            add_up(groups, plan_of([0]), replace(mine, faults=faults[groups.rank]), names=NAMES, limit=2.0**23)
        return str(caught.value)

    first, second = on_ranks(2, own)
    assert first == second
