"""`Job`: templates, batch and fault tolerance of a run, constant while nodes come and go; and names of layers and workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.resilience.template import Template
from mmcompile.units import runs


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class LayerId:
    """Layer of the model by chain and index: the smallest unit that is copied between nodes."""

    chain: str
    index: int

    def __str__(self) -> str:
        return f"{self.chain}[{self.index}]"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class WorkerId:
    """Worker process by node and index, which stay the same while its rank changes."""

    node: str
    index: int
    """Index of the worker within its node."""

    def __str__(self) -> str:
        return f"{self.node}/{self.index}"


Node = TypeVar("Node", int, str)
"""Node of a cluster: its number in a simulation, its name in a run."""
Holder = TypeVar("Holder", int, str, WorkerId)
"""Holder of layers: a node or a worker."""
LayerRuns = Mapping[str, tuple[tuple[int, int], ...]]
"""Chain -> ranges of layers, each `first` (included) to `last` (excluded)."""


def layer_runs(layers: Iterable[LayerId]) -> LayerRuns:
    """Return layers joined to ranges of neighbours. The layers of a chain must come in ascending order."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for layer in layers:
        found[layer.chain].append(layer.index)
    return {chain: tuple((first, last + 1) for first, last in runs(own)) for chain, own in found.items()}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Templates, batch and fault tolerance of a run, constant while nodes come and go."""

    templates: tuple[Template, ...]
    """One template for each node count, fewest nodes first."""
    devices_per_node: int
    fault_tolerance: int
    """Number of nodes that may be lost at once without losing a layer."""
    num_microbatches: int
    """Number of microbatches of a step, over all pipelines."""
    layer_bytes: Mapping[str, tuple[int, ...]]
    """Chain -> bytes of parameters and optimizer state of each layer; a layer of 0 bytes is never copied and cannot be lost."""

    def __post_init__(self) -> None:
        sizes = [template.num_nodes for template in self.templates]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise PlanError(f"templates are for {sizes} nodes; wanted at least one, each node count once, ascending")
        if self.fault_tolerance < 0 or self.devices_per_node < 1:
            raise PlanError(
                f"fault tolerance {self.fault_tolerance} with {self.devices_per_node} devices a node; "
                "wanted at least 0 and at least 1"
            )
        if self.num_microbatches < self.min_pipelines:
            raise PlanError(
                f"a step of {self.num_microbatches} microbatches cannot feed the {self.min_pipelines} pipelines that fault "
                f"tolerance {self.fault_tolerance} needs; the nearest that can is {self.min_pipelines}"
            )
        for template in self.templates:
            self._check(template)

    @property
    def min_pipelines(self) -> int:
        """Fewest pipelines of a run: one more than nodes that may fail, so that every layer survives."""
        return self.fault_tolerance + 1

    @property
    def min_nodes(self) -> int:
        """Fewest nodes that hold `min_pipelines` pipelines; with fewer, training stops."""
        return self.min_pipelines * self.templates[0].num_nodes

    @cached_property
    def layers(self) -> tuple[LayerId, ...]:
        """All layers of the model; arrays [layers] are in this order."""
        return tuple(
            LayerId(chain=chain, index=index)
            for chain, sizes in self.layer_bytes.items()
            for index in range(len(sizes))
        )

    @cached_property
    def bytes_of(self) -> np.ndarray:
        """Bytes of each layer's parameters and optimizer state, int64 [layers], in the order of `layers`."""
        return np.array([size for sizes in self.layer_bytes.values() for size in sizes], dtype=np.int64)

    @cached_property
    def by_size(self) -> dict[int, Template]:
        """Node count -> template for so many nodes."""
        return {template.num_nodes: template for template in self.templates}

    def needs(self, num_nodes: int) -> np.ndarray:
        """Return which layers each node of a pipeline of `num_nodes` nodes runs, bool [num_nodes, layers]."""
        return self._needs[num_nodes]

    @cached_property
    def _needs(self) -> dict[int, np.ndarray]:
        first = dict(zip(self.layer_bytes, np.cumsum([0, *map(len, self.layer_bytes.values())]), strict=False))
        found = {}
        for template in self.templates:
            grid = np.zeros((template.num_nodes, len(self.layers)), dtype=bool)
            for stage in template.stages:
                start = first[stage.chain]
                grid[stage.devices[0] // self.devices_per_node, start + stage.first : start + stage.last] = True
            found[template.num_nodes] = grid
        return found

    def _check(self, template: Template) -> None:
        where = f"the template for {template.num_nodes} nodes"
        if not template.slowest_s > 0:
            raise PlanError(f"{where} takes {template.slowest_s} s a microbatch; wanted more than 0")
        covered = {chain: [0] * len(sizes) for chain, sizes in self.layer_bytes.items()}
        for stage in template.stages:
            nodes = {device // self.devices_per_node for device in stage.devices}
            if len(nodes) != 1 or not nodes <= set(range(template.num_nodes)):
                raise PlanError(
                    f"{where} puts a stage of {stage.chain} on devices {stage.devices}; wanted devices of one of its nodes, "
                    f"each with {self.devices_per_node}"
                )
            if stage.chain not in covered or not 0 <= stage.first < stage.last <= len(covered[stage.chain]):
                raise PlanError(
                    f"{where} has a stage of layers {stage.first} to {stage.last} of {stage.chain}; the job knows "
                    + ", ".join(f"{chain} ({len(sizes)} layers)" for chain, sizes in self.layer_bytes.items())
                )
            for index in range(stage.first, stage.last):
                covered[stage.chain][index] += 1
        for chain, counts in covered.items():
            for index, count in enumerate(counts):
                if count != 1:
                    raise PlanError(f"{where} runs layer {chain}[{index}] in {count} stages; wanted 1")
