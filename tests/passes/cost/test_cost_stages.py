"""Backward costs and memory per stage equal what torch counts on the stages of a plan, for every freeze pattern."""

from __future__ import annotations

from functools import cache

import pytest
from support.graphs.hand_graph import with_flags
from support.models.freezing import PATTERNS, add_adapter, freeze
from support.oracles.stage_memory import stage_activation_bytes
from support.oracles.stage_oracle import LoweredStages, lowered
from torch import nn
from zoo import FAMILIES

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ComponentKind
from mmcompile.ir.inputs import completed
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.planner.plan.plan_record import Stage

NAMES = ["llava", "qwen2_5_vl", "qwen2_audio"]


@cache
def stages_of(name: str) -> tuple[nn.Module, Capture, LoweredStages]:
    """A family with an adapter, its tower in two stages, its language model in three."""
    family = FAMILIES[name]
    model, batch = family.build(), family.batch()
    add_adapter(model)
    model.requires_grad_(True)
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    numbers = {
        component.name: 3 if component.kind == ComponentKind.LANGUAGE_MODEL else 2
        for component in found.graph.components
        if len(component.layers) > 2
    }
    return model, found, lowered(found, model, completed(model, batch), numbers)


def costs_of(table: CostTable, stage: Stage) -> list[LayerCost]:
    return [table[s.component][layer] for s in stage.segments for layer in range(s.first, s.last)]


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_flops_and_saved_bytes_of_every_stage_equal_torchs_for_every_freeze_pattern(name: str) -> None:
    model, found, stages = stages_of(name)
    assert len(stages.plan.stages) >= 5
    for pattern in PATTERNS:
        freeze(model, pattern)
        graph = with_flags(found.graph, model)
        GradientFlow().run(graph)
        table, runs = Cost().run(graph), stages.run()
        for stage in stages.plan.stages:
            costs, run = costs_of(table, stage), runs[stage.name]
            backward = sum(cost.input_grad_flops + cost.weight_grad_flops for cost in costs)
            predicted = (sum(cost.forward_flops for cost in costs), backward)
            assert predicted == (run.forward_flops, run.backward_flops), (pattern, stage.name)
            assert stage_activation_bytes(costs) == pytest.approx(run.saved_bytes, rel=0.05), (pattern, stage.name)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_tower_with_nothing_trainable_below_keeps_nothing(name: str) -> None:
    model, found, stages = stages_of(name)
    freeze(model, {"encoder": False, "projector": False, "language_model": False, "adapter": True})
    graph = with_flags(found.graph, model)
    GradientFlow().run(graph)
    table = Cost().run(graph)
    for component in graph.components:
        if component.kind != ComponentKind.LANGUAGE_MODEL:
            costs = table[component.name]
            assert sum(cost.forward_flops for cost in costs) > 0
            assert {(cost.activation_bytes, cost.selective_bytes, cost.full_bytes) for cost in costs} == {(0, 0, 0)}
            assert stage_activation_bytes(costs) == 0
    assert all(run.saved_bytes == 0 for stage, run in stages.run().items() if "language_model" not in stage)
