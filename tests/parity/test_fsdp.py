"""Replicas that share parameters (FSDP) train as one process does, hold half of the state, and never wait for ever."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracles.one_process import ADAMW
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import MICROBATCHES, assert_same_parameters, in_one_process, model_of, steps_of
from support.paths import TESTS
from support.processes.reporting_adamw import FOLDER, ReportingAdamW, reported
from support.processes.time_limit import time_limit
from torch import Tensor, nn
from zoo import Batch

import mmcompile as mm
from mmcompile.captured_model import captured_step, fingerprint_of
from mmcompile.codegen.program_cache import Patterns
from mmcompile.config import PlanRequest, Recompute
from mmcompile.data.collate import IGNORED_LABEL, collate
from mmcompile.errors import BatchError, ConfigError, PlanError
from mmcompile.ir.inputs import completed
from mmcompile.planner.plan.placement import Placement
from mmcompile.planner.plan.plan import Plan
from mmcompile.planning import PlanInputs, make_plan
from mmcompile.runtime.engine import Engine

TOLERANCE = 1e-9
PARAMETER_TOLERANCE = 1e-6
"""AdamW turns the rounding of a small gradient into a larger step."""
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, what of it trains, and how its language model and encoder are laid out."""

    family: str = "llava"
    freeze: Freeze = Freeze.NONE
    recompute: Recompute = "none"
    encoder: int = 1
    """Replicas; several share their parameters."""
    language_model: int = 2
    stages: int = 1
    """Of the language model."""

    def __str__(self) -> str:
        words = [self.family, f"encoder{self.encoder}", f"llm{self.language_model}x{self.stages}", self.recompute]
        return "-".join([*words, f"freeze_{self.freeze}"])


CASES = [
    Case(freeze=Freeze.ENCODER),
    Case(encoder=2),
    Case(encoder=2, recompute="selective"),
    Case(encoder=2, language_model=1),
    Case(encoder=2, freeze=Freeze.ENCODER, recompute="full"),
    Case(stages=2, recompute="full"),
    Case(freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL, recompute="full"),
    Case(family="qwen2_5_vl", encoder=2, stages=2),
    Case(family="gemma3", encoder=2, recompute="full"),
    Case(family="qwen2_audio", recompute="selective"),
]


def _planned(case: Case, model: nn.Module, batch: Batch, **options: Any) -> Plan:
    encoders = PARTS[case.family].encoders
    replicas = {"language_model": case.language_model, **dict.fromkeys(encoders, case.encoder)}
    return mm.plan(
        model,
        batch,
        num_microbatches=MICROBATCHES // case.language_model,
        stages={"language_model": case.stages},
        replicas=replicas,
        recompute=case.recompute,
        projector="with_encoder" if PARTS[case.family].projectors else None,
        **options,
    )


