"""Ranks of hand-written towers as real gloo processes, each driven by the executor alone: no engine, no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mmcompile.batching.schedule_units import num_slots, units_of
from mmcompile.config import ScheduleKind
from mmcompile.planner.schedule.schedule import Schedule, schedule_units
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.executor.executor import Executor, num_backwards
from mmcompile.runtime.executor.loaded_stage import LoadedStage, Stages
from mmcompile.runtime.executor.p2p import P2P
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.gradients import GradientSums
from support.graphs.hand_towers import TowerStep, parameters, programs_of
from support.processes.spawn_ranks import RankContext, spawn_ranks


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


def run_towers(jobs: Sequence[TowerJob], num_ranks: int) -> list[list[TowerShare]]:
    """Run all jobs in one set of processes; per job, return the shares of the ranks."""
    return spawn_ranks(_on_rank, jobs, num_ranks, timeout_s=60)


def _on_rank(context: RankContext, job: TowerJob) -> TowerShare:
    return share_of(job, context.groups)


def share_of(job: TowerJob, groups: Groups) -> TowerShare:
    """Run this rank's part of a step."""
    held = {name: nn.Parameter(value) for name, value in parameters().items()}
    loaded = loaded_on(job.step, groups, held)
    actions = schedule_of(job).ranks[groups.rank]
    values = job.step.values if groups.rank == 0 else ()
    p2p = P2P(groups, job.step.plan, job.step.stages, loaded, actions, values=values, check_rows=job.check_rows)
    board = StatusBoard.private(groups.world_size)
    sums = GradientSums(groups, held, (), num_backwards(job.step.plan, loaded))
    executor = Executor(job.step.plan, loaded, p2p, board, groups, sums, seed=3, trace=False, check=lambda: None)
    result = executor.run(actions)
    sums.finish()
    p2p.finish()
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
