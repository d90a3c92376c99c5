"""`Candidate`: one way to run a model: chains cut, sharded, replicated, placed, and ready to be judged.

It is assembled from a chain set (which components form a line of layers, in which order; a line may hold several copies of a
component), the `Degrees` of each chain, and the layer ranges of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import Recompute
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.plan.plan_record import Chain, Segment, Stage, StagePrediction
from mmcompile.planner.pricing.chains import ChainLayer, ChainSet
from mmcompile.planner.pricing.priced_chain import OPTIMIZER_PASSES, OPTIMIZER_STATES, PricedChain
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, build_schedule, in_flight
from mmcompile.planner.schedule.simulate import Timeline, simulate
from mmcompile.planner.search.messages import StageMessages, place
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting

Ranges = Sequence[tuple[int, int]]
"""First layer (included) and last (excluded) of each stage of a chain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateStage:
    """Stage of a candidate: contiguous layers of a chain on the ranks of all replicas.

    Seconds and bytes are those of one rank.
    """

    chain: int
    position: int
    """Position of the stage within its chain."""
    first: int
    last: int
    ranks: tuple[int, ...]
    """Ranks that run the stage, replica by replica."""
    depth: int
    has_backward: bool
    forward_s: float
    """Seconds of the forward of a microbatch of mean load; all seconds of a stage are for this load."""
    input_grad_s: float
    weight_grad_s: float
    parameter_bytes: int
    trainable_bytes: int
    saved_bytes: int
    """Bytes of activations kept for the backward of a microbatch of mean load."""
    worst_bytes: int
    """Bytes of activations kept for the backward of the largest microbatch."""
    working_bytes: int
    in_flight: int
    modes: tuple[Recompute | None, ...] | None = None
    """Recomputation of each layer, None for a layer where it frees no memory. The whole is None if all use the setting's mode."""

    @property
    def backward_s(self) -> float:
        """Seconds of the backward of one microbatch: input gradient and weight gradient."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward of one microbatch."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations held at the peak: one microbatch in flight is the largest, the others are the mean.

        The activations that are recomputed in a backward are included.
        """
        if self.in_flight == 0:
            return 0
        return self.worst_bytes + (self.in_flight - 1) * self.saved_bytes + self.working_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state and activations."""
        return self.parameter_bytes + (1 + OPTIMIZER_STATES) * self.trainable_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan under consideration: stages numbered chain by chain, with seconds and bytes, and the edges between them."""

    problem: Problem = field(repr=False)
    chains: ChainSet = field(repr=False)
    setting: Setting
    degrees: tuple[Degrees, ...]
    """Parallel degrees of each chain, in the order of the chain set."""
    stages: tuple[CandidateStage, ...]
    edges: Mapping[tuple[int, int], int]
    """(source stage, later target stage) -> forward bytes of a microbatch to one replica of the target."""
    link_s: Mapping[tuple[int, int], float]
    """(source stage, target stage) -> seconds of one message, either way."""
    iteration_s: float = inf
    """Seconds of the candidate's step by the simulator; infinite before it is simulated."""
    strategy: str = "auto"
    """Name of the strategy that proposed the candidate."""

    @property
    def combination(self) -> Combination:
        """Chains, setting, degrees and stage counts of the candidate; its cuts and ranks are left out."""
        return Combination(chains=self.chains, setting=self.setting, degrees=self.degrees, counts=self.counts)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the candidate uses."""
        return 1 + max(max(stage.ranks) for stage in self.stages)

    @property
    def shares_ranks(self) -> bool:
        """True if two stages run on the same ranks."""
        return len({stage.ranks[0] for stage in self.stages}) < len(self.stages)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of stages of each chain."""
        return tuple(sum(stage.chain == chain for stage in self.stages) for chain in range(len(self.chains.chains)))

    @property
    def names(self) -> tuple[str, ...]:
        """Name of every stage, `chain.position`, in the order of `stages`."""
        return tuple(f"{self.chains.chains[stage.chain].name}.{stage.position}" for stage in self.stages)

    @cached_property
    def step_work_s(self) -> float:
        """Mean device seconds of a step over the draws of samples: forwards, backwards and optimizer of all replicas together."""
        each = self.durations.sum(axis=(2, 3)).mean(axis=0).tolist()
        return sum(
            (seconds + tail_s) * len(stage.ranks)
            for seconds, tail_s, stage in zip(each, self.tail_s, self.stages, strict=True)
        )

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Predicted peak bytes of each rank. Where several ranks run the same stages, only the first of them is listed."""
        used: dict[int, int] = {}
        for stage in self.stages:
            used[stage.ranks[0]] = used.get(stage.ranks[0], 0) + stage.total_bytes
        return tuple(used[rank] for rank in sorted(used))

    @property
    def fits(self) -> bool:
        """True if every rank holds its stages within the memory."""
        return max(self.rank_bytes) <= self.problem.memory_bytes(self.num_ranks)

    @cached_property
    def tail_s(self) -> tuple[float, ...]:
        """Seconds of each stage after its last backward: gradient reduction over replicas, then the optimizer.

        The reduction runs layer by layer during the last backward; only its part that the backward does not hide, at least one
        layer's, counts.
        """
        return tuple(self._tail(stage) for stage in self.stages)

    def _tail(self, stage: CandidateStage) -> float:
        if not stage.trainable_bytes:
            return 0.0
        cluster, degrees = self.problem.cluster, self.degrees[stage.chain]
        update_s = OPTIMIZER_PASSES * stage.trainable_bytes / cluster.device.memory_bytes_per_s
        if degrees.fsdp:
            return update_s
        reduce_s = self.problem.prices.all_reduce_s(stage.trainable_bytes, degrees)
        return update_s + max(reduce_s / (stage.last - stage.first), reduce_s - stage.backward_s)

    @property
    def link_names_s(self) -> dict[tuple[str, str], float]:
        """(sending stage, receiving stage) -> seconds of one message, both ways of every edge."""
        names = self.names
        ways = {(names[source], names[target]): seconds for (source, target), seconds in self.link_s.items()}
        return ways | {(target, source): seconds for (source, target), seconds in ways.items()}

    def timelines(self, *, record: bool = False) -> tuple[Timeline, ...]:
        """Return one simulated step for each draw of random samples; `record` keeps the times of every action."""
        flows = [self.flow()] * self.setting.num_microbatches
        schedule = build_schedule(one_rank_each(self), flows, self.setting.schedule)
        link_s = self.link_names_s
        return tuple(
            simulate(schedule, stage_durations(self.names, drawn), link_s, record=record) for drawn in self.durations
        )

    def longest_path_s(self) -> float:
        """Return the seconds of one mean microbatch through all stages, forward to the loss and back, without messages."""
        forward, backward = [0.0] * len(self.stages), [0.0] * len(self.stages)
        for index, stage in enumerate(self.stages):
            before = [source for source, target in self.edges if target == index]
            forward[index] = stage.forward_s + max((forward[source] for source in before), default=0.0)
            backward[index] = stage.backward_s + max((backward[source] for source in before), default=0.0)
        return forward[-1] + backward[-1]

    @cached_property
    def durations(self) -> NDArray[np.float64]:
        """Seconds of forward, input gradient and weight gradient for random samples, [draws, stages, microbatches, 3].

        Without a dataset there is one draw of equal microbatches.
        """
        mean = np.array([(stage.forward_s, stage.input_grad_s, stage.weight_grad_s) for stage in self.stages])
        first = self.problem.prices.drawn_loads(self.setting, self.degrees[-1], last=True)
        if not first:
            count = self.setting.num_microbatches
            return np.broadcast_to(mean[None, :, None, :], (1, len(mean), count, 3)).copy()
        return np.concatenate([self._chain_durations(chain) for chain in range(len(self.degrees))], axis=1)

    def _chain_durations(self, chain: int) -> NDArray[np.float64]:
        """Return the seconds (forward, input and weight gradient) of a chain's stages for random samples.

        The shape is [draws of samples, stages of the chain, microbatches, 3].
        """
        degrees, layers = self.degrees[chain], self.chains.chains[chain].layers
        loads = self.problem.prices.drawn_loads(self.setting, degrees, last=chain == len(self.degrees) - 1)
        modes = self.modes_of(chain)
        draws, count = next(iter(loads.values())).shape[:2]
        own = [stage for stage in self.stages if stage.chain == chain]
        stage_of = np.repeat(np.arange(len(own)), [stage.last - stage.first for stage in own])
        seconds = np.zeros((len(own), draws * count * 3))
        kinds: list[tuple[str, float, Recompute]] = [
            (layer.component, layer.share, mode) for layer, mode in zip(layers, modes, strict=True)
        ]
        for kind in dict.fromkeys(kinds):
            component, share, mode = kind
            rows = loads[component].reshape(-1, 2) * share
            sharding = degrees.sharding(mode)
            each = self.problem.pricing.group_durations(component, rows[:, 0], rows[:, 1], sharding)
            group_of = self.problem.pricing.groups(component)
            # How many layers of each group a stage has.
            held = np.zeros((len(own), len(each)))
            for stage, layer, own_kind in zip(stage_of, layers, kinds, strict=True):
                if own_kind == kind:
                    held[stage, group_of[layer.index]] += 1.0
            seconds += held @ each.reshape(len(each), -1)
        return np.moveaxis(seconds.reshape(len(own), draws, count, 3), 0, 1)

    def modes_of(self, chain: int) -> list[Recompute]:
        """Return the recomputation mode of each layer of a chain, given the index of the chain."""
        found: list[Recompute] = []
        for stage in (own for own in self.stages if own.chain == chain):
            for mode in stage.modes or (self.setting.recompute,) * (stage.last - stage.first):
                found.append("none" if mode is None else mode)
        return found

    def flow(self) -> Flow:
        """Return the flow of one microbatch, which passes through every stage, as the simulator reads it."""
        names = self.names
        return Flow(
            stages=names,
            edges=tuple(
                FlowEdge(source=names[source], target=names[target], gradient=self.stages[source].has_backward)
                for source, target in self.edges
            ),
            backward=tuple(name for name, stage in zip(names, self.stages, strict=True) if stage.has_backward),
        )

    def to_chains(self) -> tuple[Chain, ...]:
        """Return the chains as they stand in a plan."""
        pairs = list(zip(self.names, self.stages, strict=True))
        return tuple(
            Chain(
                name=chain.name,
                components=chain.components,
                stages=tuple(self._stage(name, stage) for name, stage in pairs if stage.chain == index),
                tp=degrees.tp,
                cp=degrees.cp,
                dp=degrees.dp,
                fsdp=degrees.fsdp,
            )
            for index, (chain, degrees) in enumerate(zip(self.chains.chains, self.degrees, strict=True))
        )

    def _stage(self, name: str, stage: CandidateStage) -> Stage:
        chain = self.chains.chains[stage.chain]
        part = chain.layers[stage.first : stage.last]
        backward = np.diff(self.problem.prices.priced(chain, self.degrees[stage.chain], self.setting).backward)
        uniform: list[Recompute | None] = [self.setting.recompute] * len(part)
        for layer in np.flatnonzero(backward[stage.first : stage.last] == 0).tolist():
            uniform[layer] = None
        return Stage(
            name=name,
            segments=_segments(part),
            layer_names=tuple(layer.name for layer in part),
            ranks=stage.ranks,
            has_backward=stage.has_backward,
            depth=stage.depth,
            prediction=StagePrediction(
                forward_s=stage.forward_s,
                input_grad_s=stage.input_grad_s,
                weight_grad_s=stage.weight_grad_s,
                parameter_bytes=stage.parameter_bytes,
                gradient_bytes=stage.trainable_bytes,
                optimizer_bytes=OPTIMIZER_STATES * stage.trainable_bytes,
                activation_bytes=stage.activation_bytes,
                in_flight=stage.in_flight,
            ),
            recompute=stage.modes or tuple(uniform),
        )


Strategy = Callable[[Problem], Sequence[Candidate]]
"""Function that proposes candidates for a problem, for the simulator to choose from; none if no candidate fits the memory."""


def assemble(
    problem: Problem,
    chains: ChainSet,
    setting: Setting,
    degrees: Sequence[Degrees],
    parts: Sequence[Ranges],
    ranks: Sequence[Sequence[int]] | None = None,
) -> Candidate:
    """Return the candidate with the given degrees and cuts, without checking its memory or its number of ranks.

    Args:
        degrees: degrees of each chain.
        parts: layers of the stages of each chain.
        ranks: ranks of each stage, chain by chain, replica by replica; by default no two stages share any (`place`).
    """
    assert degrees[-1].dp == setting.dp, f"replicas of the last chain: {degrees[-1].dp}, of the setting: {setting.dp}"
    if ranks is None:
        ranks = place(degrees, [len(ranges) for ranges in parts])
    priced = [problem.prices.priced(chain, own, setting) for chain, own in zip(chains.chains, degrees, strict=True)]
    edges = _stage_edges(chains, parts)
    spans = [(chain, position, *ends) for chain, ranges in enumerate(parts) for position, ends in enumerate(ranges)]
    depths = _depths(len(spans), edges)
    counts = [priced[chain].backward[[first, last]] for chain, _, first, last in spans]
    backward = _backward([bool(before < after) for before, after in counts], edges)
    stages = tuple(
        _stage(priced[span[0]], span, tuple(own), depth, has_backward, setting)
        for span, own, depth, has_backward in zip(spans, ranks, depths, backward, strict=True)
    )
    messages = StageMessages(cluster=problem.cluster, degrees=degrees, priced=priced)
    ends = [(stage.chain, stage.ranks) for stage in stages]
    return Candidate(
        problem=problem,
        chains=chains,
        setting=setting,
        degrees=tuple(degrees),
        stages=stages,
        edges={pair: messages.num_bytes(stages[pair[1]].chain, layers) for pair, layers in edges.items()},
        link_s={pair: messages.seconds(ends[pair[0]], ends[pair[1]], layers) for pair, layers in edges.items()},
    )


_Edges = dict[tuple[int, int], list[tuple[int, int]]]
"""(source stage, target stage) -> (chain, layer) of every output sent between them."""


def _stage_edges(chains: ChainSet, parts: Sequence[Ranges]) -> _Edges:
    offsets = [0, *accumulate(map(len, parts))]
    edges: _Edges = {}
    for chain, ranges in enumerate(parts):
        for index, (_, last) in enumerate(ranges[:-1]):
            edges[offsets[chain] + index, offsets[chain] + index + 1] = [(chain, last - 1)]
    for edge in chains.edges:
        if edge.source == edge.target and edge.target_layer == edge.source_layer + 1:
            continue
        source = offsets[edge.source] + holder(parts[edge.source], edge.source_layer)
        target = offsets[edge.target] + holder(parts[edge.target], edge.target_layer)
        if source != target:
            edges.setdefault((source, target), []).append((edge.source, edge.source_layer))
    return edges


def holder(ranges: Ranges, layer: int) -> int:
    """Return the index of the stage that contains a layer, given the layer ranges of a chain's stages."""
    return next(index for index, (first, last) in enumerate(ranges) if first <= layer < last)


