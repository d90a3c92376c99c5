"""What `plan`, `stages` and `train` share: a model, a batch, and a plan for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from mmcompile import api
from mmcompile.cli.console import busy
from mmcompile.cli.model import Weights, load_model
from mmcompile.cli.options import AttentionChoice, Dtype, Projector
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.plan.plan import Plan


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
    """What the user decided about a plan before the search."""

    stages: Mapping[str, int] | None
    projector: Projector
    attention: AttentionChoice | None
    context_parallel: int


def make_plan(subject: Subject, cluster: str, microbatches: int, wanted: Wanted) -> Plan:
    """Capture and search, with a spinner."""
    with busy("capturing and planning"):
        return api.plan(
            subject.model,
            subject.batch,
            cluster=cluster,
            num_microbatches=microbatches,
            stages=wanted.stages,
            projector=None if wanted.projector is Projector.SEARCH else wanted.projector.value,
            attention=None if wanted.attention is None else wanted.attention.value,
            context_parallel=wanted.context_parallel,
        )


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
