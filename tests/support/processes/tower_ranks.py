"""Ranks of hand-written towers as real gloo processes, each driven by the executor alone: no engine, no optimizer."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from mmcompile.batching.schedule_units import num_slots, units_of
from mmcompile.config import ScheduleKind
from mmcompile.planner.schedule.schedule import Schedule, schedule_units
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.executor.executor import Executor, num_backwards
from mmcompile.runtime.executor.loaded_stage import LoadedStage, Stages
from mmcompile.runtime.executor.p2p import Mail
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.gradients import GradientSums
from support.graphs.hand_towers import TowerStep, parameters, programs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerJob:
    """One step of all ranks."""

    step: TowerStep
    schedule: ScheduleKind = "1f1b"
    check_rows: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerShare:
    """What one rank computed."""

    loss: float
    num_tokens: int
    gradients: dict[str, Tensor]
    seconds: Tensor


def run_towers(
    jobs: Sequence[TowerJob], num_ranks: int, folder: Path, *, timeout_s: float = 60
) -> list[list[TowerShare]]:
    """Run all jobs in one set of processes; per job, the shares of the ranks.

    Raises:
        TimeoutError: ranks hang, `timeout_s` after all have started.
    """
    torch.save(list(jobs), folder / "jobs")
    running = spawn(_process, args=(num_ranks, folder), nprocs=num_ranks, join=False)
    assert running is not None
    last = None
    while not running.join(timeout=0.2):
        if last is None and len(list(folder.glob("started_*"))) == num_ranks:
            last = time.monotonic() + timeout_s
        if last is not None and time.monotonic() > last:
            for process in running.processes:
                assert process is not None
                process.kill()
            raise TimeoutError(f"ranks still run after {timeout_s} s")
    by_rank = [torch.load(folder / f"shares_{rank}", weights_only=False) for rank in range(num_ranks)]
    return [[shares[index] for shares in by_rank] for index in range(len(jobs))]


def _process(rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    groups = Groups.connect(store, rank, num_ranks, torch.device("cpu"), local=True)
    (folder / f"started_{rank}").touch()
    jobs: list[TowerJob] = torch.load(folder / "jobs", weights_only=False)
    torch.save([share_of(job, groups) for job in jobs], folder / f"shares_{rank}")
    groups.all_reduce(torch.zeros(1))


def share_of(job: TowerJob, groups: Groups) -> TowerShare:
    """Run this rank's part of a step."""
    held = {name: nn.Parameter(value) for name, value in parameters().items()}
    loaded = loaded_on(job.step, groups, held)
    actions = schedule_of(job).ranks[groups.rank]
    mail = Mail(groups, job.step.plan, job.step.stages, loaded, actions, job.check_rows)
    if groups.rank == 0:
        mail.send_roots(job.step.values, job.step.reads())
    board = StatusBoard.private(groups.world_size)
    sums = GradientSums(groups, held, (), num_backwards(job.step.plan, loaded))
    executor = Executor(job.step.plan, loaded, mail, board, groups, sums, seed=3, trace=False, check=lambda: None)
    result = executor.run(actions)
    sums.finish()
    mail.finish()
    return TowerShare(
        loss=float(result.losses.sum()),
        num_tokens=result.num_tokens,
        gradients={name: parameter.grad for name, parameter in held.items() if parameter.grad is not None},
        seconds=result.seconds,
    )


def schedule_of(job: TowerJob) -> Schedule:
    """The action lists of all ranks."""
    units, edges = units_of(job.step.plan, job.step.stages)
    return schedule_units(job.step.stages, units, edges, job.schedule, num_slots=num_slots(job.step.plan))


def loaded_on(step: TowerStep, groups: Groups, held: dict[str, nn.Parameter]) -> list[Stages]:
    """Per microbatch, this rank's stages of its tower and replica."""
    known: dict[tuple[str, int], LoadedStage] = {}
    found: list[Stages] = []
    for microbatch in step.plan.microbatches:
        programs = programs_of(microbatch.pattern).programs
        mine: dict[int, LoadedStage] = {}
        for at, stage in enumerate(step.stages):
            if (stage.tower, stage.replica, *stage.ranks) != (microbatch.tower, microbatch.replica, groups.rank):
                continue
            if (microbatch.pattern, at) not in known:
                known[microbatch.pattern, at] = LoadedStage.load(
                    programs[stage.program_name], held, step.stages, at, device=groups.device, compiled=False
                )
            mine[at] = known[microbatch.pattern, at]
        found.append(mine)
    return found
