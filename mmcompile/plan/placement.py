"""From the stages of a plan to what each rank runs: one placed stage for each replica, and for each shard of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmcompile.errors import PlanError
from mmcompile.plan.plan import Chain, Plan, ScheduleKind, Stage
from mmcompile.plan.towers import towers

Axis: TypeAlias = Literal["", "cp", "tp"]
"""What the ranks of a stage share: nothing, the tokens of every sequence, or the tensors of every layer."""


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
    axis: Axis = ""
    """What the shards share; "" for a stage that is whole."""
    program: str = ""
    """What programs call it: the name without the replica; "" where it is `name`."""
    tower: str = ""
    """What is balanced as one with this stage: see `mmcompile.step.step_plan`."""
    replica: int = 0
    sharing: tuple[int, ...] = ()
    """Ranks of all replicas, in order, where they share its parameters; () where each holds them whole."""

    @property
    def program_name(self) -> str:
        return self.program or self.name

    @property
    def repeats(self) -> bool:
        """Another shard has the same loss, and the same gradients of all parameters that both hold: they count once."""
        return self.axis == "tp" and self.ranks[0] != self.group[0]


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
        *(
            f"{chain.name} has both tensor parallel degree {chain.tp} and context parallel degree {chain.cp}"
            for chain in plan.chains
            if chain.tp > 1 and chain.cp > 1
        ),
        *(line for chain in plan.chains if chain.fsdp for line in _not_shared(chain, plan.schedule)),
        *_several_groups(plan),
        *(
            f"{chain.name} has context parallel degree {chain.cp}"
            for chain in plan.chains
            if chain.cp > 1 and chain != last
        ),
        *(
            [f"schedule zb-h1 keeps what weight gradients read, which recompute {plan.recompute} would not"]
            if plan.schedule == "zb-h1" and plan.recompute != "none"
            else []
        ),
    ]
    if found:
        raise PlanError(
            f"this plan can be simulated but not run: {'; '.join(found)}. The engine runs stages that are whole, share the "
            "tensors of their layers, or share the tokens of the language model; replicas that share parameters only of whole "
            "stages, and not with schedule zb-h1; and that schedule without recompute: plan with recompute='none' or another "
            "schedule"
        )
    towers(plan)


def _not_shared(chain: Chain, schedule: ScheduleKind) -> Iterable[str]:
    """Why replicas of a chain cannot share its parameters."""
    words = f"replicas of {chain.name} share its parameters (fsdp)"
    if chain.dp == 1:
        yield f"{words}, and there is one"
    if chain.tp * chain.cp > 1:
        yield f"{words}, and {chain.tp * chain.cp} ranks of each its tensors or tokens"
    if schedule == "zb-h1":
        yield f"{words}, and add gradients up in the backward, where schedule zb-h1 computes none of weights"
    if any(len(set(stage.ranks)) < len(stage.ranks) for stage in chain.stages):
        yield f"{words}, and several of them are on one rank"


def _several_groups(plan: Plan) -> Iterable[str]:
    """Ranks that would share parameters of one stage with some ranks, and of another with others."""
    groups: dict[int, Stage] = {}
    for stage in (stage for chain in plan.chains if chain.fsdp for stage in chain.stages):
        for rank in stage.ranks:
            other = groups.setdefault(rank, stage)
            if other.ranks != stage.ranks:
                yield (
                    f"rank {rank} shares parameters of {other.name} with ranks {list(other.ranks)}, of {stage.name} with "
                    f"{list(stage.ranks)}"
                )


def lockstep_of(stages: Sequence[PlacedStage]) -> list[list[int]]:
    """Stages, by index, that exchange values while they compute: shards of one, and replicas that share its parameters."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for index, stage in enumerate(stages):
        if stage.group:
            found.setdefault((stage.tower, stage.replica, stage.program_name.partition("@")[0]), []).append(index)
        elif stage.sharing:
            found.setdefault((stage.tower, -1, stage.program_name), []).append(index)
    return list(found.values())


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
                axis="" if len(ranks) == 1 else "tp" if chain.tp > 1 else "cp",
                program=program if chain.dp > 1 else "",
                tower=tower,
                replica=replica,
                sharing=stage.ranks if chain.fsdp else (),
            )
