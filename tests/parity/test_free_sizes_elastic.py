"""A run on samples of free sizes that loses its leader trains as one process does, and captures nothing anew afterwards."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.oracles.one_process import ADAMW
from support.parity.free_steps import compute_in_float64, free_model, free_steps, trained_alone
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import assert_same_parameters

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.runtime.monitoring.fail_points import VARIABLE, FaultAction, Strike

TOLERANCE = 1e-9
PARAMETER_TOLERANCE = 1e-6
"""AdamW turns the rounding of a small gradient into a larger step."""
STEPS = 6
STRUCK = 4
"""Step before which the leader is killed."""
MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "pixtral", "qwen2_audio"])
def test_a_run_that_loses_its_leader_trains_as_one_process_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch)
    steps, wanted = free_steps(family, STEPS, SAMPLES), trained_alone(family, Freeze.NONE, STEPS, SAMPLES)
    model, batch, captures = free_model(family, Freeze.NONE), collate(steps[0][:2]), tmp_path / "captures"
    plan = mm.plan(
        model,
        batch,
        cluster="5x1xcpu",
        num_microbatches=MICROBATCHES,
        projector="with_encoder" if PARTS[family].projectors else None,
        fault_tolerance=1,
    )
    assert plan.resilience is not None
    kept = tuple(one for one in plan.resilience.templates if one.num_nodes in (2, 3))
    strike = Strike(point="before-step", action=FaultAction.KILL, rank=0, step=STRUCK, marker=str(tmp_path / "struck"))
    monkeypatch.setenv(VARIABLE, msgspec.json.encode([strike]).decode())

    def note(_: int) -> None:
        with captures.open("a") as file:
            file.write(f"{os.getpid()}\n")

    with mm.elastic(
        model,
        batch,
        replace(plan, resilience=replace(plan.resilience, templates=kept)),
        data=mm.MapBatches([sample for step in steps for sample in step], SAMPLES, seed=0, shuffle=False),
        num_steps=STEPS,
        folder=tmp_path / "run",
        optimizer=ADAMW,
        allow_unused=True,
        max_restarts=0,
        on_capture=note,
    ) as engine:
        metrics = list(engine.train())
        (recovery,) = engine.recoveries
        engine.pull()
    assert "SIGKILL" in recovery.cause
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert_same_parameters(model.state_dict(), wanted.parameters, PARAMETER_TOLERANCE)
    # The job captures what its first steps need, and workers have that when they start: none of them captured anything.
    assert set(captures.read_text().split()) == {str(os.getpid())}
