"""Decisions of a search besides the cuts: degrees of a chain, settings of a whole plan, and the space of both."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmcompile.config import EncoderPlacement, Recompute, ScheduleKind
from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import PlanError
from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.pricing.pricing import LayerSharding

SCHEDULES: tuple[ScheduleKind, ...] = ("1f1b", "zb-h1", "eager-1f1b", "gpipe")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Parallel degrees of a chain: tensor (tp), context (cp) and data (dp); the number of stages is kept elsewhere."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    fsdp: bool = False
    """True if the chain's replicas shard its parameters (FSDP); False if each replica holds them whole."""

    @property
    def width(self) -> int:
        """Width of a stage: the number of ranks that run one stage of one replica, tp x cp."""
        return self.tp * self.cp

    @property
    def ranks(self) -> int:
        """Number of ranks of one stage in all replicas, tp x cp x dp."""
        return self.tp * self.cp * self.dp

    def sharding(self, recompute: Recompute) -> LayerSharding:
        """Return the sharding of each layer of the chain under a recomputation mode."""
        return LayerSharding(tp=self.tp, cp=self.cp, fsdp=self.dp if self.fsdp else 1, recompute=recompute)

    def __str__(self) -> str:
        words = [f"{name} {size}" for name, size in (("tp", self.tp), ("cp", self.cp), ("dp", self.dp)) if size > 1]
        return ", ".join([*words, *(["fsdp"] if self.fsdp else [])])


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Decisions that hold for a whole plan: microbatches, replicas of the last chain, schedule, recomputation."""

    num_microbatches: int
    """Number of microbatches of a step for one replica of the last chain."""
    samples: float
    """Number of samples in one microbatch of one replica of the last chain; may be a fraction on average."""
    dp: int = 1
    """Number of replicas of the last chain."""
    schedule: ScheduleKind = "1f1b"
    recompute: Recompute = "none"

    def samples_of(self, degrees: Degrees) -> float:
        """Return the samples of a microbatch on one replica of a chain: 2 on each of 4 last-chain replicas -> 4 on each of 2."""
        return self.samples * self.dp / degrees.dp


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Choices that define a candidate except for its cuts and the ranks of its stages."""

    chains: ChainSet
    setting: Setting
    degrees: tuple[Degrees, ...]
    """Parallel degrees of each chain, in the order of the chain set."""
    counts: tuple[int, ...]
    """Number of stages of each chain, in the order of the chain set."""
    guess_s: float = field(default=0.0, compare=False)
    """Rough seconds of a step, by which combinations are ordered."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages and replicas, if no two stages share ranks."""
        return sum(own.ranks * count for own, count in zip(self.degrees, self.counts, strict=True))

    def text(self, *, many: bool) -> str:
        """Return a short description of the combination, for lists of alternatives; `many` adds the number of microbatches."""
        each = ", ".join(
            f"{chain.name} {count}" + (f" ({own})" if str(own) else "")
            for chain, count, own in zip(self.chains.chains, self.counts, self.degrees, strict=True)
        )
        setting = self.setting
        words = [
            f"projector {self.chains.placement}" if self.chains.placement else "",
            "colocated" if self.chains.colocated else "",
            setting.schedule if setting.schedule != "1f1b" else "",
            f"recompute {setting.recompute}" if setting.recompute != "none" else "",
            f"{setting.num_microbatches} microbatches" if many else "",
        ]
        kept = ", ".join(filter(None, words))
        return f"{each} ({kept})" if kept else each


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Choices that a search may make; each field lists the allowed values, None all of them."""

    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    """Context-parallel degrees of the last chain; other chains have 1."""
    dp: tuple[int, ...] | None = (1,)
    """Choices of the last chain's replicas; None: every divisor of the global batch. Other chains get divisors and multiples."""
    schedules: tuple[ScheduleKind, ...] = ("1f1b",)
    recomputes: tuple[Recompute, ...] = ("none",)
    placements: tuple[EncoderPlacement, ...] = ("disjoint",)
    microbatches: tuple[int, ...] | None = None
    """Numbers of microbatches in a step; None: every divisor of a replica's share of the global batch."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp", "schedules", "recomputes", "placements", "microbatches"):
            if getattr(self, name) == ():
                raise PlanError(f"the search space has no {name} to choose from; name at least one")

    @classmethod
    def everything(cls, cluster: Cluster, *, context_parallel: bool = False) -> SearchSpace:
        """Return the largest space that plans cover; tp and cp are powers of two up to the devices of a node.

        `context_parallel` is True if ranks can share the language model's tokens; else cp is 1.
        """
        powers = tuple(
            size
            for size in (1, 2, 4, 8, 16)
            if size <= cluster.devices_per_node and cluster.devices_per_node % size == 0
        )
        return cls(
            tp=powers,
            cp=powers if context_parallel else (1,),
            dp=None,
            schedules=SCHEDULES,
            recomputes=RECOMPUTES,
            placements=("disjoint", "colocated"),
        )
