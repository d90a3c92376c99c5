"""Commands of rank 0 to the other ranks. Each is one broadcast (`comm.wire`); tensors follow some, from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mmcompile.batching.step_plan import PROTOCOL_VERSION, StepPlan
from mmcompile.config import Reduction
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.optim.optimizer import Hyper, OptimizerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """First command: what stays the same for the life of an engine."""

    stages: tuple[PlacedStage, ...]
    optimizer: OptimizerSpec
    clip_norm: float | None
    compiled: bool
    check_rows: bool = False
    """Check that rows between towers are those of the samples they were sent for."""
    reduction: Reduction = "fast"
    shard_optimizer: bool = False
    """One of the ranks that hold a parameter updates it, and sends the others its new value."""
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Install:
    """The stages of one tower in a new pattern. Every rank then gets its programs and the tensors it lacks."""

    pattern: str
    tower: str
    holders: dict[str, tuple[int, ...]]
    """Trainable parameter -> placed stages that hold it, over all installed so far."""
    updaters: dict[str, int] = field(default_factory=dict)
    """Trainable parameter -> the rank that updates it, over all installed so far; none where all holders do."""
    restored: str = ""
    """Folder of a checkpoint with the optimizer state of some of these parameters, that ranks read for themselves."""
    waiting: tuple[str, ...] = ()
    """Original names of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step, or a part of one (`StepPlan.update`)."""

    plan: StepPlan
    hyper: Hyper
    """The optimizer's settings for this step, learning rates included."""
    seed: int
    """With step, stage, and first sample of the microbatch, it keys the random numbers of a forward."""
    trace: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Send tensors to rank 0."""

    what: Literal["weights", "optimizer"]
    names: dict[int, tuple[str, ...]]
    """Rank -> parameters it sends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendEvents:
    """Send the measured events of the last step to rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCheckpoint:
    """Write to a checkpoint, on a thread, and report to rank 0 through the store."""

    folder: str
    """A fresh one, that all ranks see."""
    number: int
    """Saves so far."""
    step: int
    """Updates so far."""
    copies: bool
    """Write copies made now, since training continues meanwhile."""
    names: dict[int, tuple[str, ...]]
    """Rank -> parameters that it writes, with their optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadCheckpoint:
    """Read the tensors held here from a checkpoint, and report to rank 0. Nothing changes before `ApplyCheckpoint`."""

    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyCheckpoint:
    """Take over the tensors read by `LoadCheckpoint`; every rank could read its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Rank 0 refused the user's call, and nothing happened; ranks that wait in the same call raise the same error."""

    error: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The user's call is complete."""

    call: str
    """Name of the engine's method."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseEngine:
    """The engine ends."""


COMMANDS = (
    Setup,
    Install,
    Step,
    Gather,
    SendEvents,
    SaveCheckpoint,
    LoadCheckpoint,
    ApplyCheckpoint,
    Refuse,
    Done,
    CloseEngine,
)
"""All kinds of commands; each is known on the wire by its place here."""

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
