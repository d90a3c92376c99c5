"""`Splitter`: optimal cuts of a candidate's chains; a chain's splits into 1, 2, ... stages are computed together, once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.priced_chain import PricedChain
from mmcompile.planner.search.candidate import Ranges, holder
from mmcompile.planner.search.partition import PartitionLayer, Split, partition
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Solver that cuts a problem's chains: the slowest stage is as fast as possible and every stage fits the memory."""

    problem: Problem
    _tables: dict[tuple[object, ...], tuple[Split | None, ...]] = field(default_factory=dict, repr=False)

    def parts(self, combination: Combination, memory_bytes: int | None) -> list[Ranges] | int:
        """Return the layer ranges of each chain's stages; if a chain cannot be split within `memory_bytes` a stage, its index.

        Chains near the loss are split first, as their stage counts set the distance to the loss, and so the microbatches in
        flight, of all chains before them.
        """
        chains, setting, counts = combination.chains, combination.setting, combination.counts
        parts: list[Ranges] = [()] * len(counts)
        tails = [0] * len(counts)  # stages between the end of each chain and the loss
        for chain in reversed(range(len(counts))):
            spec, own = chains.chains[chain], combination.degrees[chain]
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
        self, chain: ChainSpec, setting: Setting, degrees: Degrees, tail: int, memory_bytes: int | None, max_stages: int
    ) -> tuple[Split | None, ...]:
        """Return a chain's best splits into 1, 2, ... stages, at least up to `max_stages`; None where no split fits the memory.

        `tail` is the number of stages between the end of the chain and the loss.
        """
        most = min(len(chain.layers), max(max_stages, self.problem.num_devices // degrees.ranks, 1))
        flights = min(setting.num_microbatches, tail + most)
        priced = self.problem.prices.priced(chain, degrees, setting)
        if not priced.saved_bytes[-1]:
            tail = flights = 0  # nothing is kept: the distance to the loss does not matter
        key = (priced, degrees, setting.schedule, flights, tail, memory_bytes, most)
        if key not in self._tables:
            layers, limit, flights = _scheduled(self.layers(priced, degrees), setting, flights, memory_bytes)
            self._tables[key] = partition(layers, most, memory_bytes=limit, tail=tail, num_microbatches=flights)
        return self._tables[key]

    def layers(self, priced: PricedChain, degrees: Degrees) -> list[PartitionLayer]:
        """Return a chain's layers with the costs that `partition` reads, as if the schedule were 1F1B."""
        cluster = self.problem.cluster
        link = cluster.intra if 2 * degrees.width <= cluster.devices_per_node else cluster.inter
        seconds = np.diff(priced.total_s).tolist()
        backward = np.diff(priced.backward).tolist()
        saved = np.diff(priced.saved_bytes)
        extra = np.diff(priced.worst_bytes) - saved
        fixed = np.diff(priced.state_bytes) + extra
        begin_extra = priced.worst_shared_bytes - priced.shared_bytes
        working = priced.working_bytes.tolist()
        sends = [p2p_seconds(num_bytes, link) for num_bytes in priced.output_bytes.tolist()]
        return [
            PartitionLayer(
                seconds=seconds[index],
                fixed_bytes=int(fixed[index]),
                saved_bytes=int(saved[index]),
                begin_fixed_bytes=int(begin_extra[index]),
                begin_saved_bytes=int(priced.shared_bytes[index]),
                working_bytes=working[index],
                send_s=sends[index],
                return_s=sends[index] if backward[index] else 0.0,
            )
            for index in range(len(seconds))
        ]


def _scheduled(
    layers: list[PartitionLayer], setting: Setting, flights: int, memory_bytes: int | None
) -> tuple[list[PartitionLayer], int | None, int]:
    """Return layers, memory limit and number of microbatches with which `partition` splits a chain under the setting's schedule.

    As `partition` assumes 1F1B, the layers' bytes are changed so that its sums give the memory under the schedule. `flights` is
    the most microbatches in flight under 1F1B. The least working bytes (held while a layer runs) are subtracted everywhere.
    """
    if memory_bytes is None:
        return layers, None, flights
    least = min(layer.working_bytes for layer in layers)
    times, less, flights = _in_flight(setting, flights)
    layers = [
        replace(
            layer,
            fixed_bytes=layer.fixed_bytes - less * layer.saved_bytes,
            saved_bytes=times * layer.saved_bytes,
            begin_fixed_bytes=layer.begin_fixed_bytes - less * layer.begin_saved_bytes,
            begin_saved_bytes=times * layer.begin_saved_bytes,
            working_bytes=layer.working_bytes - least,
        )
        for layer in layers
    ]
    return layers, memory_bytes - least, flights


def _in_flight(setting: Setting, flights: int) -> tuple[int, int, int]:
    """Return (a, b, n) such that a stage holds at most `a * min(depth + 1, n) - b` microbatches in flight under a setting.

    `depth` is the number of stages from the stage to the loss. `flights` is the n of the 1F1B schedule.
    """
    count = setting.num_microbatches
    match setting.schedule:
        case "1f1b" | "zb-h1":
            return 1, 0, flights
        case "eager-1f1b":  # min(2 depth + 1, count)
            return 2, 1, count // 2 + 1
        case "gpipe":
            return count, 0, 1
