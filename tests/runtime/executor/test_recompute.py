"""Stages that compute activations again: the same gradients to the bit, and the memory that the model predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import pytest
import torch
from support.graphs.split import SplitRun, captured, even_plan, root_values, run_split, with_present_flags
from support.models.freezing import freeze
from support.oracles.eager import difference
from support.oracles.kept_bytes import kept_bytes
from support.oracles.one_process import ADAMW, train
from support.oracles.stage_memory import recomputed_layers, stage_activation_bytes
from support.oracles.stage_oracle import in_order
from support.plans.with_recompute import with_recompute
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import ALL, samples
from zoo.family import Family, Size
from zoo.parts import text_config

import mmcompile as mm
from mmcompile.captured_model import fingerprint_of
from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import PlanRequest, Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.data.collate import collate
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Stage
from mmcompile.planning import PlanInputs, make_plan

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
"""Dynamo looks at inputs of compiled layers, and hides what torch says to that unless warnings are errors."""
AGAIN: tuple[Recompute, ...] = ("selective", "full")
PLANS: tuple[Recompute | Literal["mixed"], ...] = (*AGAIN, "mixed")
STAGES = {"language_model": 3, "vision_tower": 2, "audio_tower": 2, "visual": 2}
FROZEN_TOWER = {"encoder": False, "projector": True, "language_model": True, "adapter": True}
EVERYTHING = dict.fromkeys(FROZEN_TOWER, True)
LONG = Size(samples=4, length=200, media=2)
"""Activations that are larger than the parameters of the test models."""
TRAINED = {
    "all": EVERYTHING,
    "tower frozen": FROZEN_TOWER,
    "projector": {**dict.fromkeys(FROZEN_TOWER, False), "projector": True},
    "tower and projector": {**EVERYTHING, "language_model": False, "adapter": False},
    "language model": {**dict.fromkeys(FROZEN_TOWER, False), "language_model": True},
}


def planned(graph: ModelGraph, recompute: Recompute | Literal["mixed"]) -> Plan:
    """One mode for all layers, or the three in turns."""
    plan = with_recompute(even_plan(graph, STAGES), "full" if recompute == "mixed" else recompute)
    if recompute != "mixed":
        return plan
    turns: Iterator[Recompute] = cycle(("full", "none", "selective"))
    chains = tuple(
        replace(chain, stages=tuple(replace(stage, recompute=_dealt(stage, turns)) for stage in chain.stages))
        for chain in plan.chains
    )
    found = replace(plan, chains=chains)
    assert found.recompute == "mixed"
    return found


def _dealt(stage: Stage, turns: Iterator[Recompute]) -> tuple[Recompute | None, ...]:
    return tuple(None if own is None else next(turns) for own in stage.recompute)


def run(
    model: nn.Module,
    found: Capture,
    batch: Mapping[str, Any],
    recompute: Recompute | Literal["mixed"],
    backend: str = "",
) -> SplitRun:
    """A forward and backward of all stages, in float64 if the model is."""
    plan = planned(found.graph, recompute)
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
    for recompute in PLANS:
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
    programs = lower(found, with_recompute(even_plan(found.graph, STAGES), "full")).programs
    sources = {name: program.source for name, program in programs.items()}
    assert all("self.recompute(" not in source for name, source in sources.items() if name.startswith("vision_tower"))
    assert sources["language_model.1"].count('self.recompute(\n            "full"') == 2
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stage, values = load_stage(programs["vision_tower.0"], tensors), root_values(found, batch)
    given = [values[port.name] for port in programs["vision_tower.0"].inputs]
    assert kept_bytes(stage, given, tensors.values()) == 0


def kept_by_stages(model: nn.Module, found: Capture, batch: Mapping[str, Any], plan: Plan) -> dict[str, int]:
    """Bytes that each stage keeps for the backward of one microbatch, measured."""
    roots = root_values(found, batch)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    programs, made, kept = lower(found, plan).programs, dict[str, Tensor](), dict[str, int]()
    for name in in_order(programs):
        stage, ports = load_stage(programs[name], tensors), programs[name].inputs
        given = [made[p.name].detach().requires_grad_(p.gradient) if p.kind == "link" else roots[p.name] for p in ports]
        made |= {p.name: value for p, value in zip(programs[name].outputs, stage(*given), strict=True)}
        kept[name] = kept_bytes(stage, given, tensors.values())
        assert (kept[name] > 0) == programs[name].has_backward, name
    return kept


def costs_of(table: CostTable, stage: Stage) -> list[LayerCost]:
    """Of its layers, as they are run."""
    costs = [table[own.component][layer] for own in stage.segments for layer in range(own.first, own.last)]
    return recomputed_layers(costs, stage.recompute)


def _memory_of(family: Family, batch: Mapping[str, Any], trained: Mapping[str, bool] = EVERYTHING) -> None:
    """Assert that every stage keeps what the memory model says, to 10 %, and nothing where nothing below trains."""
    model = family.build()
    freeze(model, dict(trained))
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    table, batch = Cost().run(found.graph), completed(model, batch)
    for recompute in ("none", *PLANS):
        plan = planned(found.graph, recompute)
        for name, kept in kept_by_stages(model, found, batch, plan).items():
            predicted = stage_activation_bytes(costs_of(table, plan.stage(name)))
            assert kept == pytest.approx(predicted, rel=0.1, abs=0), (recompute, name)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_audio", marks=pytest.mark.slow)])
def test_stages_keep_what_the_memory_model_predicts(name: str) -> None:
    _memory_of(ALL[name], ALL[name].batch())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "mllama", "qwen2_audio", "llama4"])
def test_longer_sequences_too(name: str, trained: dict[str, bool]) -> None:
    _memory_of(ALL[name], ALL[name].draw(LONG, seed=0), trained)


def crowded(plan: Plan, share: float) -> Cluster:
    """Devices with so much of the memory that the fullest stage of a plan needs."""
    needed = max(stage.prediction.total_bytes for stage in plan.stages)
    return replace(plan.cluster, device=replace(plan.cluster.device, memory_bytes=round(share * needed)))


def test_a_plan_recomputes_what_its_memory_needs_and_its_stages_do_that() -> None:
    model = ALL["llava"].build(torch.float64)
    batch = completed(model, ALL["llava"].draw(LONG, seed=0, dtype=torch.float64))
    freeze(model, FROZEN_TOWER)
    found = with_present_flags(model, capture(model, batch))

    def planned_on(cluster: Cluster) -> Plan:
        stages = {"language_model": 2, "vision_tower": 1}
        request = PlanRequest(stages=stages, recompute="auto")
        return make_plan(found, batch, request, PlanInputs(cluster=cluster), fingerprint_of(found.graph))

    ample = planned_on(Cluster.parse("1x4xH100"))
    assert ample.recompute == "none", "nothing where everything fits"
    plan = planned_on(crowded(ample, 0.5))
    limit = plan.cluster.device.memory_bytes
    assert plan.recompute == "mixed" and all(stage.prediction.total_bytes <= limit for stage in plan.stages)
    assert "vision_tower" not in {component for component, _ in plan.modes}, "nothing below trains"
    assert any(note.startswith("recompute by layer, as the memory needs; ") for note in plan.notes)
    programs, values = lower(found, plan), root_values(found, batch)
    again = [mode for mode in plan.modes.values() if mode != "none"]
    assert sum(program.source.count("self.recompute(") for program in programs.programs.values()) == len(again) > 0
    got = run_split(model, programs, values, load_stage).outcome
    wanted = run_split(model, lower(found, with_recompute(plan, "none")), values, load_stage).outcome
    assert difference(got, wanted).identical
    # What the plan itself says, of all microbatches in flight.
    table = Cost().run(found.graph)
    for name, kept in kept_by_stages(model, found, batch, plan).items():
        stage = plan.stage(name)
        working = max(cost.working_bytes for cost in costs_of(table, stage)) if stage.has_backward else 0
        assert stage.prediction.activation_bytes == pytest.approx(
            stage.prediction.in_flight * kept + working, rel=0.1, abs=0
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [*AGAIN, "auto"])
def test_processes_train_as_one_process_does(recompute: Recompute | Literal["auto"]) -> None:
    steps = [samples(ALL["llava"], 8, dtype=torch.float64, seed=seed) for seed in (1, 3)]
    wanted = train(ALL["llava"].build(torch.float64), steps, num_microbatches=4)
    model, batch = ALL["llava"].build(torch.float64), collate(steps[0][:2])
    options = {"num_microbatches": 4, "stages": {"language_model": 2, "vision_tower": 1}}
    plan = mm.plan(model, batch, cluster="1x4xH100", recompute="none" if recompute == "auto" else recompute, **options)
    if recompute == "auto":
        plan = mm.plan(model, batch, cluster=crowded(plan, 0.95), recompute="auto", **options)
        assert plan.recompute != "none"
    with mm.parallelize(model, batch, plan, allow_unused=True, optimizer=ADAMW) as engine:
        losses = [engine.step(step).loss for step in steps]
        got = engine.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=1e-9, abs=0)
    assert max(float((got[name] - value).abs().max()) for name, value in wanted.parameters.items()) < 1e-9