def _engine(model: nn.Module, batch: Batch, plan: Plan, **options: Any) -> Engine:
    options = {"optimizer": ADAMW, "clip_norm": 1e6} | options
    return mm.parallelize(model, batch, plan, balance="arrival", allow_unused=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one_process_does(case: Case) -> None:
    steps, wanted = steps_of(case.family), in_one_process(case.family, case.freeze)
    model, batch = model_of(case.family, case.freeze), collate(steps[0][:2])
    plan = _planned(case, model, batch, fsdp=True)
    assert all(chain.fsdp == (chain.dp > 1) for chain in plan.chains)
    with time_limit(LIMIT_S), _engine(model, batch, plan) as engine:
        metrics = [engine.step(step) for step in steps]
        got = engine.state_dict()
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    norm = sum(float(gradient.square().sum()) for gradient in wanted.first_gradients.values()) ** 0.5
    assert metrics[0].grad_norm == pytest.approx(norm, rel=1e-7)
    assert_same_parameters(got, wanted.parameters, PARAMETER_TOLERANCE)


SHARED = Case(encoder=2, recompute="full")


def test_state_is_halved_and_what_cannot_go_in_lockstep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, wanted = steps_of(SHARED.family), in_one_process(SHARED.family, SHARED.freeze)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    optimizer = functools.partial(ReportingAdamW, lr=1e-3)
    model, batch = model_of(SHARED.family, SHARED.freeze), collate(steps[0][:2])
    plan = _planned(SHARED, model, batch, fsdp=["vision_tower", "language_model"])
    with time_limit(LIMIT_S), _engine(model, batch, plan, optimizer=optimizer) as engine:
        metrics = [engine.step(steps[0])]
        with pytest.raises(
            BatchError, match="microbatch 0, replica 0 has sample 0, and replica 1 has none; give every"
        ):
            engine.step(steps[0][:1])
        mute = {**steps[0][1], "labels": torch.full_like(steps[0][1]["labels"], IGNORED_LABEL)}
        with pytest.raises(BatchError, match="replica 1 with sample 1 has no token to learn from, and replica 0 has"):
            engine.step([steps[0][0], mute])
        metrics += [engine.step(step) for step in steps[1:]]
        assert_same_parameters(engine.state_dict(), wanted.parameters, PARAMETER_TOLERANCE)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    half, whole = (_moments(model, part) for part in (2, 1))
    assert reported(tmp_path)[-2:] == [half, half]
    assert half < 0.51 * whole


def _moments(model: nn.Module, share: int) -> int:
    """Bytes of both moments of the language model, of which a rank has one of `share` parts of every matrix."""
    own = [p for name, p in model.named_parameters() if "vision" not in name and "projector" not in name]
    return sum(2 * p.nbytes // (share if p.ndim > 1 else 1) for p in own)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_compute_what_they_do_with_whole_parameters() -> None:
    """Inductor rounds float32 norms otherwise than eager code does, so what is compared is compiled too."""
    case, steps = Case(recompute="full"), steps_of("llava")
    losses: list[list[float]] = []
    weights: list[dict[str, Tensor]] = []
    for fsdp in (True, False):
        model, batch = model_of("llava", case.freeze), collate(steps[0][:2])
        plan = _planned(case, model, batch, fsdp=fsdp)
        with time_limit(LIMIT_S), _engine(model, batch, plan, compile=True) as engine:
            losses.append([engine.step(step).loss for step in steps])
            weights.append(engine.state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=0)
    assert_same_parameters(weights[0], weights[1], PARAMETER_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["shared", "whole"])
def test_a_checkpoint_goes_on_under_another_plan(first: str, tmp_path: Path) -> None:
    """Two steps under one plan, the third under another."""
    steps, wanted = steps_of(SHARED.family), in_one_process(SHARED.family, SHARED.freeze)
    model, batch = model_of(SHARED.family, SHARED.freeze), collate(steps[0][:2])
    alone = Case(language_model=1)
    ways = [_planned(SHARED, model, batch, fsdp=True), _planned(alone, model, batch)]
    before, after = ways if first == "shared" else ways[::-1]
    with time_limit(LIMIT_S), _engine(model, batch, before) as engine:
        for step in steps[:2]:
            engine.step(step)
        engine.save(tmp_path / "saved")
    model = model_of(SHARED.family, SHARED.freeze)
    with time_limit(LIMIT_S), _engine(model, batch, after) as engine:
        engine.load(tmp_path / "saved")
        assert engine.step(steps[2]).loss == pytest.approx(wanted.losses[2], rel=TOLERANCE, abs=0)
        assert_same_parameters(engine.state_dict(), wanted.parameters, PARAMETER_TOLERANCE)


def test_options_without_effect_are_refused() -> None:
    model, batch = model_of("llava", Freeze.NONE), collate(steps_of("llava")[0][:2])
    captured, completed_batch = captured_step(model, batch), completed(model, batch)

    def planned(replicas: int, fsdp: bool | Sequence[str], **options: Any) -> Plan:
        request = PlanRequest(
            num_microbatches=1,
            projector="with_encoder",
            replicas={"language_model": replicas, "vision_tower": 1},
            fsdp=fsdp,
            **options,
        )
        inputs = PlanInputs.read(cluster=request.cluster)
        return make_plan(captured, completed_batch, request, inputs, fingerprint_of(captured.graph))

    plan = planned(2, True)
    assert {chain.name: chain.fsdp for chain in plan.chains} == {"vision_tower": False, "language_model": True}
    whole = planned(2, False).chains[-1].stages[0].prediction
    spread = plan.chains[-1].stages[0].prediction
    assert spread.parameter_bytes == whole.parameter_bytes // 2
    with pytest.raises(ConfigError, match="fsdp=True has no effect together with a plan"):
        mm.parallelize(model, batch, plan, fsdp=True, allow_unused=True)
    with pytest.raises(
        ConfigError, match="reduction='fixed' rounds sums over replicas once, and replicas of language_model"
    ):
        Engine(Placement.of(plan), Patterns(model, plan, captured, batch), reduction="fixed")
    with pytest.raises(
        PlanError, match="no component 'llm' whose replicas could share parameters; they are .*language_model"
    ):
        planned(2, ["llm"])
    with pytest.raises(ConfigError, match="fsdp of vision_tower has no effect: vision_tower has 1 replica"):
        planned(2, ["vision_tower"])
    with pytest.raises(ConfigError, match="fsdp has no effect: every chain has 1 replica"):
        planned(1, True)
    with pytest.raises(ConfigError, match="fsdp=True has no effect with a global batch"):
        planned(2, True, global_batch=8)
