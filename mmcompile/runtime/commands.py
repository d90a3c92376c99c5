"""What rank 0 tells the other ranks. Each command is one broadcast, some followed by tensors from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mmcompile.batching.step_plan import PROTOCOL_VERSION, StepPlan
from mmcompile.config import Reduction, ScheduleKind
from mmcompile.errors import EngineError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.optim.optimizer import Hyper, OptimizerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """First command: what stays the same for the life of an engine."""

    stages: tuple[PlacedStage, ...]
    schedule: ScheduleKind
    optimizer: OptimizerSpec
    clip_norm: float | None
    compiled: bool
    check_rows: bool = False
    """Check that rows between towers are those of the samples they were sent for."""
    reduction: Reduction = "fast"
    shard_optimizer: bool = False
    """One of the ranks that hold a parameter updates it, and tells the others."""
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
class Events:
    """Send the measured events of the last step to rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Write to a checkpoint, on a thread, and tell rank 0 through the store."""

    folder: str
    """A fresh one, that all ranks see."""
    number: int
    """Of saves so far."""
    step: int
    """Updates so far."""
    copies: bool
    """Write copies made now: training goes on meanwhile."""
    names: dict[int, tuple[str, ...]]
    """Rank -> parameters that it writes, with their optimizer state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Read from a checkpoint what is held here, and tell rank 0 how that went. Nothing changes before `Apply`."""

    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Apply:
    """Take over what was read by `Load`; every rank could read its own."""


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
class Close:
    """The engine ends."""


Command: TypeAlias = Setup | Install | Step | Gather | Events | Save | Load | Apply | Refuse | Done | Close

_KINDS: tuple[type[Command], ...] = (Setup, Install, Step, Gather, Events, Save, Load, Apply, Refuse, Done, Close)


def announce(groups: Groups, command: Command) -> None:
    """Rank 0: broadcast a command."""
    wire.broadcast(groups, bytes([_KINDS.index(type(command))]) + wire.encode(command))


def hear(groups: Groups) -> Command:
    """Other ranks: the next command of rank 0."""
    data = wire.broadcast(groups, None)
    command = wire.decode(memoryview(data)[1:], _KINDS[data[0]])
    if isinstance(command, Setup) and command.version != PROTOCOL_VERSION:
        raise EngineError(
            f"rank {groups.rank} runs protocol {PROTOCOL_VERSION}, rank 0 runs {command.version}: install one version everywhere"
        )
    return command
