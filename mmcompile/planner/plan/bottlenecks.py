"""Bottlenecks of a plan: its slowest rank, its fullest rank, its largest cause of idle time; and a remedy for each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mmcompile.planner.plan.plan_record import BubbleShare, Chain, PlanRecord, Stage
from mmcompile.units import format_bytes, milliseconds

EVEN = 0.03
"""Relative deviation from the mean time within which stages count as even, so that no other cut helps."""
TIGHT = 0.9
"""Share of a rank's memory above which a plan gets a warning."""

Cause = Literal["warm_up", "stages", "microbatches", "links"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Resource that limits a plan (time, memory, or idle ranks), where it does, and advice."""

    kind: Literal["time", "memory", "bubble"]
    where: str
    """Names of the stages or of the chain that limit the plan."""
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Stages that run on the same ranks, with their seconds and bytes added up."""

    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """Names of the group's stages, joined by " + "."""
        return " + ".join(stage.name for stage in self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that run the group's stages, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def seconds(self) -> float:
        """Predicted seconds of one microbatch's forward and backward in all stages of the group."""
        return sum(stage.prediction.times.total_s for stage in self.stages)

    @property
    def num_bytes(self) -> int:
        """Predicted peak bytes of one rank, all stages of the group together."""
        return sum(stage.prediction.total_bytes for stage in self.stages)

    @property
    def in_flight(self) -> int:
        """Largest number of microbatches in flight of any stage of the group."""
        return max(stage.prediction.in_flight for stage in self.stages)


def rank_loads(plan: PlanRecord) -> tuple[RankGroup, ...]:
    """Return one `RankGroup` for each set of stages that run on the same ranks, in order of ranks."""
    on_rank: defaultdict[int, list[Stage]] = defaultdict(list)
    for stage in plan.stages:
        for rank in stage.ranks:
            on_rank[rank].append(stage)
    found: dict[tuple[str, ...], RankGroup] = {}
    for rank in sorted(on_rank):
        names = tuple(stage.name for stage in on_rank[rank])
        found.setdefault(names, RankGroup(stages=tuple(on_rank[rank])))
    return tuple(found.values())


def memory_bytes(plan: PlanRecord) -> int:
    """Return the memory in bytes of one rank of a plan; more ranks than devices divide the memory of all devices evenly."""
    devices = plan.cluster.num_devices
    return plan.cluster.device.memory_bytes * devices // max(devices, plan.num_ranks)


def bottlenecks(plan: PlanRecord) -> tuple[Bottleneck, Bottleneck, Bottleneck]:
    """Return three bottlenecks of a plan: its slowest rank, its fullest rank, its largest cause of idle time."""
    loads = rank_loads(plan)
    return _slowest(plan, loads), _fullest(plan, loads), _idle(plan, loads)


def _slowest(plan: PlanRecord, loads: tuple[RankGroup, ...]) -> Bottleneck:
    slowest = max(loads, key=lambda load: load.seconds)
    mean_s = sum(load.seconds for load in loads) / len(loads)
    excess = slowest.seconds / mean_s - 1 if mean_s else 0.0
    above = f" ({times_text(1 + excess)} the mean)" if excess > EVEN else ""
    return Bottleneck(
        kind="time",
        where=slowest.name,
        what=f"slowest: {slowest.name}, {milliseconds(slowest.seconds)} ms a microbatch{above}",
        advice=_faster(plan, slowest, excess),
    )


def times_text(ratio: float) -> str:
    """Format a ratio to a mean as text: `1.2` -> `"20% above"`, `3.1` -> `"3.1 times"`."""
    return f"{ratio - 1:.0%} above" if ratio < 2 else f"{ratio:.1f} times"


def _faster(plan: PlanRecord, slowest: RankGroup, excess: float) -> str:
    if excess <= EVEN:
        return "all are even, so only more devices shorten the step"
    stage, *beside = slowest.stages
    if beside:
        return "its stages share devices; give them devices of their own"
    chain = chain_of_stage(plan, stage.name)
    if len(stage.layer_names) == 1:
        return f"it is a single layer: only more ranks for {chain.name}'s tensors or tokens shorten it"
    total_s = sum(other.prediction.times.total_s for other in chain.stages)
    count = len(chain.stages) + 1
    gain = f"would make about {milliseconds(total_s / count)} ms"
    used = len({rank for other in plan.stages for rank in other.ranks})
    if used + len(stage.ranks) > plan.cluster.num_devices:
        return f"a stage more for {chain.name} {gain}, but the devices are used up"
    return f"--stages {chain.name}={count} {gain}"


def _fullest(plan: PlanRecord, loads: tuple[RankGroup, ...]) -> Bottleneck:
    limit = memory_bytes(plan)
    fullest = max(loads, key=lambda load: load.num_bytes)
    share = fullest.num_bytes / limit
    parts = Counter[str]()
    for stage in fullest.stages:
        parts.update(stage.prediction.memory_bytes)
    del parts["total"]
    largest = max(parts, key=lambda part: parts[part])
    flying = f" of {fullest.in_flight} in flight" if largest == "activations" else ""
    what = (
        f"fullest: {fullest.name}, {format_bytes(fullest.num_bytes)} of {format_bytes(limit)} ({share:.0%}), "
        f"mostly {'optimizer state' if largest == 'optimizer' else largest}{flying}"
    )
    return Bottleneck(kind="memory", where=fullest.name, what=what, advice=_smaller(plan, largest, share))


def _smaller(plan: PlanRecord, largest: str, share: float) -> str:
    if share < TIGHT:
        return f"{1 - share:.0%} is free"
    if largest == "activations":
        if plan.recompute != "full":
            return "recompute more (--recompute full), or take fewer samples a microbatch"
        return "take fewer samples a microbatch, or let more ranks share the tokens (--context-parallel)"
    return "spread it over more stages, or let more ranks share the tensors (--tensor-parallel)"


def _idle(plan: PlanRecord, loads: tuple[RankGroup, ...]) -> Bottleneck:
    shares = plan.predicted.bubbles
    if not shares:
        depth = 1 + max(stage.depth for stage in plan.stages)
        fill = (depth - 1) / (plan.num_microbatches + depth - 1)
        return Bottleneck(
            kind="bubble",
            where="all",
            what=f"idle: {plan.predicted.bubble:.0%} of device time, where {depth} equal stages would be idle {fill:.0%}",
            advice=f"more microbatches than {plan.num_microbatches} shrink that part",
        )
    ranks = {chain.name: len({rank for stage in chain.stages for rank in stage.ranks}) for chain in plan.chains}
    weighted: dict[tuple[str, Cause], float] = {
        (share.chain, cause): ranks[share.chain] * value for share in shares for cause, value in causes(share).items()
    }
    name, cause = max(weighted, key=lambda key: weighted[key])
    value = causes(next(share for share in shares if share.chain == name))[cause]
    if value < 0.005:
        return Bottleneck(kind="bubble", where="all", what="idle: less than 1% anywhere", advice="nothing to gain here")
    what = f"idle: {name} spends {value:.0%} of its time {_DOING[cause]}"
    return Bottleneck(kind="bubble", where=name, what=what, advice=_busier(plan, name, cause, loads))


def causes(share: BubbleShare) -> dict[Cause, float]:
    """Return cause of idle time -> share of a chain's time, in the order of the fields of `BubbleShare`."""
    return {cause: getattr(share, cause) for cause in get_args(Cause)}


CAUSE_WORDS: Mapping[Cause, str] = {
    "warm_up": "filling and draining",
    "stages": "slower stages",
    "microbatches": "unequal microbatches",
    "links": "links",
}
_DOING: Mapping[Cause, str] = {
    "warm_up": "filling and draining the pipeline",
    "stages": "waiting for slower stages",
    "microbatches": "waiting because microbatches differ",
    "links": "waiting for messages under way",
}


def _busier(plan: PlanRecord, chain: str, cause: Cause, loads: tuple[RankGroup, ...]) -> str:
    match cause:
        case "warm_up":
            depth = 1 + max(stage.depth for stage in plan.stages)
            return f"more microbatches than {plan.num_microbatches}, or fewer stages in a row than {depth}, shrink it"
        case "stages":
            slowest = max(loads, key=lambda load: load.seconds)
            if any(chain_of_stage(plan, stage.name).name == chain for stage in slowest.stages):
                return f"cut {chain} more evenly, or give it a stage more"
            return f"{slowest.name} sets the pace: it needs more devices, {chain} fewer or none of its own"
        case "microbatches":
            return "balance samples over microbatches, or take more samples in each"
        case "links":
            if not plan.links:
                return "put its stages nearer together"
            link = max(plan.links, key=lambda link: link.num_bytes)
            return f"the largest message is {link.source} -> {link.target}, {format_bytes(link.num_bytes)}; keep them on one node"


def chain_of_stage(plan: PlanRecord, stage: str) -> Chain:
    """Return the chain that contains the stage with a name."""
    return next(chain for chain in plan.chains if any(own.name == stage for own in chain.stages))


def bubble_text(share: BubbleShare) -> str:
    """Return the idle share of a chain by cause as text: `vision idle 12.0%: filling and draining 8.0%, links 4.0%`."""
    shares = causes(share)
    named = (f"{CAUSE_WORDS[cause]} {value:.1%}" for cause, value in shares.items() if value >= 0.0005)
    return f"{share.chain} idle {sum(shares.values()):.1%}: {', '.join(named) or 'never'}"
