"""JSON texts that pass through the coordinator: the plan of a generation, and the record committed with a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

from mmcompile.planner.resilience.job import LayerRuns, WorkerId
from mmcompile.planner.resilience.membership import LayerCopy, NodePipeline, Spare
from mmcompile.runtime.monitoring.metrics import StepMetrics


class _JsonText:
    __slots__ = ()

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan(_JsonText):
    """Work of every node in a generation: pipelines, spare nodes, and the layer copies before the first step."""

    pipelines: tuple[NodePipeline[str], ...]
    spares: tuple[Spare[str], ...] = ()
    copies: tuple[LayerCopy[WorkerId], ...] = ()
    """Copies of layers from worker to worker, ordered by round."""
    rule: str
    """Rule that made the plan: a `mmcompile.planner.resilience.regroup.RegroupRule`, or "stop"."""
    reason: str
    """Reason for which the planner chose the pipelines."""
    iteration_s: float
    """Predicted seconds of a step."""
    committed: int
    """Number of the last committed step when the generation starts."""
    former: Mapping[str, tuple[LayerRuns, ...]] = field(default_factory=dict)
    """Runs of layers that devices hold at step `committed` but do not run, by node, then by device.

    A worker keeps them until the next commit.
    """
    checkpoint: int | None = None
    """Step of the checkpoint from which all state is read; None if it is not read from one."""
    farewell: str = ""
    """Reason why training ends; then the state is saved and no step runs. "" if training continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(_JsonText):
    """Data position and metrics of a step. Its JSON text is the `cursor` of the commit, read by observers and the next rank 0."""

    data: str
    """Data cursor after this step (`mmcompile.data.batches.Batches.cursor`)."""
    metrics: StepMetrics
