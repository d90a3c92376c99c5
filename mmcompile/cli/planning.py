"""What `plan`, `stages` and `train` share: a model, a batch, and a plan for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from torch import nn

from mmcompile import api
from mmcompile.cli.console import busy, counting
from mmcompile.cli.model import Weights, load_model
from mmcompile.cli.options import (
    SEARCH,
    AttentionChoice,
    Dtype,
    PlacementChoice,
    Projector,
    RecomputeChoice,
    ScheduleChoice,
    Strategy,
    parse_degrees,
)
from mmcompile.config import EncoderPlacement, Recomputation, ScheduleKind
from mmcompile.costmodel.calibration import Calibration
from mmcompile.data.collate import Sample
from mmcompile.data.readers import read_stats
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.planner.plan.constraints import Constraint, parse_constraint
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.search.settings import RECOMPUTES

_DEFAULT_MICROBATCHES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The batch a model is captured on when none is at hand: `example_batch`'s arguments."""

    batch_size: int
    text_tokens: int
    images: int
    image_size: int
    audios: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model ready to be planned."""

    model: nn.Module = field(repr=False)
    batch: Mapping[str, Any] = field(repr=False)
    packing: Sequence[Sample] | None = field(default=None, repr=False)
    """What `batch` was packed from; None for a padded batch."""


def load_subject(text: str, train: Sequence[str] | None, dtype: Dtype | None, example: Example) -> Subject:
    """A model without weights, its trainable part set, and a batch for it."""
    with busy(f"building {text}"):
        loaded = load_model(text, Weights.NONE, dtype)
        set_trainable(loaded.model, train)
        batch = example_batch(loaded.model, **asdict(example)) if loaded.batch is None else loaded.batch
    return Subject(model=loaded.model, batch=batch)


def set_trainable(model: nn.Module, train: Sequence[str] | None) -> None:
    """Apply `--train`; without it the model's own flags hold."""
    if train:
        api.freeze(model, train)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the user decided about a plan before the search: arguments of `api.plan`. None leaves a choice to it."""

    stages: Mapping[str, int] | None = None
    projector: Projector = Projector.SEARCH
    autocast: bool | tuple[str, ...] | None = None
    fsdp: bool | tuple[str, ...] | None = None
    attention: AttentionChoice | None = None
    context_parallel: int | None = None
    microbatches: int | None = None
    global_batch: int | None = None
    stats: DatasetStats | None = field(default=None, repr=False)
    strategy: Strategy = Strategy.AUTO
    schedule: ScheduleKind | None = None
    recompute: Recomputation | None = None
    placement: EncoderPlacement | None = None
    tensor_parallel: int | Mapping[str, int] | None = None
    replicas: int | Mapping[str, int] | None = None
    constraints: tuple[Constraint, ...] = ()
    calibration: Calibration | None = field(default=None, repr=False)
    solver_seconds: float | None = None
    fault_tolerance: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """Options of the search as they were typed."""

    global_batch: int | None
    stats: str | None
    strategy: Strategy
    schedule: ScheduleChoice | None
    recompute: RecomputeChoice | None
    placement: PlacementChoice | None
    tensor_parallel: Sequence[str] | None
    replicas: Sequence[str] | None
    constrain: Sequence[str] | None
    calibration: Path | None
    solver_seconds: float | None

    def read(self, wanted: Wanted) -> Wanted:
        """`wanted` with these options as values; files are read.

        Raises:
            ConfigError: an option that cannot be read or has no effect.
        """
        self._check()
        return replace(
            wanted,
            global_batch=self.global_batch,
            stats=None if self.stats is None else read_dataset(self.stats),
            strategy=self.strategy,
            schedule=schedule_kind(self.schedule),
            recompute=recompute_kind(self.recompute),
            placement=None if self.placement in (None, PlacementChoice.SEARCH) else _placement(self.placement),
            tensor_parallel=parse_degrees("--tensor-parallel", self.tensor_parallel),
            replicas=parse_degrees("--replicas", self.replicas),
            constraints=tuple(parse_constraint(text) for text in self.constrain or ()),
            calibration=None if self.calibration is None else Calibration.load(self.calibration),
            solver_seconds=self.solver_seconds,
        )

    def _check(self) -> None:
        if self.global_batch is not None:
            return
        searched = {
            "--schedule": self.schedule,
            "--placement": self.placement,
            "--tensor-parallel": SEARCH if SEARCH in (self.tensor_parallel or ()) else None,
            "--replicas": SEARCH if SEARCH in (self.replicas or ()) else None,
        }
        for option, value in searched.items():
            if value == SEARCH:
                raise ConfigError(
                    f"{option} search has no effect without --global-batch: say how many samples a step has"
                )
        if self.stats is not None:
            raise ConfigError(
                "--stats has no effect without --global-batch: every microbatch is the example batch then; "
                "say how many samples a step has"
            )


def read_dataset(source: str) -> DatasetStats:
    """Statistics of a dataset, with a spinner that counts."""
    with counting(f"reading {source}") as progress:
        return read_stats(source, progress=progress)


def make_plan(subject: Subject, cluster: str, wanted: Wanted, timing: dict[str, float] | None = None) -> Plan:
    """Capture and search, with a spinner.

    Args:
        timing: gets the seconds of each phase, as `api.plan` tells them.
    """
    seconds = {} if timing is None else timing
    microbatches = wanted.microbatches
    if microbatches is None and wanted.global_batch is None:
        microbatches = _DEFAULT_MICROBATCHES
    with busy("capturing and planning"):
        return api.plan(
            subject.model,
            subject.batch if subject.packing is None else None,
            cluster=cluster,
            num_microbatches=microbatches,
            stages=wanted.stages,
            projector=None if wanted.projector is Projector.SEARCH else wanted.projector.value,
            autocast=wanted.autocast,
            fsdp=wanted.fsdp,
            attention=None if wanted.attention is None else wanted.attention.value,
            context_parallel=wanted.context_parallel,
            global_batch=wanted.global_batch,
            stats=wanted.stats,
            strategy=wanted.strategy.value,
            schedule=wanted.schedule,
            recompute=wanted.recompute,
            placement=wanted.placement,
            tensor_parallel=wanted.tensor_parallel,
            replicas=wanted.replicas,
            packing=subject.packing,
            constraints=wanted.constraints,
            calibration=wanted.calibration,
            solver_seconds=wanted.solver_seconds,
            fault_tolerance=wanted.fault_tolerance,
            on_phase=seconds.__setitem__,
        )


def schedule_kind(choice: ScheduleChoice | None) -> ScheduleKind | None:
    """None for `search` too."""
    return next((kind for kind in get_args(ScheduleKind) if choice is not None and kind == choice.value), None)


def _placement(choice: PlacementChoice) -> EncoderPlacement:
    return next(kind for kind in get_args(EncoderPlacement) if kind == choice.value)


def recompute_kind(choice: RecomputeChoice | None) -> Recomputation | None:
    """The same as the search calls it."""
    kinds: tuple[Recomputation, ...] = (*RECOMPUTES, "auto")
    return next((kind for kind in kinds if choice is not None and kind == choice.value), None)


def refuse_with_plan(**given: object) -> None:
    """A plan decides these already.

    Raises:
        ConfigError: one of them was given all the same.
    """
    for name, value in given.items():
        if value:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} has no effect together with --plan: the plan decides it; drop one of the two"
            )
