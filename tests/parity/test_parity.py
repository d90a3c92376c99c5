"""A model split over real processes trains exactly as it does in one: three AdamW steps, every parameter, every loss.

Each step has 8 samples in 4 microbatches: with one image and with two, a mix, and a microbatch without any; the second step
has no image at all. In float64, since in float32 AdamW turns the rounding of a zero gradient into a full-sized update.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from support.oracles.one_process import ADAMW
from support.parity.layouts import LAYOUTS, PARTS, Freeze, Layout, stages
from support.parity.three_steps import assert_same_parameters, in_one_process, model_of, steps_of
from zoo import PARITY_FAMILIES

import mmcompile as mm
from mmcompile.data.collate import collate

TOLERANCE = 1e-9
MICROBATCHES = 4


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
CORE = [Combination(family="llava", layout=LAYOUTS[1], freeze=Freeze.ENCODER)]
CASES = [*CORE, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID if case not in CORE)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one_process_does(case: Combination) -> None:
    steps, parts = steps_of(case.family, num_microbatches=MICROBATCHES), PARTS[case.family]
    wanted = in_one_process(case.family, case.freeze, num_microbatches=MICROBATCHES)
    with mm.parallelize(
        model_of(case.family, case.freeze),
        collate(steps[0][:2]),
        num_microbatches=MICROBATCHES,
        stages=stages(case.layout, parts),
        projector=case.layout.projector if parts.projectors else None,
        allow_unused=True,
        optimizer=ADAMW,
    ) as engine:
        metrics = [engine.step(step) for step in steps]
        got = engine.state_dict()
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert_same_parameters(got, wanted.parameters, TOLERANCE)
    initial = dict(model_of(case.family, case.freeze).named_parameters())
    assert any(not torch.equal(got[name], tensor) for name, tensor in initial.items()), "nothing was trained"
