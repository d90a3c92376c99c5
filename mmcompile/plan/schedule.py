"""`Schedule`: for each rank an ordered list of actions, and the 1F1B order over a DAG of stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowEdge:
    """Tensors of one microbatch that go from a stage to a later one; `gradient` if any of them sends gradient back."""

    source: str
    target: str
    gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What one microbatch does: the stages that have work, the edges between them, the stages that run a backward."""

    stages: tuple[str, ...]
    edges: tuple[FlowEdge, ...]
    backward: tuple[str, ...]
