"""Half precision trains as float32 does: the demo's model on scanned digits, on two processes.

Each of six trainings holds out other images, all but 15 of the 1,797 once: one image more or less of the demo's 297 is a third of
a point, and two trainings whose loss is the same differ by five images and more. Attention is in plain operators: a processor's
fused one takes 20 times as long backwards in bfloat16 as in float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import mmcompile as mm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits_llava import NUM_HELD_OUT, Sample, accuracy_of, batch_of, build_model, build_samples  # noqa: E402 # pyright: ignore[reportMissingImports]

STEPS, BATCH_SIZE, MICROBATCHES = 900, 60, 4
FOLDS = 6
"""Trainings, each without other images."""
TRACKED = 200
"""Steps whose losses are compared; accuracies are those of the end."""
PEAK_LEARNING_RATE = 3e-3
WINDOW, TOLERANCE = 40, 0.2
"""Of mean losses over so many steps, against float32, in nats; the loss falls from 4 to 0.6. Measured: 0.13."""
FIRST, FIRST_TOLERANCE = 80, 0.05
"""Of those over ten steps, while rounding is not yet enlarged: from step 100 to 150 the loss falls by 1, in any two runs some
steps earlier in one. Measured: 0.020."""
ACCURACY_TOLERANCE = 0.01
"""Over all folds, either way. Measured on 1,782 images, against 97.36 % in float32: 0.06 points worse under autocast (one image),
0.45 worse with the language model alone under it, 0.17 better with bfloat16 weights and float32 masters; one fold by itself is up
to 2.7 points off either way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What training reached."""

    losses: tuple[float, ...]
    """Of the first `TRACKED` steps."""
    accuracy: float
    """On held-out images, in float32."""

    def means(self, window: int, steps: int = TRACKED) -> list[float]:
        return [sum(self.losses[first : first + window]) / window for first in range(0, steps, window)]


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=STEPS)


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """All images in another order each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(0, STEPS, len(samples) // BATCH_SIZE):
        order = torch.randperm(len(samples), generator=generator).tolist()
        for first in range(0, len(samples) - BATCH_SIZE + 1, BATCH_SIZE):
            yield [samples[index] for index in order[first : first + BATCH_SIZE]]


def _train(model: nn.Module, fold: int, **options: Any) -> Run:
    samples = build_samples()
    first, last = fold * NUM_HELD_OUT, (fold + 1) * NUM_HELD_OUT
    held_out, training = samples[first:last], samples[:first] + samples[last:]
    with mm.parallelize(
        model,
        batch_of(training[: BATCH_SIZE // MICROBATCHES]),
        num_microbatches=MICROBATCHES,
        stages={"language_model": 1},
        balance="arrival",
        optimizer=functools.partial(torch.optim.AdamW, lr=PEAK_LEARNING_RATE, weight_decay=0.05),
        scheduler=_one_cycle,
        clip_norm=1.0,
        **options,
    ) as engine:
        losses = [metrics.loss for metrics in engine.train(_batches(training))]
        engine.pull()
    return Run(losses=tuple(losses[:TRACKED]), accuracy=accuracy_of(model.float(), held_out))


FLOAT32 = "float32"
HALF = ("autocast", "language model under autocast", "bfloat16 with float32 masters")


@functools.cache
def _run(precision: str, fold: int) -> Run:
    model = build_model()
    model.set_attn_implementation("eager")
    match precision:
        case "float32":
            return _train(model, fold)
        case "autocast":
            return _train(model, fold, autocast=True)
        case "language model under autocast":
            return _train(model, fold, autocast=["language_model"])
        case _:
            masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            return _train(model.to(torch.bfloat16), fold, master_weights=masters)


@pytest.mark.slow
@pytest.mark.parametrize("fold", range(FOLDS))
def test_float32_learns(fold: int) -> None:
    """What the others are compared with."""
    assert _run(FLOAT32, fold).accuracy > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("fold", range(FOLDS))
@pytest.mark.parametrize("precision", HALF)
def test_losses_of_half_precision_track_those_of_float32(precision: str, fold: int) -> None:
    got, wanted = _run(precision, fold), _run(FLOAT32, fold)
    assert got.means(10, FIRST) == pytest.approx(wanted.means(10, FIRST), rel=0, abs=FIRST_TOLERANCE)
    assert got.means(WINDOW) == pytest.approx(wanted.means(WINDOW), rel=0, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", HALF)
def test_accuracy_of_half_precision_is_that_of_float32(precision: str) -> None:
    """Trainings are those of the tests above; alone it takes half an hour (`-o faulthandler_timeout=3600`)."""
    gains = [_run(precision, fold).accuracy - _run(FLOAT32, fold).accuracy for fold in range(FOLDS)]
    assert abs(sum(gains) / FOLDS) <= ACCURACY_TOLERANCE