def _depths(num_stages: int, edges: _Edges) -> tuple[int, ...]:
    # Stages are numbered along the flow, so every edge goes from a lower to a higher index.
    depths = [0] * num_stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)


def _backward(own: Sequence[bool], edges: _Edges) -> tuple[bool, ...]:
    """Return for each stage whether it runs a backward: its layers have one (`own`), or gradient passes to an earlier stage."""
    backward = list(own)
    for source, target in sorted(edges):
        backward[target] = backward[target] or backward[source]
    return tuple(backward)


def _stage(
    priced: PricedChain,
    span: tuple[int, int, int, int],
    ranks: tuple[int, ...],
    depth: int,
    has_backward: bool,
    setting: Setting,
) -> CandidateStage:
    chain, position, first, last = span
    return CandidateStage(
        chain=chain,
        position=position,
        first=first,
        last=last,
        ranks=ranks,
        depth=depth,
        has_backward=has_backward,
        forward_s=float(priced.forward_s[last] - priced.forward_s[first]),
        input_grad_s=float(priced.input_grad_s[last] - priced.input_grad_s[first]),
        weight_grad_s=float(priced.weight_grad_s[last] - priced.weight_grad_s[first]),
        parameter_bytes=int(priced.parameter_bytes[last] - priced.parameter_bytes[first]),
        trainable_bytes=int(priced.trainable_bytes[last] - priced.trainable_bytes[first]),
        saved_bytes=int(priced.saved_bytes[last] - priced.saved_bytes[first] + priced.shared_bytes[first]),
        worst_bytes=int(priced.worst_bytes[last] - priced.worst_bytes[first] + priced.worst_shared_bytes[first]),
        working_bytes=int(priced.working_bytes[first:last].max()),
        in_flight=in_flight(setting.schedule, depth, setting.num_microbatches) if has_backward else 0,
    )


