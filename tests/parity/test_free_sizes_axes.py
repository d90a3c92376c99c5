"""Samples of free sizes, under every axis of a plan: processes train as one does, and soon capture no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.oracles.one_process import ADAMW, TrainingRun
from support.parity.free_steps import compute_in_float64, free_model, free_steps, trained_alone
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import assert_same_parameters
from support.processes.time_limit import time_limit
from torch import nn
from zoo import Batch

import mmcompile as mm
from mmcompile.data.collate import collate

TOLERANCE = 1e-9
LIMIT_S = 500.0
STEPS = 5
SEEN = 3
"""Steps whose samples the warm-up sees; all others have sizes of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """What a plan and its engine do otherwise than by default."""

    freeze: Freeze = Freeze.NONE
    encoder: int = 1
    """Replicas of each encoder."""
    language_model: int = 1
    """Replicas of the language model."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Options of `mm.plan`."""
    balance: str = "arrival"

    def planned(self, family: str, model: nn.Module, batch: Mapping[str, Any]) -> mm.Plan:
        parts = PARTS[family]
        replicas = {"language_model": self.language_model, **dict.fromkeys(parts.encoders, self.encoder)}
        return mm.plan(
            model,
            batch,
            num_microbatches=1 if self.language_model > 1 and self.balance == "arrival" else 2,
            replicas=replicas,
            projector="with_encoder" if parts.projectors else None,
            **self.plan,
        )


AXES = {
    "frozen": Axes(freeze=Freeze.ENCODER),
    "all_frozen": Axes(freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL),
    "recompute": Axes(plan={"recompute": "selective"}),
    "tp": Axes(plan={"tensor_parallel": 2}),
    "cp": Axes(plan={"context_parallel": 2}),
    "fsdp": Axes(encoder=2, language_model=2, plan={"fsdp": True}),
    "joint": Axes(encoder=2, language_model=2, balance="joint"),
    "joint_one_encoder": Axes(encoder=1, language_model=2, balance="joint"),
    "frozen_tp": Axes(freeze=Freeze.ENCODER, plan={"tensor_parallel": 2}),
    "cp_recompute": Axes(plan={"context_parallel": 2, "recompute": "full"}),
}
LATER = {("lfm2_vl", "joint"): 1}
"""Captures after the warm-up: a microbatch whose only picture fills its canvas has no mask, and the warm-up sees none."""
ROUNDED = ("glm4v",)
"""Families whose norms round to float32, so that a last bit of float64, which sums in another order change, becomes 6e-8."""
FAMILIES = ("glm4v", "kimi_k25", "pixtral", "mistral3", "llava_next", "lfm2_vl", "qwen2_audio", "qwen3_vl")
CASES = [
    *(("qwen2_5_vl", axes) for axes in AXES),
    *((family, axes) for family in FAMILIES for axes in ("frozen_tp", "joint")),
    # Qwen3-VL adds features in the middle of its text, which context parallelism refuses.
    *((family, "cp_recompute") for family in FAMILIES if family != "qwen3_vl"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), CASES)
def test_processes_train_as_one_does_on_samples_of_free_sizes(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch, casts=family in ROUNDED)
    axes = AXES[name]
    steps, wanted = free_steps(family, STEPS), trained_alone(family, axes.freeze, STEPS)
    model, batch = free_model(family, axes.freeze), collate(steps[0][:2])
    plan = axes.planned(family, model, batch)
    captured = _train_alike(
        steps,
        wanted,
        model,
        batch,
        plan,
        balance=axes.balance,
        allow_unused=True,
        check_rows=axes.balance != "arrival",
    )
    assert len(captured) <= LATER.get((family, name), 0), captured


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v", "qwen3_vl", "qwen2_audio"])
def test_packed_rows_of_free_sizes_train_as_their_samples_do_in_one_process(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two samples of a microbatch are one row."""
    compute_in_float64(monkeypatch, casts=family in ROUNDED)
    steps, wanted = free_steps(family, STEPS), trained_alone(family, Freeze.NONE, STEPS)
    model = free_model(family, Freeze.NONE)
    plan = mm.plan(model, packing=steps[0][:2], num_microbatches=2)
    assert not _train_alike(steps, wanted, model, plan=plan, packing=steps[0][:2], balance="arrival")


def _train_alike(
    steps: Sequence[list[Batch]], wanted: TrainingRun, model: nn.Module, *given: Any, **options: Any
) -> list[str]:
    """Train with an engine, compare it with one process, and return the captures after the warm-up: step and reason."""
    captured: list[str] = []
    losses: list[float] = []
    with (
        time_limit(LIMIT_S),
        mm.parallelize(
            model,
            *given,
            optimizer=ADAMW,
            on_capture=lambda _, reason: captured.append(f"step {len(losses)}: {reason}"),
            **options,
        ) as engine,
    ):
        engine.warm_up(steps[:SEEN])
        captured.clear()
        for step in steps:
            losses.append(engine.step(step).loss)
        got = engine.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert_same_parameters(got, wanted.parameters, TOLERANCE)
    return captured
