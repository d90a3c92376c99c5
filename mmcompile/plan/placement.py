"""From the stages of a plan to what each rank runs: one placed stage for each replica, and for each shard of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mmcompile.errors import PlanError
from mmcompile.plan.plan import Chain, Plan, ScheduleKind, Stage
from mmcompile.plan.towers import towers

RUNNABLE_SCHEDULES: tuple[ScheduleKind, ...] = ("1f1b", "gpipe", "eager-1f1b")
"""Those that keep the backward of a microbatch in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """A replica of a stage, or one shard of it, on one rank, as far as ranks need to know it (`Placed` of the schedule)."""

    name: str
    """`language_model.0`; `language_model.0#1` is its replica 1, where there are several; `language_model.0#1@0` the first
    shard of that."""
    ranks: tuple[int, ...]
    """The one rank it is on."""
    depth: int
    group: tuple[int, ...] = ()
    """Ranks of all shards of the replica, in order of shards; () for a stage that is whole."""
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
    """All replicas and shards of a plan's stages, and the microbatches of a step: what the engine needs to know of it."""

    stages: tuple[PlacedStage, ...]
    num_microbatches: int
    """Of each replica."""
    schedule: ScheduleKind = "1f1b"
    towers: tuple[str, ...] = ("",)
    """What is balanced as one; the language model is last."""
    num_replicas: tuple[int, ...] = (1,)
    """Of each tower."""

    @classmethod
    def of(cls, plan: Plan) -> Placement:
        """Raises PlanError for a plan with axes that ranks cannot run."""
        check_runnable(plan)
        found = towers(plan)
        tower_of = {chain.name: name for name, chains in found.items() for chain in chains}
        return cls(
            stages=tuple(
                placed
                for chain in plan.chains
                for stage in chain.stages
                for placed in _placed(stage, chain, tower_of[chain.name])
            ),
            num_microbatches=plan.num_microbatches,
            schedule=plan.schedule,
            towers=tuple(found),
            num_replicas=tuple(chains[0].dp for chains in found.values()),
        )


def check_runnable(plan: Plan) -> None:
    """Refuse what can be planned, printed and simulated, but not run.

    Raises:
        PlanError: naming every axis in the way, and how to plan without it; or chains that feed each other have different
            numbers of replicas.
    """
    last = plan.chains[-1]
    found = [
        *(f"{chain.name} has tensor parallel degree {chain.tp}" for chain in plan.chains if chain.tp > 1),
        *(f"replicas of {chain.name} share its parameters (fsdp)" for chain in plan.chains if chain.fsdp),
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
            f"this plan can be simulated but not run: {'; '.join(found)}. The engine runs replicas that hold all parameters of "
            "stages that are whole or share the tokens of the language model, recompute none, schedules "
            f"{', '.join(RUNNABLE_SCHEDULES)}: plan with tensor_parallel=1, recompute='none' and one of these schedules"
        )
    towers(plan)


def shard_names(stage: Stage, num_replicas: int = 1) -> tuple[str, ...]:
    """What programs call the shards of a replica (`language_model.0@1` is the second); the stage's own name if it is whole.

    Args:
        num_replicas: that the stage's ranks are shared by.
    """
    count = len(stage.ranks) // num_replicas
    if count == 1:
        return (stage.name,)
    return tuple(shard_name(stage.name, index) for index in range(count))


def shard_name(name: str, index: int) -> str:
    """Of a stage or of a value that differs by shard."""
    return f"{name}@{index}"


def replica_name(stage: str, replica: int) -> str:
    """Of a replica of a stage, or of a shard of one, where there are several replicas: `language_model.0#1@0`."""
    name, mark, shard = stage.partition("@")
    return f"{name}#{replica}{mark}{shard}"


def _placed(stage: Stage, chain: Chain, tower: str) -> Iterable[PlacedStage]:
    programs = shard_names(stage, chain.dp)
    for replica in range(chain.dp):
        ranks = stage.ranks[replica * len(programs) :][: len(programs)]
        for program, rank in zip(programs, ranks, strict=True):
            yield PlacedStage(
                name=replica_name(program, replica) if chain.dp > 1 else program,
                ranks=(rank,),
                depth=stage.depth,
                group=ranks if len(ranks) > 1 else (),
                program=program if chain.dp > 1 else "",
                tower=tower,
                replica=replica,
            )
