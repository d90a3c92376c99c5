"""`Candidate`: one allocation of devices to chains, split, placed and ready to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.plan.chains import ChainLayer, ChainSet
from mmcompile.plan.partition import PartitionLayer, Split, partition
from mmcompile.plan.plan import Chain, Segment, Stage, StagePrediction
from mmcompile.plan.schedule import Flow, FlowEdge, build_schedule
from mmcompile.plan.simulate import StageDuration, Timeline, simulate

OPTIMIZER_STATES = 2
"""AdamW keeps two states a trainable element, in the parameter's dtype (torch.optim.AdamW)."""


def fixed_bytes(layer: ChainLayer) -> int:
    """Bytes a layer holds whatever is in flight: parameters, gradients, optimizer state."""
    return layer.cost.parameter_bytes + (1 + OPTIMIZER_STATES) * layer.cost.trainable_bytes


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Optimal splits of every chain of one chain set, each table computed once (by distance to the loss and memory)."""

    chains: ChainSet
    cluster: Cluster
    num_microbatches: int
    max_stages: tuple[int, ...]
    """Per chain, the largest count that will be asked for."""
    shards: int = 1
    """Ranks of each stage of the last chain."""
    tables: dict[tuple[int, int, int], tuple[Split | None, ...]] = field(default_factory=dict, repr=False)

    def split(self, chain: int, count: int, tail: int, memory_bytes: int) -> Split | None:
        key = (chain, tail, memory_bytes)
        if key not in self.tables:
            self.tables[key] = partition(
                self._layers[chain],
                self.max_stages[chain],
                memory_bytes=memory_bytes,
                tail=tail,
                num_microbatches=self.num_microbatches,
            )
        return self.tables[key][count - 1]

    @cached_property
    def _layers(self) -> tuple[tuple[PartitionLayer, ...], ...]:
        return tuple(tuple(self._layer(layer) for layer in chain.layers) for chain in self.chains.chains)

    def _layer(self, layer: ChainLayer) -> PartitionLayer:
        send_s = p2p_seconds(layer.cost.output_bytes, self.cluster.intra)
        return PartitionLayer(
            seconds=layer.times.total_s,
            fixed_bytes=fixed_bytes(layer),
            saved_bytes=layer.cost.activation_bytes,
            send_s=send_s,
            return_s=send_s if layer.cost.has_backward else 0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Ranges of layers on ranks, their times, and the edges between them. Stages are numbered chain by chain."""

    chains: ChainSet
    num_microbatches: int
    ranges: tuple[tuple[int, int, int], ...]
    """Per stage: chain, first layer, last layer (excluded)."""
    ranks: tuple[int, ...]
    """The first rank of each stage."""
    shards: int
    """Ranks of each stage of the last chain; the others have one."""
    edges: Mapping[tuple[int, int], int]
    """(source stage, target stage) -> forward bytes a microbatch; the source has the lower number."""
    depths: tuple[int, ...]
    backward: tuple[bool, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return max(rank + width for rank, width in zip(self.ranks, self.widths, strict=True))

    @property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        last = len(self.chains.chains) - 1
        return tuple(self.shards if chain == last else 1 for chain, _, _ in self.ranges)

    @property
    def work_s(self) -> float:
        """Device seconds of the forward and backward of one microbatch through every stage."""
        times = zip(self.forward_s, self.backward_s, self.widths, strict=True)
        return sum((forward_s + backward_s) * width for forward_s, backward_s, width in times)

    def link_s(self, cluster: Cluster) -> dict[tuple[int, int], float]:
        """Seconds of one message over each edge, either way."""
        return {
            (source, target): p2p_seconds(num_bytes, cluster.between(self.ranks[source], self.ranks[target]))
            for (source, target), num_bytes in self.edges.items()
        }

    def stages(self) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        for index, (chain, first, last) in enumerate(self.ranges):
            spec = self.chains.chains[chain]
            part = spec.layers[first:last]
            in_flight = min(self.depths[index] + 1, self.num_microbatches) if self.backward[index] else 0
            position = sum(owner == chain for owner, _, _ in self.ranges[:index])
            stages.append(
                Stage(
                    name=f"{spec.name}.{position}",
                    segments=_segments(part),
                    layer_names=tuple(layer.name for layer in part),
                    ranks=tuple(range(self.ranks[index], self.ranks[index] + self.widths[index])),
                    has_backward=self.backward[index],
                    depth=self.depths[index],
                    prediction=_prediction(part, in_flight),
                )
            )
        return tuple(stages)

    def rank_bytes(self) -> list[int]:
        """Predicted bytes of each rank."""
        used = [0] * self.num_ranks
        for stage in self.stages():
            used[stage.ranks[0]] += stage.prediction.total_bytes
        return used

    def simulate(self, cluster: Cluster) -> Timeline:
        """Simulate one step in which every microbatch passes through every stage."""
        stages = self.stages()
        names = tuple(stage.name for stage in stages)
        flow = Flow(
            stages=names,
            edges=tuple(
                FlowEdge(source=names[source], target=names[target], gradient=self.backward[source])
                for source, target in self.edges
            ),
            backward=tuple(stage.name for stage in stages if stage.has_backward),
        )
        durations = {
            name: StageDuration(forward_s=forward_s, input_grad_s=backward_s)
            for name, forward_s, backward_s in zip(names, self.forward_s, self.backward_s, strict=True)
        }
        link_s: dict[tuple[str, str], float] = {}
        for (source, target), seconds in self.link_s(cluster).items():
            link_s[names[source], names[target]] = seconds
            link_s[names[target], names[source]] = seconds
        # The shards of a stage do the same at the same time: the first stands for all.
        placed = [replace(stage, ranks=stage.ranks[:1]) for stage in stages]
        return simulate(build_schedule(placed, [flow] * self.num_microbatches), durations, link_s)

    def to_chains(self) -> tuple[Chain, ...]:
        stages = self.stages()
        return tuple(
            Chain(
                name=chain.name,
                components=chain.components,
                stages=tuple(stage for stage, part in zip(stages, self.ranges, strict=True) if part[0] == index),
                cp=self.shards if index == len(self.chains.chains) - 1 else 1,
            )
            for index, chain in enumerate(self.chains.chains)
        )


def draft(
    splitter: Splitter, counts: Sequence[int], memory_bytes: int, ranks: Sequence[int] | None = None
) -> Candidate | None:
    """Split every chain into its count of stages; None if a chain does not fit the memory in so many.

    Args:
        counts: stages of each chain.
        memory_bytes: limit of one stage.
        ranks: rank of each stage, chain by chain; ranks of its own each by default.
    """
    chains = splitter.chains
    parts = _split_chains(splitter, counts, memory_bytes)
    if parts is None:
        return None
    ranges = tuple((chain, first, last) for chain, pairs in enumerate(parts) for first, last in pairs)
    edges = _stage_edges(chains, parts)
    widths = [splitter.shards if chain == len(counts) - 1 else 1 for chain, _, _ in ranges]
    sums = [chains.chains[chain].between(first, last) for chain, first, last in ranges]
    return Candidate(
        chains=chains,
        num_microbatches=splitter.num_microbatches,
        ranges=ranges,
        ranks=tuple(accumulate(widths[:-1], initial=0) if ranks is None else ranks),
        shards=splitter.shards,
        edges=edges,
        depths=_depths(len(ranges), edges),
        backward=_backward([has_backward for _, _, has_backward in sums], edges),
        forward_s=tuple(forward_s for forward_s, _, _ in sums),
        backward_s=tuple(backward_s for _, backward_s, _ in sums),
    )


def _split_chains(
    splitter: Splitter, counts: Sequence[int], memory_bytes: int
) -> list[tuple[tuple[int, int], ...]] | None:
    """Layer ranges of each chain's stages; chains near the loss come first, they set the others' distance to it."""
    chains = splitter.chains
    parts: list[tuple[tuple[int, int], ...]] = [()] * len(counts)
    # Depth of each chain's last stage.
    tails = [0] * len(counts)
    for chain in reversed(range(len(counts))):
        split = splitter.split(chain, counts[chain], tails[chain], memory_bytes)
        if split is None:
            return None
        parts[chain] = split.ranges
        for edge in chains.edges:
            if edge.target == chain and edge.source != chain:
                above = counts[chain] - 1 - _holder(split.ranges, edge.target_layer)
                tails[edge.source] = max(tails[edge.source], tails[chain] + above + 1)
    return parts


def _holder(ranges: Sequence[tuple[int, int]], layer: int) -> int:
    """The stage of a chain that holds a layer."""
    return next(index for index, (first, last) in enumerate(ranges) if first <= layer < last)


def _stage_edges(chains: ChainSet, parts: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    offsets = [0, *accumulate(map(len, parts))]
    edges: dict[tuple[int, int], int] = {}
    for chain, ranges in enumerate(parts):
        layers = chains.chains[chain].layers
        for index, (_, last) in enumerate(ranges[:-1]):
            edges[offsets[chain] + index, offsets[chain] + index + 1] = layers[last - 1].cost.output_bytes
    for edge in chains.edges:
        if edge.source == edge.target and edge.target_layer == edge.source_layer + 1:
            continue
        source = offsets[edge.source] + _holder(parts[edge.source], edge.source_layer)
        target = offsets[edge.target] + _holder(parts[edge.target], edge.target_layer)
        if source != target:
            num_bytes = chains.chains[edge.source].layers[edge.source_layer].cost.output_bytes
            edges[source, target] = edges.get((source, target), 0) + num_bytes
    return edges


def _depths(num_stages: int, edges: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    # Stages are numbered along the flow, so every edge goes from a lower to a higher index.
    depths = [0] * num_stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)


def _backward(own: Sequence[bool], edges: Mapping[tuple[int, int], int]) -> tuple[bool, ...]:
    """A stage runs a backward if a layer of it does, or if gradient must pass through it to a stage before."""
    backward = list(own)
    for source, target in sorted(edges):
        backward[target] = backward[target] or backward[source]
    return tuple(backward)


def _segments(part: Sequence[ChainLayer]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for layer in part:
        same = segments and segments[-1].component == layer.component
        first = segments.pop().first if same else layer.index
        segments.append(Segment(component=layer.component, first=first, last=layer.index + 1))
    return tuple(segments)


def _prediction(part: Sequence[ChainLayer], in_flight: int) -> StagePrediction:
    trainable = sum(layer.cost.trainable_bytes for layer in part)
    return StagePrediction(
        forward_s=sum(layer.times.forward_s for layer in part),
        input_grad_s=sum(layer.times.input_grad_s for layer in part),
        weight_grad_s=sum(layer.times.weight_grad_s for layer in part),
        parameter_bytes=sum(layer.cost.parameter_bytes for layer in part),
        gradient_bytes=trainable,
        optimizer_bytes=OPTIMIZER_STATES * trainable,
        activation_bytes=in_flight * sum(layer.cost.activation_bytes for layer in part),
        in_flight=in_flight,
    )
