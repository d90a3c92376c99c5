"""`Splitter`: optimal cuts of a candidate's chains, each table computed once for all stage counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.search.candidate import Ranges, holder
from mmcompile.planner.search.partition import PartitionLayer, Split, partition
from mmcompile.planner.search.problem import OPTIMIZER_STATES, PricedChain, Problem
from mmcompile.planner.search.settings import Degrees, Setting


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Splits chains so that the slowest stage is fastest and every stage fits the memory."""

    problem: Problem
    _tables: dict[tuple[object, ...], tuple[Split | None, ...]] = field(default_factory=dict, repr=False)

    def parts(
        self,
        chains: ChainSet,
        setting: Setting,
        degrees: Sequence[Degrees],
        counts: Sequence[int],
        memory_bytes: int | None,
    ) -> list[Ranges] | int:
        """Layer ranges of each chain's stages; or the index of a chain that does not fit the memory in so many stages.

        Chains near the loss come first: they set the distance to it, and so the microbatches in flight, of the others.

        Args:
            counts: stages of each chain.
            memory_bytes: of one stage; None for no limit.
        """
        parts: list[Ranges] = [()] * len(counts)
        tails = [0] * len(counts)  # stages between the end of each chain and the loss
        for chain in reversed(range(len(counts))):
            spec, own = chains.chains[chain], degrees[chain]
            split = self.table(spec, setting, own, tails[chain], memory_bytes, counts[chain])[counts[chain] - 1]
            if split is None:
                return chain
            parts[chain] = split.ranges
            for edge in chains.edges:
                if edge.target == chain and edge.source != chain:
                    above = counts[chain] - 1 - holder(split.ranges, edge.target_layer)
                    tails[edge.source] = max(tails[edge.source], tails[chain] + above + 1)
        return parts

    def table(
        self,
        chain: ChainSpec,
        setting: Setting,
        degrees: Degrees,
        tail: int,
        memory_bytes: int | None,
        max_stages: int,
    ) -> tuple[Split | None, ...]:
        """Best split into 1, 2, ... stages, at least `max_stages`; None where none fits the memory.

        Args:
            tail: stages between the end of the chain and the loss.
        """
        most = min(len(chain.layers), max(max_stages, self._most(degrees)))
        flights = min(setting.num_microbatches, tail + most)
        priced = self.problem.priced(chain, degrees, setting)
        if not priced.saved_bytes[-1]:
            tail = flights = 0  # nothing is kept: the distance to the loss does not matter
        key = (id(priced), degrees, setting.schedule, flights, tail, memory_bytes, most)
        if key not in self._tables:
            layers, limit, flights = _scheduled(self.layers(priced, degrees), priced, setting, flights, memory_bytes)
            self._tables[key] = partition(layers, most, memory_bytes=limit, tail=tail, num_microbatches=flights)
        return self._tables[key]

    def _most(self, degrees: Degrees) -> int:
        """Stages that there are devices for."""
        return max(1, self.problem.num_devices // degrees.ranks)

    def layers(self, priced: PricedChain, degrees: Degrees) -> list[PartitionLayer]:
        """A chain as `partition` takes it, under 1F1B."""
        cluster = self.problem.cluster
        link = cluster.intra if 2 * degrees.width <= cluster.devices_per_node else cluster.inter
        seconds = np.diff(priced.total_s).tolist()
        backward = np.diff(priced.backward).tolist()
        saved = np.diff(priced.saved_bytes)
        extra = np.diff(priced.worst_bytes) - saved
        fixed = np.diff(priced.parameter_bytes) + (1 + OPTIMIZER_STATES) * np.diff(priced.trainable_bytes) + extra
        begin_extra = priced.worst_shared_bytes - priced.shared_bytes
        sends = [p2p_seconds(num_bytes, link) for num_bytes in priced.output_bytes.tolist()]
        return [
            PartitionLayer(
                seconds=seconds[index],
                fixed_bytes=int(fixed[index]),
                saved_bytes=int(saved[index]),
                begin_fixed_bytes=int(begin_extra[index]),
                begin_saved_bytes=int(priced.shared_bytes[index]),
                send_s=sends[index],
                return_s=sends[index] if backward[index] else 0.0,
            )
            for index in range(len(seconds))
        ]


def _scheduled(
    layers: list[PartitionLayer], priced: PricedChain, setting: Setting, flights: int, memory_bytes: int | None
) -> tuple[list[PartitionLayer], int | None, int]:
    """Layers, memory limit and microbatches in flight such that 1F1B's `min(depth + 1, n)` counts as the schedule's.

    Activations computed again, and gathered parameters, are alive one layer at a time.
    """
    if memory_bytes is None:
        return layers, None, flights
    working = priced.working_bytes.tolist()
    least = min(working)
    times, less, flights = _in_flight(setting, flights)
    layers = [
        PartitionLayer(
            seconds=layer.seconds,
            fixed_bytes=layer.fixed_bytes - less * layer.saved_bytes,
            saved_bytes=times * layer.saved_bytes,
            begin_fixed_bytes=layer.begin_fixed_bytes - less * layer.begin_saved_bytes,
            begin_saved_bytes=times * layer.begin_saved_bytes,
            working_bytes=own - least,
            send_s=layer.send_s,
            return_s=layer.return_s,
        )
        for layer, own in zip(layers, working, strict=True)
    ]
    return layers, memory_bytes - least, flights


def _in_flight(setting: Setting, flights: int) -> tuple[int, int, int]:
    """(a, b, n) such that `a * min(depth + 1, n) - b` microbatches in flight are the schedule's, or one more."""
    count = setting.num_microbatches
    match setting.schedule:
        case "1f1b" | "zb-h1":
            return 1, 0, flights
        case "eager-1f1b":  # min(2 depth + 1, count)
            return 2, 1, count // 2 + 1
        case "gpipe":
            return count, 0, 1
