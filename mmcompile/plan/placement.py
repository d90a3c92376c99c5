"""From the stages of a plan to what each rank runs: a stage of a context-parallel chain is one shard a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mmcompile.errors import PlanError
from mmcompile.plan.plan import Plan, ScheduleKind, Stage

RUNNABLE_SCHEDULES: tuple[ScheduleKind, ...] = ("1f1b", "gpipe", "eager-1f1b")
"""Those that keep the backward of a microbatch in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """A stage, or one shard of it, on one rank, as far as ranks need to know it (`Placed` of the schedule)."""

    name: str
    ranks: tuple[int, ...]
    """The one rank it is on."""
    depth: int
    group: tuple[int, ...] = ()
    """Ranks of all shards of the stage, in order of shards; () for a stage that is whole."""
    program: str = ""
    """What programs call it: the name without the replica; "" where it is `name`."""
    tower: str = ""
    """What is balanced as one with this stage: see `mmcompile.step.step_plan`."""
    replica: int = 0

    @property
    def program_name(self) -> str:
        return self.program or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All stages and shards of a plan, and the microbatches of a step: what the engine needs to know of it."""

    stages: tuple[PlacedStage, ...]
    num_microbatches: int
    schedule: ScheduleKind = "1f1b"

    @classmethod
    def of(cls, plan: Plan) -> Placement:
        """Raises PlanError for a plan with axes that ranks cannot run."""
        check_runnable(plan)
        return cls(
            stages=tuple(placed for stage in plan.stages for placed in _placed(stage)),
            num_microbatches=plan.num_microbatches,
            schedule=plan.schedule,
        )


def check_runnable(plan: Plan) -> None:
    """Refuse what can be planned, printed and simulated, but not run.

    Raises:
        PlanError: naming every axis in the way, and how to plan without it.
    """
    last = plan.chains[-1]
    found = [
        *(f"{chain.name} has tensor parallel degree {chain.tp}" for chain in plan.chains if chain.tp > 1),
        *(f"{chain.name} has {chain.dp} replicas" for chain in plan.chains if chain.dp > 1 or chain.fsdp),
        *(
            f"{chain.name} has context parallel degree {chain.cp}"
            for chain in plan.chains
            if chain.cp > 1 and chain != last
        ),
        *([f"recompute is {plan.recompute}"] if plan.recompute != "none" else []),
        *([f"the schedule is {plan.schedule}"] if plan.schedule not in RUNNABLE_SCHEDULES else []),
    ]
    if found:
        raise PlanError(
            f"this plan can be simulated but not run: {'; '.join(found)}. The engine runs one replica whose stages are whole or "
            f"share the tokens of the language model, recompute none, schedules {', '.join(RUNNABLE_SCHEDULES)}: plan with "
            "tensor_parallel=1, replicas=1, recompute='none' and one of these schedules"
        )


def shard_names(stage: Stage) -> tuple[str, ...]:
    """Names of a stage's shards (`language_model.0@1` is the second); the stage's own where it is on one rank."""
    if len(stage.ranks) == 1:
        return (stage.name,)
    return tuple(shard_name(stage.name, index) for index in range(len(stage.ranks)))


def shard_name(name: str, index: int) -> str:
    """Of a stage or of a value that differs by shard."""
    return f"{name}@{index}"


def _placed(stage: Stage) -> Iterable[PlacedStage]:
    group = stage.ranks if len(stage.ranks) > 1 else ()
    for name, rank in zip(shard_names(stage), stage.ranks, strict=True):
        yield PlacedStage(name=name, ranks=(rank,), depth=stage.depth, group=group)
