"""Bitfield attention and context parallelism through the engine train as the eager model with its own dense masks does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.oracles.one_process import ADAMW
from support.parity.layouts import PARTS, Freeze
from support.parity.three_steps import MICROBATCHES, assert_same_parameters, in_one_process, model_of, steps_of
from torch import Tensor, nn
from zoo import ALL, Batch, samples

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.plan.plan import Plan

TOLERANCE = 1e-9
PARAMETER_TOLERANCE = 1e-6
"""AdamW turns the rounding of a small gradient into a larger step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its frozen part, and how its language model is spread: over stages, and each stage's tokens over ranks."""

    family: str
    freeze: Freeze = Freeze.NONE
    stages: int = 1
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.family}-llm{self.stages}-cp{self.ranks}-freeze_{self.freeze}"


CASES = [
    pytest.param(Case(family="llava", freeze=Freeze.ENCODER, stages=2), marks=pytest.mark.slow),
    Case(family="llava", ranks=2, freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL),
    pytest.param(Case(family="gemma3", ranks=2, stages=2), marks=pytest.mark.slow),
    pytest.param(Case(family="qwen2_5_vl", ranks=4), marks=pytest.mark.slow),
    pytest.param(Case(family="gemma3"), marks=pytest.mark.slow),
    pytest.param(Case(family="qwen2_5_vl"), marks=pytest.mark.slow),
    pytest.param(Case(family="mllama"), marks=pytest.mark.slow),
    pytest.param(Case(family="mllama", ranks=2), marks=pytest.mark.slow),
    pytest.param(Case(family="llava", ranks=4, stages=2), marks=pytest.mark.slow),
    pytest.param(Case(family="qwen2_5_vl", ranks=2, freeze=Freeze.ENCODER_AND_LANGUAGE_MODEL), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_dense_masks_in_one_process(case: Case) -> None:
    steps, wanted = steps_of(case.family), in_one_process(case.family, case.freeze)
    model, batch = model_of(case.family, case.freeze), collate(steps[0][:2])
    plan = mm.plan(
        model,
        batch,
        num_microbatches=MICROBATCHES,
        stages={"language_model": case.stages, **dict.fromkeys(PARTS[case.family].encoders, 1)},
        attention="bitfield",
        context_parallel=case.ranks,
    )
    assert {len(stage.ranks) for stage in plan.chains[-1].stages} == {case.ranks}
    assert "scaled_dot_product_attention(" not in _language_model_sources(model, batch, plan) or case.family == "mllama"
    with mm.parallelize(model, batch, plan, allow_unused=True, optimizer=ADAMW) as engine:
        metrics = [engine.step(step) for step in steps]
        got = engine.state_dict()
    assert [step.num_tokens for step in metrics] == list(wanted.num_tokens)
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert_same_parameters(got, wanted.parameters, PARAMETER_TOLERANCE)


def _language_model_sources(model: nn.Module, batch: Batch, plan: Plan) -> str:
    programs = mm.stage_programs(model, batch, plan)
    return "".join(program.source for name, program in programs.items() if name.startswith("language_model"))


@pytest.mark.slow
def test_a_packed_row_trains_as_its_documents_apart() -> None:
    """Two documents end to end in one row, told apart by their positions, against the same two as samples."""
    first, second = samples(ALL["llava"], 2, seed=7, media=(1, 1), dtype=torch.float64)
    apart = [_without_mask(sample) for sample in (first, second)]
    packed = {
        name: torch.cat([sample[name] for sample in apart], dim=0 if name == "pixel_values" else 1) for name in apart[0]
    }
    packed["labels"][
        :, apart[0]["labels"].shape[1]
    ] = -100  # the last token of one does not predict the next one's first
    packed["position_ids"] = torch.cat([torch.arange(sample["input_ids"].shape[1]) for sample in apart])[None]
    runs = [_one_step(batches) for batches in ([packed], apart)]
    assert runs[0][0] == pytest.approx(runs[1][0], rel=TOLERANCE)
    assert_same_parameters(runs[0][1], runs[1][1], PARAMETER_TOLERANCE)


def _without_mask(sample: Batch) -> Batch:
    return {name: value for name, value in sample.items() if name != "attention_mask"}


def _one_step(batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    model = model_of("llava", Freeze.NONE)
    with mm.parallelize(
        model,
        batches[0],
        num_microbatches=len(batches),
        stages={"language_model": 1},
        attention="bitfield",
        allow_unused=True,
        optimizer=ADAMW,
    ) as engine:
        return engine.step(batches).loss, engine.state_dict()


def test_context_parallelism_needs_words() -> None:
    model = model_of("llava", Freeze.NONE)
    with pytest.raises(ConfigError, match="needs attention 'bitfield', got 'model'"):
        mm.plan(model, collate(steps_of("llava")[0][:2]), attention="model", context_parallel=2)


def test_a_plan_decides_the_attention() -> None:
    model, batch = model_of("llava", Freeze.NONE), collate(steps_of("llava")[0][:2])
    plan = mm.plan(model, batch, attention="bitfield")
    with pytest.raises(ConfigError, match="a plan decides these"):
        mm.parallelize(model, batch, plan, context_parallel=2)


def test_a_model_that_mixes_tokens_is_refused_with_the_layer() -> None:
    """Qwen3-VL adds image features to picked tokens in the middle of the language model."""
    model = model_of("qwen3_vl", Freeze.NONE)
    with pytest.raises(PlanError, match=r"language_model.*layer"):
        mm.plan(model, collate(steps_of("qwen3_vl")[0][:2]), context_parallel=2)
