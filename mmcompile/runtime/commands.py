"""Commands of rank 0 to the other ranks. Each is one broadcast (`comm.wire`); some are followed by tensors, from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from mmcompile.batching.step_plan import PROTOCOL_VERSION, StepPlan
from mmcompile.config import Reduction
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.checkpoint.saving import SaveCheckpoint
from mmcompile.runtime.optim.optimizer import Hyper, OptimizerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """First command of an engine: stages with their ranks, optimizer and options, which stay the same until the engine ends."""

    stages: tuple[PlacedStage, ...]
    optimizer: OptimizerSpec
    clip_norm: float | None
    compiled: bool
    check_rows: bool = False
    """True to check that rows sent between balance groups belong to the samples they were sent for."""
    reduction: Reduction = "fast"
    shard_optimizer: bool = False
    """True if only one of the ranks that hold a parameter updates it, and sends the others its new value."""
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Install:
    """Load new stage programs: those of one pattern and one balance group, each on the ranks that run its stage.

    A *pattern* is a capture of the model for one kind of batch (text only, text with images). A *balance group* is a set of
    stages that all compute the same samples. After this command, each rank gets its programs and the tensors it lacks.
    """

    pattern: str
    tower: str
    holders: dict[str, tuple[int, ...]]
    """Name of a trainable parameter -> indices, in the placement, of all stages whose programs so far read the parameter."""
    updaters: dict[str, int] = field(default_factory=dict)
    """Name of each trainable parameter held by any rank -> the only rank that updates it. Empty if all its holders update it."""
    restored: str = ""
    """Folder of a checkpoint from which ranks read optimizer state of parameters they newly hold; "" if there is none."""
    waiting: tuple[str, ...] = ()
    """Original names of the parameters whose optimizer state is read from `restored`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Run one optimizer step, or a call that only accumulates gradients for a later one (`StepPlan.update`)."""

    plan: StepPlan
    hyper: Hyper
    """Settings of the optimizer's parameter groups for this step, learning rates included."""
    seed: int
    """Random seed of forwards, combined with step, stage, and first sample of the microbatch."""
    trace: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Send named parameters, or their optimizer state, to rank 0."""

    what: Literal["weights", "optimizer"]
    names: dict[int, tuple[str, ...]]
    """Parameters that each rank sends, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendEvents:
    """Send the measured events of the last step to rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCheckpoint:
    """Read this rank's tensors from a checkpoint, and report to rank 0. The tensors take effect with `ApplyCheckpoint`."""

    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyCheckpoint:
    """Replace weights and optimizer state by the tensors that `LoadCheckpoint` read; sent if every rank could read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Inform ranks that rank 0 refused the user's call, without effect. Ranks that wait in the same call raise the same error."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Inform ranks that the user's call of an engine method is complete, so that they return from the same call."""

    call: str
    """Name of the engine method that the user called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseEngine:
    """End the worker of every rank."""


Command: TypeAlias = (
    Setup
    | Install
    | Step
    | Gather
    | SendEvents
    | SaveCheckpoint
    | LoadCheckpoint
    | ApplyCheckpoint
    | Refuse
    | Done
    | CloseEngine
)

COMMANDS: tuple[type[Command], ...] = get_args(Command)
"""All kinds of commands. A command is sent with its position in this tuple."""
