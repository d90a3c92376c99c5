"""`ElasticJob`: everything that a worker needs to compute any part of the training. Workers inherit it by fork."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.step_planner import Collate, Costs
from mmcompile.codegen.program_cache import Patterns
from mmcompile.config import Reduction
from mmcompile.data.batches import Batches
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.monitoring import tracing
from mmcompile.runtime.optim.optimizer import OptimizerSpec, SchedulerFactory
from mmcompile.runtime.user_model import UserModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ElasticJob:
    """Model, data, plan and settings of a training run."""

    resilience: Resilience
    layers: Plan
    """Plan in which every layer is a stage."""
    patterns: Patterns
    model: nn.Module
    data: Batches
    num_steps: int
    seed: int
    optimizer: OptimizerSpec
    scheduler: SchedulerFactory | None
    clip_norm: float | None
    compiled: bool
    reduction: Reduction
    collate: Collate
    balancer: Balancer
    """Balancer of samples over the microbatches of a step."""
    costs: Costs | None
    folder: Path
    save_every: int | None
    """Number of steps between checkpoints; None for one checkpoint at the end only."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's last checkpoint."""
        return checkpoints_in(self.folder)

    @property
    def trace(self) -> Path:
        """File with the measured actions of the last step."""
        return self.folder / tracing.FILE

    @property
    def user(self) -> UserModel:
        """The user's model, with its parameters by original name."""
        return UserModel(module=self.model, source=self.patterns)

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint is written after a step."""
        return step == self.num_steps or (self.save_every is not None and step % self.save_every == 0)


def checkpoints_in(folder: Path) -> Path:
    """Return the folder of the last checkpoint of a run."""
    return folder / "checkpoint"
