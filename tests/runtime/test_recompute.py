"""Stages that compute activations again: the same gradients to the bit, and the memory that the model predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from freezing import freeze
from kept_bytes import kept_bytes
from lower.split import SplitRun, captured, even_plan, root_values, run_split, with_present_flags
from oracles.eager import difference
from oracles.one_process import ADAMW, train
from stage_oracle import in_order
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import ALL, samples
from zoo.family import Family, Size
from zoo.parts import text_config

import mmcompile as mm
from mmcompile.costmodel.compute import Recompute
from mmcompile.costmodel.memory import recomputed, stage_activation_bytes
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.inputs import completed
from mmcompile.lower.compiled import load_compiled_stage
from mmcompile.lower.load import load_stage
from mmcompile.lower.stages import lower
from mmcompile.passes.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.step.collate import collate

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""Dynamo looks at inputs of compiled layers, and hides what torch says to that unless warnings are errors."""
AGAIN: tuple[Recompute, ...] = ("selective", "full")
STAGES = {"language_model": 3, "vision_tower": 2, "audio_tower": 2, "visual": 2}
FROZEN_TOWER = {"encoder": False, "projector": True, "language_model": True, "adapter": True}


def run(
    model: nn.Module, found: Capture, batch: Mapping[str, Any], recompute: Recompute, backend: str = ""
) -> SplitRun:
    """A forward and backward of all stages, in float64 if the model is."""
    plan = replace(even_plan(found.graph, STAGES), recompute=recompute)
    load = partial(load_compiled_stage, backend=backend) if backend else load_stage
    torch.manual_seed(7)
    return run_split(model, lower(found, plan), root_values(found, batch), load)


@pytest.mark.parametrize("trained", [{}, FROZEN_TOWER], ids=["all", "tower frozen"])
@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_gradients_have_the_same_bits(name: str, trained: dict[str, bool]) -> None:
    model, batch, found = captured(name)
    freeze(model, {**dict.fromkeys(FROZEN_TOWER, True), **trained})
    found = with_present_flags(model, found)
    wanted = run(model, found, batch, "none").outcome
    assert len(wanted.gradients) > 10
    for recompute in AGAIN:
        assert difference(run(model, found, batch, recompute).outcome, wanted).identical


def test_random_numbers_are_the_same_the_second_time() -> None:
    """With dropout; compiled code draws what uncompiled code draws if it runs op by op."""
    torch.manual_seed(0)
    config = text_config(attention_dropout=0.3, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).double().train()
    ids = torch.randint(config.vocab_size, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    found = with_present_flags(model, capture(model, batch))
    batch = completed(model, batch)
    wanted = run(model, found, batch, "none").outcome
    torch.rand(1)
    for recompute in AGAIN:
        assert difference(run(model, found, batch, recompute).outcome, wanted).identical
        compiled = run(model, found, batch, recompute, backend="aot_eager").outcome
        assert (apart := difference(compiled, wanted)).within(1e-9), str(apart)


@pytest.mark.parametrize("recompute", AGAIN)
def test_compiled_stages_compute_again_too(recompute: Recompute) -> None:
    model, batch, found = captured("llava")
    found = with_present_flags(model.requires_grad_(True), found)
    wanted = run(model, found, batch, "none").outcome
    compiled = run(model, found, batch, recompute, backend="aot_eager").outcome
    assert (apart := difference(compiled, wanted)).within(1e-9), str(apart)


def test_frozen_layers_with_nothing_trainable_below_run_once_and_keep_nothing() -> None:
    model, batch, found = captured("llava")
    freeze(model, FROZEN_TOWER)
    found = with_present_flags(model, found)
    programs = lower(found, replace(even_plan(found.graph, STAGES), recompute="full")).programs
    sources = {name: program.source for name, program in programs.items()}
    assert all("self.recompute(" not in source for name, source in sources.items() if name.startswith("vision_tower"))
    assert sources["language_model.1"].count('self.recompute(\n            "full"') == 2
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stage, values = load_stage(programs["vision_tower.0"], tensors), root_values(found, batch)
    given = [values[port.name] for port in programs["vision_tower.0"].inputs]
    assert kept_bytes(stage, given, tensors.values()) == 0


def _memory_of(family: Family, batch: Mapping[str, Any]) -> None:
    """Assert that every stage keeps what the memory model says, to 10 %."""
    model = family.build().requires_grad_(True)
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    table, roots = Cost().run(found.graph), root_values(found, completed(model, batch))
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for recompute in ("none", *AGAIN):
        plan = replace(even_plan(found.graph, STAGES), recompute=recompute)
        programs, made = lower(found, plan).programs, dict[str, Tensor]()
        for name in in_order(programs):
            stage, ports = load_stage(programs[name], tensors), programs[name].inputs
            given = [
                made[p.name].detach().requires_grad_(p.gradient) if p.kind == "link" else roots[p.name] for p in ports
            ]
            made |= {p.name: value for p, value in zip(programs[name].outputs, stage(*given), strict=True)}
            costs = [table[s.component][at] for s in plan.stage(name).segments for at in range(s.first, s.last)]
            predicted = stage_activation_bytes([recomputed(cost, recompute) for cost in costs])
            kept = kept_bytes(stage, given, tensors.values())
            assert kept == pytest.approx(predicted, rel=0.1), (recompute, name)
            assert kept > 0


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_audio", marks=pytest.mark.slow)])
def test_stages_keep_what_the_memory_model_predicts(name: str) -> None:
    _memory_of(ALL[name], ALL[name].batch())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "mllama"])
def test_longer_sequences_too(name: str) -> None:
    _memory_of(ALL[name], ALL[name].draw(Size(samples=4, length=200, media=2), seed=0))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", AGAIN)
def test_processes_train_as_one_process_does(recompute: Recompute) -> None:
    steps = [samples(ALL["llava"], 8, dtype=torch.float64, seed=seed) for seed in (1, 3)]
    wanted = train(ALL["llava"].build(torch.float64), steps, num_microbatches=4)
    model, batch = ALL["llava"].build(torch.float64), collate(steps[0][:2])
    plan = replace(mm.plan(model, batch, num_microbatches=4, stages={"language_model": 2}), recompute=recompute)
    with mm.parallelize(model, batch, plan, optimizer=ADAMW) as engine:
        losses = [engine.step(step).loss for step in steps]
        got = engine.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=1e-9, abs=0)
    assert max(float((got[name] - value).abs().max()) for name, value in wanted.parameters.items()) < 1e-9
