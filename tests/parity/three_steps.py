"""Three steps of four samples each in float64, and a family trained on them in one process."""

from __future__ import annotations

import functools

import torch
from oracles.one_process import TrainingRun, train
from parity.layouts import PARTS, Freeze, freeze
from torch import nn
from zoo import ALL, Batch, samples

MICROBATCHES = 2
SAMPLES = 4


@functools.cache
def steps_of(family: str) -> tuple[list[Batch], ...]:
    """Samples of three steps, of unequal lengths; the second one has no media where the family can do without."""
    draw = functools.partial(samples, ALL[family], SAMPLES, dtype=torch.float64)
    return draw(seed=1), draw(seed=2, media=(0,)) if ALL[family].text_only else draw(seed=2), draw(seed=3)


def model_of(family: str, what: Freeze) -> nn.Module:
    model = ALL[family].build(torch.float64)
    freeze(model, PARTS[family], what)
    return model


@functools.cache
def in_one_process(family: str, what: Freeze) -> TrainingRun:
    return train(model_of(family, what), steps_of(family), num_microbatches=MICROBATCHES)
