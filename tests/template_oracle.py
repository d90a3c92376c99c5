"""Every pipeline of a small layer table, timed from its stages one by one: what template planning must agree with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from mmcompile.plan.templates.layer_table import ChainLayers, LayerTable, SharedLayers

TICK_S = 1e-6
"""Costs are small multiples of it, so that ties are common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleStage:
    chain: int
    first: int
    last: int
    devices: int
    seconds: float


def random_table(
    rng: random.Random, layers: tuple[int, ...], devices: int, *, memory: bool, middle: bool = False
) -> LayerTable:
    """Chains that all feed the last one; costs on more devices are lower, but not always."""
    counts = tuple(count for count in (1, 2, 4, 8) if count <= devices)
    names = [f"tower{index}" for index in range(len(layers) - 1)] + ["lm"]
    return LayerTable(
        chains=tuple(
            ChainLayers(
                name=name,
                shared=tuple(_shared(rng, number, count) for count in counts),
                feeds=None if name == "lm" else "lm",
                entry=rng.randrange(layers[-1]) if middle and name != "lm" else 0,
            )
            for name, number in zip(names, layers, strict=True)
        ),
        devices_per_node=devices,
        memory_bytes=rng.randint(12, 40) if memory else None,
    )


def _shared(rng: random.Random, number: int, devices: int) -> SharedLayers:
    def ticks(low: int, high: int) -> tuple[float, ...]:
        return tuple(rng.randint(low, high) * TICK_S for _ in range(number))

    return SharedLayers(
        devices=devices,
        forward_s=ticks(0, 8 // devices + 1),
        backward_s=ticks(0, 16 // devices + 1),
        parameter_bytes=tuple(rng.randint(0, 8 // devices) for _ in range(number)),
        activation_bytes=tuple(rng.randint(0, 4 // devices) for _ in range(number)),
        send_s=ticks(0, 1),
        return_s=ticks(0, 1),
    )


def pipelines(table: LayerTable, num_nodes: int) -> Iterator[list[OracleStage]]:
    """All ways to give contiguous layers of one chain to devices of one node, over all devices, in order."""
    yield from _pipelines(table, num_nodes * table.devices_per_node, 0, 0, 0)


def _pipelines(table: LayerTable, total: int, chain: int, layer: int, device: int) -> Iterator[list[OracleStage]]:
    if chain == len(table.chains):
        if device == total:
            yield []
        return
    for last in range(layer + 1, table.chains[chain].num_layers + 1):
        for shared in table.chains[chain].shared:
            end = device + shared.devices
            if end > total or device // table.devices_per_node != (end - 1) // table.devices_per_node:
                continue
            seconds = sum(shared.forward_s[layer:last]) + sum(shared.backward_s[layer:last]) + shared.send_s[last - 1]
            seconds += shared.return_s[layer - 1] if layer else 0.0
            stage = OracleStage(chain=chain, first=layer, last=last, devices=shared.devices, seconds=seconds)
            following = (chain, last) if last < table.chains[chain].num_layers else (chain + 1, 0)
            for rest in _pipelines(table, total, *following, end):
                yield [stage, *rest]


def iteration_s(table: LayerTable, stages: list[OracleStage]) -> float | None:
    """T1 + T2 + T3 over the graph of the stages; None if a stage does not fit its memory."""
    graph = stage_graph(table, stages)
    behind = {
        index: _longest(graph, index, lambda _: 1.0) for index in graph
    }  # stages from each to the loss, itself included
    for index, stage in enumerate(stages):
        shared = next(each for each in table.chains[stage.chain].shared if each.devices == stage.devices)
        fixed = sum(shared.parameter_bytes[stage.first : stage.last])
        saved = sum(shared.activation_bytes[stage.first : stage.last])
        if table.memory_bytes is not None and fixed + behind[index] * saved > table.memory_bytes:
            return None
    times = [round(stage.seconds / TICK_S) for stage in stages]
    slowest = max(index for index, time in enumerate(times) if time == max(times))
    t1 = max(_longest(graph, index, lambda at: times[at]) for index in graph)
    t3 = _longest(graph, slowest, lambda at: times[at])
    microbatches = 4 * max(behind.values())
    return (t1 + (microbatches - (behind[slowest] - 1) - 2) * times[slowest] + t3) * TICK_S


def stage_graph(table: LayerTable, stages: list[OracleStage]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(stages)))
    for index, stage in enumerate(stages):
        chain = table.chains[stage.chain]
        for other, later in enumerate(stages):
            follows = later.chain == stage.chain and later.first == stage.last
            feeds = stage.last == chain.num_layers and table.chains[later.chain].name == chain.feeds
            if follows or (feeds and later.first <= chain.entry < later.last):
                graph.add_edge(index, other)
    return graph


def _longest(graph: nx.DiGraph, start: int, weight) -> float:
    return weight(start) + max((_longest(graph, after, weight) for after in graph.successors(start)), default=0)


def fastest(table: LayerTable, num_nodes: int) -> float | None:
    """The least iteration time; None if no pipeline fits."""
    times = (iteration_s(table, stages) for stages in pipelines(table, num_nodes))
    return min((time for time in times if time is not None), default=None)
