"""Recomputation trades memory for time as torch's checkpoints do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from support.graphs.hand_graph import PARTS, with_flags
from support.models.freezing import freeze
from support.oracles.checkpoint_oracle import checkpointed_bytes
from support.oracles.stage_memory import stage_activation_bytes
from support.oracles.stage_oracle import LoweredStages, lowered
from torch import nn
from zoo import FAMILIES

from mmcompile.config import Recompute
from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.memory import recomputed
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ComponentKind
from mmcompile.ir.inputs import completed
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow

COST = LayerCost(
    forward_flops=100,
    input_grad_flops=80,
    weight_grad_flops=90,
    forward_bytes=50,
    backward_bytes=70,
    kernels=5,
    backward_kernels=8,
    activation_bytes=1000,
    parameter_bytes=300,
    trainable_bytes=300,
    output_bytes=10,
    selective_bytes=400,
    full_bytes=60,
    attention_flops=20,
    attention_backward_flops=50,
    shared_bytes=7,
    kept_forward_bytes=30,
    kept_kernels=2,
)


def test_without_recomputation_nothing_changes() -> None:
    assert recomputed(COST, "none") == COST


def test_full_recomputation_runs_the_forward_again() -> None:
    assert recomputed(COST, "full") == replace(
        COST,
        input_grad_flops=180,
        attention_backward_flops=70,
        backward_bytes=120,
        backward_kernels=13,
        activation_bytes=60,
        working_bytes=1000,
    )


def test_selective_recomputation_repeats_neither_products_nor_attention() -> None:
    assert recomputed(COST, "selective") == replace(
        COST, backward_bytes=90, backward_kernels=11, activation_bytes=400, working_bytes=1000
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_without_backward_is_never_run_again(recompute: Recompute) -> None:
    frozen = replace(COST, input_grad_flops=0, weight_grad_flops=0, backward_bytes=0, activation_bytes=0)
    assert recomputed(frozen, recompute) == frozen


def test_a_stage_holds_a_copy_of_what_its_first_layer_shares_with_earlier_ones() -> None:
    assert stage_activation_bytes([COST, COST]) == 2007
    assert stage_activation_bytes([]) == 0


@cache
def stages_of(name: str) -> tuple[nn.Module, Capture, LoweredStages]:
    """A family, its tower in two stages, its language model in three."""
    family = FAMILIES[name]
    model, batch = family.build(), family.batch()
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    numbers = {
        component.name: 3 if component.kind == ComponentKind.LANGUAGE_MODEL else 2
        for component in found.graph.components
        if len(component.layers) > 2
    }
    return model, found, lowered(found, model, completed(model, batch), numbers)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_memory_of_every_stage_equals_torchs_checkpoints(name: str, recompute: Recompute) -> None:
    model, found, stages = stages_of(name)
    for bits in [(True, True, True), (False, True, False), (False, True, True), (True, False, False)]:
        freeze(model, dict(zip(PARTS, bits, strict=False)))
        graph = with_flags(found.graph, model)
        GradientFlow().run(graph)
        table = Cost().run(graph)
        kept = checkpointed_bytes(graph, stages.plan, stages.roots, stages.permanent, recompute)
        for stage in stages.plan.stages:
            costs = [table[s.component][layer] for s in stage.segments for layer in range(s.first, s.last)]
            predicted = stage_activation_bytes([recomputed(cost, recompute) for cost in costs])
            assert predicted == pytest.approx(kept[stage.name], rel=0.1), (bits, stage.name)
