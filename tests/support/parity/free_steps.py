"""Steps whose samples have media of free sizes, so that all microbatches differ, and a family trained on them in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ALL, Batch
from zoo.free_sizes import free_batch

from support.oracles.one_process import TrainingRun, train
from support.parity.layouts import PARTS, Freeze, freeze

MEDIA = (2, 1, 3, 1, 0, 2, 2, 1, 1, 0)
"""Pictures or clips of a sample, in turn."""
SAMPLES = 4
"""Samples of a step, where nothing is said."""


def compute_in_float64(monkeypatch: pytest.MonkeyPatch, *, casts: bool = False) -> None:
    """Let models that ask for float32 where rounding matters (losses, rotations, norms) compute in float64 there.

    Args:
        casts: also where they ask by `Tensor.to`, as norms do.
    """
    new_zeros, to = torch.Tensor.new_zeros, torch.Tensor.to

    def wide_zeros(self: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return new_zeros(self, *size, dtype=torch.float64 if dtype == torch.float32 else dtype, **options)

    def wide(option: Any) -> Any:
        return torch.float64 if option is torch.float32 else option

    def wide_to(self: Tensor, *target: Any, **options: Any) -> Tensor:
        return to(self, *map(wide, target), **{name: wide(option) for name, option in options.items()})

    if casts:
        monkeypatch.setattr(torch.Tensor, "to", wide_to)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "new_zeros", wide_zeros)


@functools.cache
def free_steps(family: str, num_steps: int, num_samples: int = SAMPLES) -> tuple[list[Batch], ...]:
    """Return steps of `num_samples` conversations of one row each, in float64."""
    samples = [
        free_batch(family, 50 + index, MEDIA[index % len(MEDIA)], torch.float64, rows=1)
        for index in range(num_samples * num_steps)
    ]
    return tuple(samples[first : first + num_samples] for first in range(0, len(samples), num_samples))


def free_model(family: str, what: Freeze) -> nn.Module:
    """Return the model in float64, parts of it frozen."""
    model = ALL[family].build(torch.float64)
    if what is not Freeze.NONE:
        freeze(model, PARTS[family], what)
    return model


@functools.cache
def trained_alone(family: str, what: Freeze, num_steps: int, num_samples: int = SAMPLES) -> TrainingRun:
    """Return what one process makes of these steps, each sample a microbatch of its own."""
    return train(free_model(family, what), free_steps(family, num_steps, num_samples))
