"""Search: which chain gets how many devices, judged by the simulator.

For every way to line up the components and every allocation of devices to the resulting chains: split each chain
exactly, place encoders first and the language model last, simulate a step over the whole DAG of stages, keep the
fastest (to half a percent). Two bounds spare most simulations: microbatches times the slowest stage that the best
split can have, and then `judge.lower_bound_s` of the split itself. Where the allocations are too many to list, each
chain gets the fewest stages that meet a target time, for every target time, and one more in one chain at a time.

Source: exact splits over frozen-aware costs, Oobleck / Cornstarch / Entrain dissertation §3.4.1; target times,
Cornstarch Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import product
from math import prod

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.plan.candidate import Candidate, Splitter, draft, fixed_bytes
from mmcompile.plan.chains import ChainSet, ProjectorPlacement, chain_sets
from mmcompile.plan.judge import fast_makespan_s, lower_bound_s
from mmcompile.plan.partition import PartitionLayer, partition
from mmcompile.plan.plan import Fingerprint, Plan, Prediction, Rejected

MAX_LISTED = 4000
"""Allocations of one chain set up to which all are considered."""
TOLERANCE = 0.005
"""Times closer than this are equal, for costs cannot tell them apart: the simpler plan wins."""
MAX_REJECTED = 5


def search(
    graph: ModelGraph,
    costs: Mapping[str, tuple[LayerCost, ...]],
    cluster: Cluster,
    *,
    num_microbatches: int,
    dtype: str,
    fingerprint: Fingerprint,
    stages: Mapping[str, int] | None = None,
    projector: ProjectorPlacement | None = None,
    num_devices: int | None = None,
    entries: Mapping[tuple[str, str], int] | None = None,
    shards: int = 1,
) -> Plan:
    """Find the fastest plan. Its `links` and `shared_values` are empty: they are known once stages are lowered.

    Args:
        graph: its components and the edges between them.
        costs: component name -> cost of each layer.
        cluster: where to run.
        num_microbatches: microbatches of a step.
        dtype: of the computation, `"bfloat16"`.
        fingerprint: what the plan is made for.
        stages: chain name -> number of stages, for chains whose count is decided. A chain is named after its encoder or
            language model, a projector alone after itself.
        projector: where projectors go; None lets the simulator choose.
        num_devices: use only so many devices.
        entries: (producer, consumer) -> first layer of the consumer that reads the producer; 0 where absent.
        shards: ranks that share each stage of the last chain; `costs` are those of one shard.

    Raises:
        PlanError: unknown chain names, more stages than layers or devices, or nothing fits the memory.
        ConfigError: `projector` has no effect, or the device has no figure for `dtype`.
    """
    if num_microbatches < 1:
        raise PlanError(f"num_microbatches is {num_microbatches}; a step has at least one")
    budget = _budget(cluster, num_devices)
    sets = chain_sets(graph, costs, cluster.device, dtype, projector=projector, entries=entries)
    run = _Search(cluster=cluster, num_microbatches=num_microbatches, budget=budget, shards=shards)
    best = run.run(sets, stages or {})
    if best is None:
        raise PlanError(_no_plan(run, sets))
    return _plan(run, best, fingerprint)


def _simplest(judged: _Judged) -> tuple[int, int, float]:
    """Order of plans that take the same time: fewer devices, then fewer stages, then the faster."""
    return judged.candidate.num_ranks, len(judged.candidate.ranges), judged.iteration_s


def _budget(cluster: Cluster, num_devices: int | None) -> int:
    if num_devices is None:
        return cluster.num_devices
    if num_devices < 1 or (num_devices > cluster.num_devices and not cluster.is_local):
        raise PlanError(f"num_devices is {num_devices}; cluster {cluster} has {cluster.num_devices}, use 1 to as many")
    return num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allocation:
    """Stages for each chain of one chain set, not yet split."""

    bound_s: float
    counts: tuple[int, ...]
    splitter: Splitter
    ranks: tuple[int, ...] | None

    @property
    def num_ranks(self) -> int:
        return _devices(self.counts, self.splitter.shards) if self.ranks is None else 1 + max(self.ranks)

    @property
    def text(self) -> str:
        chains = self.splitter.chains
        counts = ", ".join(f"{chain.name} {count}" for chain, count in zip(chains.chains, self.counts, strict=True))
        return counts if chains.placement is None else f"{counts} (projector {chains.placement})"


_Order = tuple[float, int, int]
"""Bound, ranks, number in the list: no two alike, so the queue never compares further."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    allocation: _Allocation
    candidate: Candidate
    iteration_s: float
    bubble: float


