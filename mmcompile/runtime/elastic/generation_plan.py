"""`GenerationPlan`: what every node of a generation does, as the coordinator hands it to all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from mmcompile.planner.resilience.job import LayerId

Range = tuple[int, int]
"""Layers `first` (included) to `last` (excluded)."""
Held = Mapping[str, tuple[Range, ...]]
"""Chain -> layers."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Device:
    """A worker, by what stays the same while ranks change."""

    node: str
    index: int
    """Within the node."""

    def __str__(self) -> str:
        return f"{self.node}/{self.index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePipeline:
    """A template bound to nodes."""

    nodes: tuple[str, ...]
    """In the order of the template's nodes; their number names the template."""
    num_microbatches: int
    """Its share of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleNode:
    """A node that is alive and runs nothing."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCopy:
    """A layer, parameters and optimizer state together, from one device to another."""

    layer: LayerId
    source: Device
    destination: Device
    num_bytes: int
    """As planned."""
    round: int
    """Copies of a round run at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """Pipelines, idle nodes, and the copies that come first. JSON by `encode` and `decode`."""

    pipelines: tuple[NodePipeline, ...]
    idle: tuple[IdleNode, ...] = ()
    copies: tuple[LayerCopy, ...] = ()
    rule: str
    """`mmcompile.planner.resilience.regroup.Rule`."""
    reason: str
    """Why this and not another."""
    iteration_s: float
    """Predicted seconds of a step."""
    committed: int
    """Steps that are done when it starts."""
    former: Mapping[str, tuple[Held, ...]] = field(default_factory=dict)
    """Node -> by device, layers it holds at step `committed` beside those it runs; it keeps them until the next commit."""
    checkpoint: int | None = None
    """Step of the checkpoint that all state is read from."""
    farewell: str = ""
    """Why training ends: the state is saved and nothing else is done."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> GenerationPlan:
        return msgspec.json.decode(text, type=cls)
