"""Every pipeline of a small layer table, timed from its stages one by one: what template planning must agree with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import networkx as nx

from mmcompile.planner.resilience.template import Template
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers

TICK_S = 1e-6
"""Costs are small multiples of it, so that ties are common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleStage:
    """Layers `first` to `last` (excluded) of a chain on `devices` devices of one node."""

    chain: int
    first: int
    last: int
    devices: int


def random_table(
    rng: random.Random, layers: tuple[int, ...], devices: int, *, memory: bool, middle: bool = False
) -> LayerTable:
    """Chains that all feed the last one, in the `middle` or at its start; more devices are not always faster."""
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
    def ticks(high: int) -> tuple[float, ...]:
        return tuple(rng.randint(0, high) * TICK_S for _ in range(number))

    return SharedLayers(
        devices=devices,
        forward_s=ticks(8 // devices + 1),
        backward_s=ticks(16 // devices + 1),
        parameter_bytes=tuple(rng.randint(0, 8 // devices) for _ in range(number)),
        activation_bytes=tuple(rng.randint(0, 4 // devices) for _ in range(number)),
        send_s=ticks(1),
        return_s=ticks(1),
        working_bytes=rng.randint(0, 2),
    )


def fastest_s(table: LayerTable, num_nodes: int) -> float | None:
    """The least iteration time of all pipelines; None if none fits."""
    times = (iteration_s(table, stages) for stages in pipelines(table, num_nodes))
    return min((time for time in times if time is not None), default=None)


def pipelines(table: LayerTable, num_nodes: int) -> Iterator[list[OracleStage]]:
    """All ways to give contiguous layers of one chain to devices of one node, over all devices, in order."""
    yield from _pipelines(table, num_nodes * table.devices_per_node, 0, 0, 0)


def _pipelines(table: LayerTable, total: int, chain: int, layer: int, device: int) -> Iterator[list[OracleStage]]:
    if chain == len(table.chains):
        if device == total:
            yield []
        return
    for last in range(layer + 1, table.chains[chain].num_layers + 1):
        for devices in table.devices:
            end = device + devices
            if end > total or device // table.devices_per_node != (end - 1) // table.devices_per_node:
                continue
            stage = OracleStage(chain=chain, first=layer, last=last, devices=devices)
            following = (chain, last) if last < table.chains[chain].num_layers else (chain + 1, 0)
            for rest in _pipelines(table, total, *following, end):
                yield [stage, *rest]


def stages_of(table: LayerTable, template: Template) -> list[OracleStage]:
    names = [chain.name for chain in table.chains]
    return [
        OracleStage(chain=names.index(stage.chain), first=stage.first, last=stage.last, devices=len(stage.devices))
        for stage in template.stages
    ]


def stage_ticks(table: LayerTable, stage: OracleStage) -> int:
    """Forward and backward, its output sent, the gradient of its input returned."""
    shared = _costs(table, stage)
    own_s = sum(shared.forward_s[stage.first : stage.last]) + sum(shared.backward_s[stage.first : stage.last])
    own_s += shared.send_s[stage.last - 1] + (shared.return_s[stage.first - 1] if stage.first else 0.0)
    return round(own_s / TICK_S)


def iteration_s(table: LayerTable, stages: list[OracleStage]) -> float | None:
    """T1 + T2 + T3 with 4 microbatches for each stage of the longest path; None if a stage does not fit its memory."""
    graph = _graph(table, stages)
    to_loss = [_longest(graph, index, lambda _: 1) for index in range(len(stages))]  # stages, its own included
    if not all(_fits(table, stage, in_flight) for stage, in_flight in zip(stages, to_loss, strict=True)):
        return None
    ticks = [stage_ticks(table, stage) for stage in stages]
    slowest = max(index for index, own in enumerate(ticks) if own == max(ticks))
    t1 = max(_longest(graph, index, ticks.__getitem__) for index in graph)
    t2 = (num_microbatches(table, stages) - to_loss[slowest] - 1) * ticks[slowest]
    t3 = _longest(graph, slowest, ticks.__getitem__)
    return (t1 + t2 + t3) * TICK_S


def num_microbatches(table: LayerTable, stages: list[OracleStage]) -> int:
    graph = _graph(table, stages)
    return 4 * max(_longest(graph, index, lambda _: 1) for index in graph)


def _costs(table: LayerTable, stage: OracleStage) -> SharedLayers:
    return next(shared for shared in table.chains[stage.chain].shared if shared.devices == stage.devices)


def _fits(table: LayerTable, stage: OracleStage, in_flight: int) -> bool:
    shared = _costs(table, stage)
    held = shared.working_bytes + sum(shared.parameter_bytes[stage.first : stage.last])
    held += in_flight * sum(shared.activation_bytes[stage.first : stage.last])
    return table.memory_bytes is None or held <= table.memory_bytes


def _graph(table: LayerTable, stages: list[OracleStage]) -> nx.DiGraph:
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


def _longest(graph: nx.DiGraph, start: int, weight: Callable[[int], int]) -> int:
    return weight(start) + max((_longest(graph, after, weight) for after in graph.successors(start)), default=0)
