"""Gradients summed by real processes, one a rank, and what each then holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from mmcompile.runtime.gradients import Shared, sum_shared
from mmcompile.runtime.groups import Groups

BUCKET_BYTES = 2**17
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who shares what, and each rank's own gradients, by parameter."""

    shared: tuple[Shared, ...]
    gradients: tuple[Gradients, ...]
    values: Mapping[str, Tensor]
    """Of the parameters."""


def summed(cases: Sequence[Case], num_ranks: int, folder: Path) -> list[list[Gradients]]:
    """Sum all cases in one set of processes; per case, what each rank holds then."""
    torch.save(list(cases), folder / "cases")
    spawn(_rank, args=(num_ranks, folder), nprocs=num_ranks)
    by_rank = [torch.load(folder / f"gradients_{rank}", weights_only=False) for rank in range(num_ranks)]
    return [[mine[index] for mine in by_rank] for index in range(len(cases))]


def _rank(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    groups = Groups.connect(store, rank, num_ranks, torch.device("cpu"), local=True)
    cases: list[Case] = torch.load(folder / "cases", weights_only=False)
    found: list[Gradients] = []
    for case in cases:
        parameters = {name: nn.Parameter(case.values[name]) for name in case.gradients[rank]}
        for name, gradient in case.gradients[rank].items():
            parameters[name].grad = None if gradient is None else gradient.clone()
        sum_shared(groups, parameters, case.shared, bucket_bytes=BUCKET_BYTES)
        found.append({name: parameter.grad for name, parameter in parameters.items()})
    torch.save(found, folder / f"gradients_{rank}")
    # All have what they need once rank 0 heard of all.
    groups.all_reduce(torch.zeros(1))
