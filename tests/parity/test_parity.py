"""A model split over real processes trains exactly as it does in one: three AdamW steps, every parameter, every loss.

Each step has 8 samples in 4 microbatches: with one image and with two, a mix, and a microbatch without any; the second step
has no image at all. In float64, since in float32 AdamW turns the rounding of a zero gradient into a full-sized update.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from oracles.one_process import ADAMW, TrainingRun, train
from parity.layouts import LAYOUTS, PARTS, Freeze, Layout, freeze, stages
from torch import Tensor, nn
from zoo import ALL, PARITY_FAMILIES, Batch, samples

import mmcompile as mm
from mmcompile.step.collate import collate

TOLERANCE = 1e-9
MICROBATCHES = 4
SAMPLES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One cell of the grid."""

    family: str
    layout: Layout
    freeze: Freeze

    def __str__(self) -> str:
        return f"{self.family}-{self.layout}-freeze_{self.freeze}"


GRID = [
    Combination(family=family, layout=layout, freeze=what)
    for family, layout, what in product(PARITY_FAMILIES, LAYOUTS, Freeze)
]
_, _TWO, _THREE = LAYOUTS
CORE = [
    Combination(family="llava", layout=_TWO, freeze=Freeze.ENCODER),
    Combination(family="qwen3_vl", layout=_THREE, freeze=Freeze.NONE),
]
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID if case not in CORE)]


@functools.cache
def _steps(family: str) -> tuple[list[Batch], ...]:
    """Samples of three steps; the second one has no media."""
    draw = functools.partial(samples, ALL[family], SAMPLES, dtype=torch.float64)
    return draw(seed=1), draw(seed=2, media=(0,)), draw(seed=3)


def _model(family: str, what: Freeze) -> nn.Module:
    model = ALL[family].build(torch.float64)
    freeze(model, PARTS[family], what)
    return model


@functools.cache
def _in_one_process(family: str, what: Freeze) -> TrainingRun:
    return train(_model(family, what), _steps(family), num_microbatches=MICROBATCHES)


def _assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    errors = {name: float((got[name] - tensor).abs().max()) for name, tensor in wanted.items()}
    worst = sorted(errors, key=errors.__getitem__)[-5:]
    far = [name for name, error in errors.items() if not error <= TOLERANCE]
    assert not far, f"{len(far)} of {len(errors)} parameters differ; the worst: { {n: errors[n] for n in worst} }"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one_process_does(case: Combination) -> None:
    steps, parts = _steps(case.family), PARTS[case.family]
    wanted = _in_one_process(case.family, case.freeze)
    with mm.parallelize(
        _model(case.family, case.freeze),
        collate(steps[0][:2]),
        num_microbatches=MICROBATCHES,
        stages=stages(case.layout, parts),
        projector=case.layout.projector if parts.projectors else None,
        optimizer=ADAMW,
    ) as engine:
        metrics = [engine.step(step) for step in steps]
        got = engine.state_dict()
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    _assert_same(got, wanted.parameters)
    initial = dict(_model(case.family, case.freeze).named_parameters())
    assert any(not torch.equal(got[name], tensor) for name, tensor in initial.items()), "nothing was trained"