@dataclass(kw_only=True, slots=True)
class _Search:
    cluster: Cluster
    num_microbatches: int
    budget: int
    shards: int
    listed: bool = True
    """False if some chain set has too many allocations to list."""
    simulated: list[_Judged] = field(default_factory=list)
    bounded: list[tuple[float, _Allocation]] = field(default_factory=list)
    too_big: list[_Allocation] = field(default_factory=list)

    def run(self, sets: Sequence[ChainSet], stages: Mapping[str, int]) -> _Judged | None:
        """Best first: refine the lowest bound until it is a simulated time; None if nothing fits the memory."""
        queue: list[tuple[_Order, _Allocation, Candidate | None]] = [
            ((allocation.bound_s, allocation.num_ranks, number), allocation, None)
            for number, allocation in enumerate(self._allocations(sets, stages))
        ]
        heapify(queue)
        fastest_s = float("inf")
        while queue:
            # Chains that share devices are few, and often equal: look at all of them, so that the simplest can win.
            slack = TOLERANCE / 2 if queue[0][1].ranks is not None else -TOLERANCE / 2
            if queue[0][0][0] >= fastest_s * (1 + slack):
                break
            (_, num_ranks, number), allocation, candidate = heappop(queue)
            if candidate is None:
                refined = self._draft(allocation)
                if refined is not None:
                    bound_s = max(lower_bound_s(refined), allocation.bound_s)
                    heappush(queue, ((bound_s, num_ranks, number), allocation, refined))
                continue
            judged = self._judge(allocation, candidate)
            self.simulated.append(judged)
            fastest_s = min(fastest_s, judged.iteration_s)
        self.bounded = [(bound_s, allocation) for (bound_s, _, _), allocation, _ in queue]
        close = (judged for judged in self.simulated if judged.iteration_s <= fastest_s * (1 + TOLERANCE / 2))
        return min(close, key=_simplest, default=None)

    def _allocations(self, sets: Sequence[ChainSet], stages: Mapping[str, int]) -> list[_Allocation]:
        found: list[_Allocation] = []
        for chains in _named(sets, stages):
            if not stages and self.shards == 1 and self.budget < len(chains.chains):
                found.append(self._colocated(chains))
            else:
                found.extend(self._separate(chains, stages))
        if not found:
            raise PlanError(self._too_few(sets, stages))
        return found

    def _draft(self, allocation: _Allocation) -> Candidate | None:
        memory_bytes = self.memory_bytes(allocation.num_ranks)
        candidate = draft(allocation.splitter, allocation.counts, memory_bytes, allocation.ranks)
        if candidate is not None and (allocation.ranks is None or max(candidate.rank_bytes()) <= memory_bytes):
            return candidate
        self.too_big.append(allocation)
        return None

    def memory_bytes(self, num_ranks: int) -> int:
        """Memory of one rank; processes beyond the cores of this machine share its memory too."""
        devices = self.cluster.num_devices
        return self.cluster.device.memory_bytes * devices // max(devices, num_ranks)

    def _judge(self, allocation: _Allocation, candidate: Candidate) -> _Judged:
        makespan_s = (
            fast_makespan_s(candidate, self.cluster)
            if allocation.ranks is None
            else candidate.simulate(self.cluster).makespan_s
        )
        devices = min(candidate.num_ranks, self.cluster.num_devices)
        work_s = self.num_microbatches * candidate.work_s
        # Processes that share cores are never faster than all their work spread over the cores.
        iteration_s = max(makespan_s, work_s / devices)
        bubble = 1.0 - work_s / (devices * iteration_s) if iteration_s else 0.0
        return _Judged(allocation=allocation, candidate=candidate, iteration_s=iteration_s, bubble=max(bubble, 0.0))

    def _separate(self, chains: ChainSet, stages: Mapping[str, int]) -> Iterator[_Allocation]:
        fixed = [stages.get(chain.name) for chain in chains.chains]
        least = _devices([count or 1 for count in fixed], self.shards)
        if least > self.budget and not self.cluster.is_local:
            return
        spare = max(self.budget - least, 0)
        room = [*(spare for _ in chains.chains[:-1]), spare // self.shards]
        limits = tuple(
            count or min(len(chain.layers), 1 + more)
            for chain, count, more in zip(chains.chains, fixed, room, strict=True)
        )
        splitter = self._splitter(chains, limits)
        slowest = [_free_bottlenecks(chains, index, limit) for index, limit in enumerate(limits)]
        choices = [range(count or 1, limit + 1) for count, limit in zip(fixed, limits, strict=True)]
        everything = prod(map(len, choices)) <= MAX_LISTED
        self.listed = self.listed and everything
        for counts in product(*choices) if everything else _loosely_coupled(choices, slowest):
            if _devices(counts, self.shards) <= least + spare:
                bottleneck_s = max(times[count - 1] for times, count in zip(slowest, counts, strict=True))
                bound_s = self.num_microbatches * bottleneck_s
                yield _Allocation(bound_s=bound_s, counts=counts, splitter=splitter, ranks=None)

    def _colocated(self, chains: ChainSet) -> _Allocation:
        """Fewer devices than chains: one stage a chain, chains dealt to devices, longest first to the least loaded."""
        order = sorted(range(len(chains.chains)), key=lambda index: (-chains.chains[index].total_s, index))
        load = [0.0] * self.budget
        device_of: dict[int, int] = {}
        for index in order:
            device = min(range(self.budget), key=lambda d: (load[d], d))
            load[device] += chains.chains[index].total_s
            device_of[index] = device
        # The device of the loss comes last, the others in the order of their first chain.
        last = device_of[len(chains.chains) - 1]
        in_order = dict.fromkeys(device_of[index] for index in range(len(chains.chains)))
        rank_of = {device: rank for rank, device in enumerate([*(d for d in in_order if d != last), last])}
        counts = (1,) * len(chains.chains)
        return _Allocation(
            bound_s=self.num_microbatches * max(load),
            counts=counts,
            splitter=self._splitter(chains, counts),
            ranks=tuple(rank_of[device_of[index]] for index in range(len(chains.chains))),
        )

    def _splitter(self, chains: ChainSet, limits: tuple[int, ...]) -> Splitter:
        return Splitter(
            chains=chains,
            cluster=self.cluster,
            num_microbatches=self.num_microbatches,
            max_stages=limits,
            shards=self.shards,
        )

    def _too_few(self, sets: Sequence[ChainSet], stages: Mapping[str, int]) -> str:
        least = min(_devices([stages.get(c.name, 1) for c in chains.chains], self.shards) for chains in sets)
        asked = "".join(f"{name} {count}, " for name, count in stages.items())
        shared = f", {self.shards} ranks for each of {sets[0].chains[-1].name}" if self.shards > 1 else ""
        return (
            f"stages ({asked}at least one for every other chain{shared}) need {least} devices, got {self.budget} of "
            f"{self.cluster}; ask for fewer stages or a larger cluster"
        )


def _devices(counts: Sequence[int], shards: int) -> int:
    """Devices of so many stages of each chain, the last chain's with `shards` each."""
    return sum(counts) + (shards - 1) * counts[-1]


def _named(sets: Sequence[ChainSet], stages: Mapping[str, int]) -> list[ChainSet]:
    """The chain sets that have every chain named, with enough layers."""
    longest: dict[str, int] = {}
    for chains in sets:
        for chain in chains.chains:
            longest[chain.name] = max(longest.get(chain.name, 0), len(chain.layers))
    for name, count in stages.items():
        if name not in longest:
            raise PlanError(f"no chain {name!r} to give {count} stages; chains are {', '.join(longest)}")
        if not 1 <= count <= longest[name]:
            raise PlanError(f"{name} has {longest[name]} layers, cannot be {count} stages; use 1 to {longest[name]}")
    fitting = [chains for chains in sets if _fits(chains, stages)]
    if not fitting:
        raise PlanError(f"no placement of the projector gives stages {dict(stages)}; chains are {_chain_texts(sets)}")
    return fitting


def _fits(chains: ChainSet, stages: Mapping[str, int]) -> bool:
    sizes = {chain.name: len(chain.layers) for chain in chains.chains}
    return all(count <= sizes.get(name, 0) for name, count in stages.items())


def _chain_texts(sets: Sequence[ChainSet]) -> str:
    texts = (", ".join(f"{c.name} ({len(c.layers)} layers)" for c in chains.chains) for chains in sets)
    return " | ".join(texts)


def _loosely_coupled(choices: Sequence[range], slowest: Sequence[Sequence[float]]) -> Iterator[tuple[int, ...]]:
    """The fewest stages of each chain that meet each target time, and that with one more stage in one chain."""
    seen: set[tuple[int, ...]] = set()
    for target_s in sorted({seconds for times in slowest for seconds in times}):
        fewest = [
            next((count for count in counts if times[count - 1] <= target_s), None)
            for counts, times in zip(choices, slowest, strict=True)
        ]
        for extra in range(-1, len(choices)):
            counts = tuple((count or 0) + (chain == extra) for chain, count in enumerate(fewest))
            if None not in fewest and counts not in seen and all(map(range.__contains__, choices, counts)):
                seen.add(counts)
                yield counts


def _free_bottlenecks(chains: ChainSet, index: int, limit: int) -> list[float]:
    """Slowest stage of the best split into 1, 2, ... stages, if sends were free and memory endless."""
    layers = [PartitionLayer(seconds=layer.times.total_s) for layer in chains.chains[index].layers]
    return [split.bottleneck_s for split in partition(layers, limit) if split is not None]


def _plan(run: _Search, best: _Judged, fingerprint: Fingerprint) -> Plan:
    lower_bound_s = _lower_bound(run, best.candidate)
    return Plan(
        fingerprint=fingerprint,
        cluster=run.cluster,
        chains=best.candidate.to_chains(),
        links=(),
        num_microbatches=run.num_microbatches,
        shared_values=(),
        predicted=Prediction(
            iteration_s=best.iteration_s,
            bubble=best.bubble,
            lower_bound_s=lower_bound_s,
            gap=best.iteration_s / lower_bound_s - 1 if lower_bound_s else 0.0,
        ),
        rejected=(*_notes(run, best), *_rejected(run, best)),
    )


def _lower_bound(run: _Search, candidate: Candidate) -> float:
    """What no plan on these devices beats: all work spread evenly, the biggest layer, one microbatch's longest path."""
    devices = min(max(run.budget, candidate.num_ranks), run.cluster.num_devices)
    biggest_s = max(layer.times.total_s for chain in candidate.chains.chains for layer in chain.layers)
    work_s = run.num_microbatches * candidate.work_s
    return max(work_s / devices, run.num_microbatches * biggest_s, candidate.chains.longest_path_s())


def _notes(run: _Search, best: _Judged) -> Iterator[Rejected]:
    cores, ranks = run.cluster.num_devices, best.candidate.num_ranks
    if best.allocation.ranks is not None:
        yield Rejected(
            what="a device for every chain",
            reason=f"{len(best.candidate.ranges)} chains on {run.budget} devices: they share, balanced by time",
        )
    if ranks > cores:
        yield Rejected(
            what="a core for every process",
            reason=f"{ranks} processes share {cores} cores; the iteration is at least all work spread over the cores",
        )
    if not run.listed:
        yield Rejected(
            what="other allocations",
            reason=f"over {MAX_LISTED}: only the fewest stages that meet each target time were tried, and one more",
        )


def _rejected(run: _Search, best: _Judged) -> list[Rejected]:
    """The closest losers, the closest of each other projector placement first."""
    losers = [(judged.iteration_s, judged.allocation, True) for judged in run.simulated if judged is not best]
    losers += [(seconds, allocation, False) for seconds, allocation in run.bounded]
    losers.sort(key=lambda loser: loser[0])
    placements = {best.allocation.splitter.chains.placement}
    first: list[tuple[float, _Allocation, bool]] = []
    for loser in losers:
        placement = loser[1].splitter.chains.placement
        if placement not in placements:
            placements.add(placement)
            first.append(loser)
    closest = [*first, *(loser for loser in losers if loser not in first)][:MAX_REJECTED]
    rejected = [Rejected(what=a.text, reason=_slower(s, best.iteration_s, known)) for s, a, known in closest]
    if run.too_big:
        memory = _gib(run.memory_bytes(run.too_big[0].num_ranks))
        what = f"{run.too_big[0].text} and {len(run.too_big) - 1} more" if len(run.too_big) > 1 else run.too_big[0].text
        rejected.append(Rejected(what=what, reason=f"a stage needs more than the {memory} of a device"))
    return rejected


def _slower(seconds: float, best_s: float, known: bool) -> str:
    if not known:
        return f"cannot take less than {seconds * 1e3:.4g} ms"
    if seconds < best_s * (1 + TOLERANCE):
        return f"takes {seconds * 1e3:.4g} ms, which is no faster to {TOLERANCE:.1%}"
    return f"takes {seconds * 1e3:.4g} ms, {100 * (seconds / best_s - 1):.1f}% more"


def _no_plan(run: _Search, sets: Sequence[ChainSet]) -> str:
    """Why nothing fits: what each chain needs in all, against what it can get."""
    lines = []
    for chain in sets[0].chains:
        fixed = sum(fixed_bytes(layer) for layer in chain.layers)
        saved = sum(layer.cost.activation_bytes for layer in chain.layers)
        biggest = max(fixed_bytes(layer) + layer.cost.activation_bytes for layer in chain.layers)
        lines.append(
            f"  {chain.name}: {_gib(fixed)} of parameters, gradients and optimizer state, {_gib(saved)} of activations "
            f"a microbatch, biggest layer {_gib(biggest)}"
        )
    head = (
        f"no plan fits {run.budget} devices of {run.cluster}: each has {_gib(run.memory_bytes(1))}, and in every "
        "allocation a stage needs more; use more devices, smaller microbatches, or freeze parameters"
    )
    return "\n".join((head, *lines))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