def one_rank_each(candidate: Candidate) -> list[PlacedStage]:
    """Return the stages of a candidate for the simulator, each on one rank that stands for all ranks of the stage."""
    number = {rank: index for index, rank in enumerate(sorted({stage.ranks[0] for stage in candidate.stages}))}
    return [
        PlacedStage(name=name, ranks=(number[stage.ranks[0]],), depth=stage.depth)
        for name, stage in zip(candidate.names, candidate.stages, strict=True)
    ]


def stage_durations(names: Sequence[str], drawn: NDArray[np.float64]) -> dict[str, list[LayerTimes]]:
    """Return stage name -> durations by microbatch, given seconds [stages, microbatches, 3] as in `Candidate.durations`."""
    return {
        name: [
            LayerTimes(forward_s=forward_s, input_grad_s=input_grad_s, weight_grad_s=weight_grad_s)
            for forward_s, input_grad_s, weight_grad_s in rows
        ]
        for name, rows in zip(names, drawn.tolist(), strict=True)
    }


def _segments(part: Sequence[ChainLayer]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for layer in part:
        same = bool(segments) and segments[-1].component == layer.component and segments[-1].last == layer.index
        first = segments.pop().first if same else layer.index
        segments.append(Segment(component=layer.component, first=first, last=layer.index + 1))
    return tuple(segments)
