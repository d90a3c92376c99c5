"""JSON texts that pass through the coordinator: the plan of a generation, and the record committed with a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from mmcompile.planner.resilience.job import LayerRuns, WorkerId
from mmcompile.planner.resilience.membership import LayerCopy, NodePipeline, Spare
from mmcompile.runtime.monitoring.metrics import StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """Work of every node in a generation: pipelines, spare nodes, and the copies that come first."""

    pipelines: tuple[NodePipeline[str], ...]
    spares: tuple[Spare[str], ...] = ()
    copies: tuple[LayerCopy[WorkerId], ...] = ()
    """Copies from worker to worker, by round."""
    rule: str
    """A `mmcompile.planner.resilience.regroup.RegroupRule`, or "stop"."""
    reason: str
    """Why these pipelines and no others."""
    iteration_s: float
    """Predicted seconds of a step."""
    committed: int
    """Number of the last committed step when the generation starts."""
    former: Mapping[str, tuple[LayerRuns, ...]] = field(default_factory=dict)
    """Node -> by device, layers it holds at step `committed` beside those it runs; it keeps them until the next commit."""
    checkpoint: int | None = None
    """Step of the checkpoint that all state is read from."""
    farewell: str = ""
    """Why training ends: the state is saved and nothing else is done."""

    def encode(self) -> str:
        """Return the plan as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> GenerationPlan:
        """Return the plan in a JSON text."""
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Cursor of the commit protocol: data position and metrics, for the next rank 0 and for observers."""

    data: str
    """Cursor of the data after this step (`mmcompile.data.batches.Batches.cursor`)."""
    metrics: StepMetrics

    def encode(self) -> str:
        """Return the record as JSON text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> StepRecord:
        """Return the record in a JSON text."""
        return msgspec.json.decode(text, type=cls)
