"""Three steps of two samples a microbatch, and a family trained on them in one process; in float64 where nothing is said."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from zoo import ALL, Batch, samples

from support.oracles.one_process import TrainingRun, train
from support.parity.layouts import PARTS, Freeze, freeze

MICROBATCHES = 2
"""Of a step, where nothing is said."""


@functools.cache
def steps_of(
    family: str, dtype: torch.dtype = torch.float64, num_microbatches: int = MICROBATCHES
) -> tuple[list[Batch], ...]:
    """Samples of three steps, of unequal lengths; the second one has no media where the family can do without."""
    draw = functools.partial(samples, ALL[family], 2 * num_microbatches, dtype=dtype)
    return draw(seed=1), draw(seed=2, media=(0,)) if ALL[family].text_only else draw(seed=2), draw(seed=3)


def model_of(family: str, what: Freeze, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = ALL[family].build(dtype)
    freeze(model, PARTS[family], what)
    return model


@functools.cache
def in_one_process(
    family: str, what: Freeze, dtype: torch.dtype = torch.float64, num_microbatches: int = MICROBATCHES
) -> TrainingRun:
    steps = steps_of(family, dtype, num_microbatches)
    return train(model_of(family, what, dtype), steps, num_microbatches=num_microbatches)


def assert_same_parameters(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    """All of `wanted` must be in `got`, within `tolerance` in every element."""
    errors = {name: float((got[name] - tensor).abs().max()) for name, tensor in wanted.items()}
    far = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not far, f"{len(far)} of {len(errors)} parameters differ; the worst {max(far.items(), key=lambda x: x[1])}"
