"""Messages between ranks arrive as they were sent, whatever their size, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from mmcompile.batching.step_plan import MicrobatchPlan, StepPlan, ValueShape
from mmcompile.planner.schedule.schedule import Flow
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.executor.batch_inputs import packed_inputs

T = TypeVar("T")


def on_ranks(num_ranks: int, function: Callable[[Groups], T]) -> list[T]:
    """Run a function on ranks that are threads of this process, joined by real groups."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def run(rank: int) -> T:
        return function(Groups.connect(store, rank, num_ranks, torch.device("cpu"), local=True))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


@pytest.mark.parametrize("size", [0, 1, 16384 - 4, 16384 - 3, 100_000])
def test_broadcast_of_any_length(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    assert on_ranks(3, lambda groups: wire.broadcast(groups, data if groups.rank == 0 else None)) == [data] * 3


def test_sums_are_the_same_on_all_ranks() -> None:
    def work(groups: Groups) -> torch.Tensor:
        tensor = torch.tensor([0.1, 1.0, 1e-17], dtype=torch.float64) * (groups.rank + 1)
        groups.all_reduce(tensor)
        return tensor

    first, *others = on_ranks(3, work)
    torch.testing.assert_close(first, torch.tensor([0.6, 6.0, 6e-17], dtype=torch.float64))
    assert all(torch.equal(first, other) for other in others)


def test_tensors_keep_name_shape_and_dtype() -> None:
    tensors = {
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([[True, False]]),
        "half": torch.randn(3, 5).bfloat16(),
        "transposed": torch.randn(3, 5).T,
        "complex": torch.randn(2, dtype=torch.complex64),
    }

    def work(groups: Groups) -> dict[str, torch.Tensor] | None:
        return wire.send_tensors(groups, 1, tensors) if groups.rank == 0 else wire.receive_tensors(groups, 0)

    _, received = on_ranks(2, work)
    assert received is not None and list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


def test_small_batch_inputs_share_a_message_and_large_ones_do_not() -> None:
    shapes = (
        ValueShape(name="ids", shape=(3, 5), dtype="int64"),
        ValueShape(name="mask", shape=(7,), dtype="bool"),
        ValueShape(name="pixels", shape=(0, 2), dtype="bfloat16"),
        ValueShape(name="unread", shape=(9,), dtype="float32"),
        ValueShape(name="large", shape=(50_000,), dtype="float32"),
    )
    microbatches = tuple(
        MicrobatchPlan(
            index=index,
            samples=(index,),
            pattern="p",
            sizes={},
            flow=Flow(stages=(), edges=(), backward=()),
            inputs=shapes,
            links=(),
            readers={1: ("ids", "mask", "pixels", *(("large",) if index > 1 else ()))},
        )
        for index in range(4)
    )
    plan = StepPlan(step=1, num_samples=4, microbatches=microbatches)
    small = frozenset({"ids", "mask", "pixels"})
    found = packed_inputs(plan, 1)
    assert [sorted({m for m, _, _ in packed.items}) for packed in found] == [[0, 1, 2], [3]]
    assert packed_inputs(plan, 2) == []
    values = [
        {
            "ids": torch.randint(9, (5, 3)).T,
            "mask": torch.rand(7) < 0.5,
            "pixels": torch.empty(0, 2).bfloat16(),
            "large": torch.randn(50_000),
        }
        for _ in microbatches
    ]
    unpacked = {m: v for packed in found for m, v in packed.unpack(packed.pack(values)).items()}
    for microbatch, named in unpacked.items():
        assert named.keys() == (small if microbatch < 2 else small | {"large"})
        for name, tensor in named.items():
            assert torch.equal(tensor, values[microbatch][name])
