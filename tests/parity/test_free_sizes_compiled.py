"""Fifty steps of free sizes through compiled stages: what the first steps captured and compiled holds for all that follow."""

from __future__ import annotations

from functools import partial

import pytest
from support.graphs.split import eager_from_logits, run_split
from support.oracles.eager import difference
from support.parity.free_steps import compute_in_float64, free_model, free_steps
from support.parity.layouts import PARTS, Freeze

import mmcompile as mm
from mmcompile.captured_model import CapturedModel
from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.program_cache import Patterns
from mmcompile.data.collate import collate
from mmcompile.runtime.elastic.warm_up import num_graphs

STEPS = 50
LEARNED = 3
"""Steps in which everything is captured."""
WARM = 5
"""Steps after which nothing is compiled: by then a microbatch with a single picture, another case for compilers, has run."""
EQUAL = 1
"""Index of the step with a microbatch whose rows are equally long: its mask is all true, which is captured apart."""
CHECKED = 5
"""Every how many steps loss and gradients are compared with those of the eager model."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "pixtral", "qwen2_audio"])
def test_fifty_steps_capture_and_compile_nothing_after_warm_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch of two samples each, all of which differ."""
    compute_in_float64(monkeypatch)
    batches = [[collate(step[:2]), collate(step[2:])] for step in free_steps(family, STEPS)]
    batches[EQUAL][1] = collate([free_steps(family, STEPS)[EQUAL][2]] * 2)
    model, load = free_model(family, Freeze.NONE), partial(load_compiled_stage, backend="aot_eager")
    plan = mm.plan(
        model, batches[0][0], num_microbatches=2, projector="with_encoder" if PARTS[family].projectors else None
    )
    subject = CapturedModel.of(model, batches[0][0])
    patterns = Patterns(subject.model, plan, subject.capture(), subject.batch)
    patterns.warm_up([batch for step in batches[:LEARNED] for batch in step])
    counts: list[tuple[int, int]] = []
    for number, step in enumerate(batches):
        for batch in step:
            prepared = patterns.prepare(batch)
            got = run_split(model, prepared.programs, {**prepared.values, **prepared.sizes}, load).outcome
            if number % CHECKED == 0:
                wanted, _ = eager_from_logits(model, batch)
                assert (apart := difference(got, wanted)).within(1e-9), str(apart)
        counts.append((patterns.num_captures, num_graphs()))
    captures, graphs = zip(*counts, strict=True)
    assert captures[LEARNED - 1] == captures[-1], captures
    assert 0 < graphs[WARM - 1] == graphs[-1], graphs
