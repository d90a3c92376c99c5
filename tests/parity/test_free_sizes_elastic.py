"""A run on samples of free sizes that loses its leader trains as one process does, and captures nothing anew afterwards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from support.oracles.one_process import ADAMW, TrainingRun, train
from support.parity.free_steps import compute_in_float64, free_model, free_steps, trained_alone
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import assert_same_parameters
from zoo import Batch
from zoo.free_sizes import free_batch

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.runtime.monitoring.fail_points import VARIABLE, FaultAction, Strike

TOLERANCE = 1e-9
STEPS = 6
STRUCK = 4
"""Step before which the leader is killed."""
WITH_TEXT = (3, 5)
"""Steps with microbatches of text alone, which are captured apart: one before the leader is killed, one after."""
MICROBATCHES = 4
SAMPLES = 2 * MICROBATCHES


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "pixtral", "qwen2_audio"])
def test_a_run_that_loses_its_leader_trains_as_one_process_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, wanted = free_steps(family, STEPS, SAMPLES), trained_alone(family, Freeze.NONE, STEPS, SAMPLES)
    captures = _captures_of_a_run_that_loses_its_leader(family, steps, wanted, tmp_path, monkeypatch)
    # The job captures what its first steps need, and workers have that when they start: none of them captured anything.
    assert set(captures) == {os.getpid()}


@pytest.mark.slow
def test_a_new_leader_does_not_capture_what_the_old_one_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' first leader captures microbatches of text alone, and is killed before there are others."""
    family = "qwen2_5_vl"
    steps = [list(step) for step in free_steps(family, STEPS, SAMPLES)]
    for number in WITH_TEXT:
        steps[number - 1][:4] = [free_batch(family, 900 + 9 * number + i, 0, torch.float64, rows=1) for i in range(4)]
    wanted = train(free_model(family, Freeze.NONE), steps)
    captures = _captures_of_a_run_that_loses_its_leader(family, steps, wanted, tmp_path, monkeypatch)
    workers = {process: count for process, count in captures.items() if process != os.getpid()}
    assert list(workers.values()) == [1], captures


def _captures_of_a_run_that_loses_its_leader(
    family: str, steps: Sequence[list[Batch]], wanted: TrainingRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Counter[int]:
    """Train on five nodes, the leader of which is killed before step `STRUCK`; return the captures of each process by its id."""
    model, batch, captures = free_model(family, Freeze.NONE), collate(steps[0][:2]), folder / "captures"
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
    strike = Strike(point="before-step", action=FaultAction.KILL, rank=0, step=STRUCK, marker=str(folder / "struck"))
    monkeypatch.setenv(VARIABLE, msgspec.json.encode([strike]).decode())

    def note(*_: object) -> None:
        with captures.open("a") as file:
            file.write(f"{os.getpid()}\n")

    with mm.elastic(
        model,
        batch,
        replace(plan, resilience=replace(plan.resilience, templates=kept)),
        data=mm.MapBatches([sample for step in steps for sample in step], SAMPLES, seed=0, shuffle=False),
        num_steps=STEPS,
        folder=folder / "run",
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
    assert_same_parameters(model.state_dict(), wanted.parameters, TOLERANCE)
    return Counter(map(int, captures.read_text().split()))
