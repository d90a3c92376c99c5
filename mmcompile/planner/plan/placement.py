"""Placement of a plan's stages on ranks: one placed stage for each replica, and for each shard of its tensors or tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmcompile.config import ScheduleKind
from mmcompile.errors import PlanError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """Stage of one replica, or one shard of it, on one rank; schedules are made of such stages (protocol `Placed`)."""

    name: str
    """Name of the stage on this rank: `language_model.0` with one replica, unsharded.

    With several replicas `language_model.0#1` for replica 1, `language_model.0#1@0` for its first shard.
    """
    ranks: tuple[int, ...]
    """Tuple of one entry: the rank that runs the stage."""
    depth: int
    group: tuple[int, ...] = ()
    """Ranks of all shards of the stage in this replica, tensor-parallel ranks side by side; () if the stage is not sharded."""
    tp: int = 1
    """Number of ranks that share the tensors of every layer. If a stage has more shards, they share its tokens too."""
    program: str = ""
    """Name of the stage in stage programs, the same for all replicas; "" if it equals `name`."""
    tower: str = ""
    """Name of the first chain of the stage's balance group, the chains whose samples are assigned to microbatches together."""
    replica: int = 0
    sharing: tuple[int, ...] = ()
    """Ranks of this shard in all replicas, in order, if replicas share its parameters (FSDP); () if each holds them whole."""

    @property
    def program_name(self) -> str:
        """Name of the stage in stage programs, the same for all replicas."""
        return self.program or self.name

    @property
    def shard(self) -> int:
        """Index of this shard among the shards of the stage in its replica."""
        return self.group.index(self.ranks[0]) if self.group else 0

    @property
    def tensor_group(self) -> tuple[int, ...]:
        """Ranks that compute the same tokens with parts of the same tensors, in order; () if tensors are not split."""
        first = self.shard - self.shard % self.tp
        return self.group[first : first + self.tp] if self.tp > 1 else ()

    @property
    def token_group(self) -> tuple[int, ...]:
        """Ranks that compute other tokens of the same sequences with the same tensors, in order; () for whole sequences."""
        return self.group[self.shard % self.tp :: self.tp] if len(self.group) > self.tp else ()

    @property
    def repeats(self) -> bool:
        """True if another shard computes the same loss and the same gradients of shared parameters, which count only once."""
        return self.shard % self.tp != 0

    @property
    def same_values(self) -> str:
        """Key that is equal for all shards that compute the same values, for example the same dropout masks."""
        stage = self.program_name.partition("@")[0]
        return shard_name(stage, self.shard // self.tp) if self.token_group else stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Stages of a plan on ranks, every replica and shard by itself, and the microbatches of a step, for the engine."""

    stages: tuple[PlacedStage, ...]
    num_microbatches: int
    """Number of microbatches in a step for each replica of the language model."""
    schedule: ScheduleKind = "1f1b"
    towers: tuple[str, ...] = ("",)
    """Names of the balance groups (chains whose samples are assigned to microbatches together), the language model's last."""
    num_replicas: tuple[int, ...] = (1,)
    """Number of replicas of each balance group, in the order of the field `towers`."""

    @classmethod
    def of(cls, plan: Plan) -> Placement:
        """Return which rank holds which stage, replica and shard of a plan; PlanError for parallel axes that the engine lacks."""
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
    """Raise PlanError if the engine cannot run a plan, although the plan can be printed and simulated.

    The message names every parallel axis that cannot run, or chains of one balance group with different numbers of replicas.
    """
    last = plan.chains[-1]
    found = [
        *(line for chain in plan.chains if chain.fsdp for line in _not_shared(chain, plan.schedule)),
        *_several_groups(plan),
        *(
            f"{chain.name} has context parallel degree {chain.cp}"
            for chain in plan.chains
            if chain.cp > 1 and chain != last
        ),
    ]
    if found:
        raise PlanError(
            f"this plan can be simulated but not run: {'; '.join(found)}. The engine runs stages that are whole or share tensors "
            "of their layers, and those of the language model their tokens too; replicas that share parameters on ranks of "
            "their own, and not with schedule zb-h1. Choose other degrees, another schedule, or no fsdp"
        )
    towers(plan)


def _not_shared(chain: Chain, schedule: ScheduleKind) -> Iterable[str]:
    """Yield, as text, the reasons why replicas of a chain cannot share its parameters (FSDP)."""
    words = f"replicas of {chain.name} share its parameters (fsdp)"
    if chain.dp == 1:
        yield f"{words}, and there is one"
    if schedule == "zb-h1":
        yield f"{words}, and add gradients up in the backward, where schedule zb-h1 computes none of weights"
    if any(len(set(stage.ranks)) < len(stage.ranks) for stage in chain.stages):
        yield f"{words}, and several of them are on one rank"


def _several_groups(plan: Plan) -> Iterable[str]:
    """Yield an error text for each rank that would share two stages' parameters (FSDP) with two different groups of ranks."""
    groups: dict[int, tuple[Stage, tuple[int, ...]]] = {}
    for chain in plan.chains:
        for stage in chain.stages if chain.fsdp else ():
            for rank in stage.ranks:
                sharing = _sharing(stage, chain, rank)
                other, before = groups.setdefault(rank, (stage, sharing))
                if before != sharing:
                    yield (
                        f"rank {rank} shares parameters of {other.name} with ranks {list(before)}, of {stage.name} with "
                        f"{list(sharing)}"
                    )


def _sharing(stage: Stage, chain: Chain, rank: int) -> tuple[int, ...]:
    """Return the ranks that share parameters with `rank` (FSDP): in each replica of the stage, the one with the same shard."""
    shards = chain.tp * chain.cp
    return stage.ranks[stage.ranks.index(rank) % shards :: shards]


def lockstep_of(stages: Sequence[PlacedStage]) -> list[list[int]]:
    """Return groups of stage indices that run collectives with each other: shards of one stage, or replicas under FSDP."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for index, stage in enumerate(stages):
        if stage.group or stage.sharing:
            replica = -1 if stage.sharing else stage.replica
            found.setdefault((stage.tower, replica, stage.program_name.partition("@")[0]), []).append(index)
    return list(found.values())


def shard_names(stage: Stage, num_replicas: int = 1) -> tuple[str, ...]:
    """Return the program names of a replica's shards: `language_model.0@1` is the second. An unsharded stage keeps its name."""
    count = len(stage.ranks) // num_replicas
    if count == 1:
        return (stage.name,)
    return tuple(shard_name(stage.name, index) for index in range(count))


def shard_name(name: str, index: int) -> str:
    """Return the name of a shard of a stage, or of a value that differs by shard: `language_model.0@1`."""
    return f"{name}@{index}"


def replica_name(stage: str, replica: int) -> str:
    """Return a stage's or shard's name in a replica, where there are several: replica 1 of `lm.0@2` is `lm.0#1@2`."""
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
                tp=chain.tp,
                program=program if chain.dp > 1 else "",
                tower=tower,
                replica=replica,
                sharing=_sharing(stage, chain, rank) if chain.fsdp else (),
            )
