"""What `plan`, `stages` and `train` share: a model, a batch, and a plan for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mmcompile import api
from mmcompile.cli.console import busy
from mmcompile.cli.model import Weights, load_model
from mmcompile.cli.options import Dtype, Projector
from mmcompile.errors import ConfigError
from mmcompile.ir.sample_inputs import example_batch
from mmcompile.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The batch a model is captured on when none is at hand."""

    batch_size: int
    seq_len: int | None
    num_images: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model ready to be planned."""

    model: nn.Module = field(repr=False)
    batch: Mapping[str, Any] = field(repr=False)


def load_subject(text: str, train: Sequence[str] | None, dtype: Dtype | None, example: Example) -> Subject:
    """A model without weights, its trainable part set, and a batch for it."""
    with busy(f"building {text}"):
        loaded = load_model(text, Weights.NONE, torch_dtype_of(dtype))
        set_trainable(loaded.model, train)
        batch = loaded.batch
        if batch is None:
            batch = example_batch(
                loaded.model, num_samples=example.batch_size, seq_len=example.seq_len, num_images=example.num_images
            )
    return Subject(model=loaded.model, batch=batch)


def set_trainable(model: nn.Module, train: Sequence[str] | None) -> None:
    """Apply `--train`; without it the model's own flags hold."""
    if train:
        api.freeze(model, train)


def torch_dtype_of(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype)


def make_plan(
    subject: Subject, cluster: str, microbatches: int, stages: Mapping[str, int] | None, projector: Projector
) -> Plan:
    """Capture and search, with a spinner."""
    with busy("capturing and planning"):
        return api.plan(
            subject.model,
            subject.batch,
            cluster=cluster,
            num_microbatches=microbatches,
            stages=stages,
            projector=None if projector is Projector.SEARCH else projector.value,
        )


def refuse_with_plan(**given: object) -> None:
    """A plan decides these already.

    Raises:
        ConfigError: one of them was given all the same.
    """
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name} has no effect together with --plan: the plan decides it; drop one of the two")
