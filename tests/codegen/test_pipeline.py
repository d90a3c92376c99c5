"""`with_stage_passes`: a graph that will train is checked where ranks share tensors, once for every kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.graphs.split import even_plan
from support.models.tensor_blocks import Block, Ways, batch, gated
from torch import Tensor
from zoo import ALL

import mmcompile as mm
from mmcompile.captured_model import captured_step
from mmcompile.codegen.pipeline import passes_for, with_stage_passes
from mmcompile.errors import PlanError
from mmcompile.ir.compat import FakeTensorMode
from mmcompile.ir.inputs import completed
from mmcompile.passes.catalog import OWN, STAGES
from mmcompile.passes.modality_dag import ModalityDag
from mmcompile.planner.plan.plan import Plan


def shared(plan: Plan, tp: int, cp: int = 1) -> Plan:
    """The tensors of all chains over `tp` ranks, the tokens of the last over `cp`."""
    *others, last = (replace(chain, tp=tp) for chain in plan.chains)
    return replace(plan, chains=(*others, replace(last, cp=cp)))


AXES = [
    pytest.param(1, {"autocast": ("language_model", "vision_tower")}, marks=pytest.mark.slow),
    pytest.param(1, {"attention": "bitfield"}, marks=pytest.mark.slow),
    (2, {"attention": "bitfield"}),
]


@pytest.mark.parametrize(("cp", "axes"), AXES, ids=str)
def test_layers_are_checked_as_the_plan_computes_them(cp: int, axes: dict[str, object]) -> None:
    """In half precision, under words, and as one of several ranks that share tokens."""
    model = ALL["llava"].build(torch.float32)
    given = completed(model, ALL["llava"].batch(torch.float32))
    found = captured_step(model, given)
    plan = replace(shared(even_plan(found.graph, {}), 2, cp), **axes)  # type: ignore[arg-type]
    validated: set[str] = set()
    graph = with_stage_passes(found, plan, given, validated=validated).graph
    assert not [line for line in graph.rewrites if "not checked" in line]
    assert {kind.split(".")[0] for kind in validated} == {"encoder", "projector", "language_model"}
    before = set(validated)
    with_stage_passes(found, plan, given, validated=validated)
    assert validated == before


def noisy(block: Block, x: Tensor) -> Tensor:
    up = block.up(x)
    return block.down(up * torch.rand_like(up))


def test_what_was_not_checked_is_told() -> None:
    model = Ways({"noisy": noisy})
    found = captured_step(model, batch())
    plan = shared(even_plan(found.graph, {}), 2)
    with pytest.warns(UserWarning, match="tensor-parallel: layer 1 of language_model .* not checked: rand_like = "):
        graph = with_stage_passes(found, plan, batch()).graph
    assert "not checked" in graph.rewrites[-1]


class Moved(Ways):
    """Looks up ids that nothing shows to be those of an input."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids * 1, labels)


def test_later_captures_shard_parameters_as_the_first_does() -> None:
    first, later = (captured_step(made({"gated": gated}), batch()) for made in (Ways, Moved))
    plan = shared(even_plan(first.graph, {}), 2)
    shards = with_stage_passes(first, plan).graph.shards
    assert "embed.weight" in shards and "embed.weight" not in with_stage_passes(later, plan).graph.shards
    assert with_stage_passes(later, plan, shards=shards).graph.shards == shards
    whole = {name: shard for name, shard in shards.items() if name != "head.weight"}
    with pytest.raises(PlanError, match=r"head\.weight whole, this one sharded over 2 ranks in dim 0"):
        with_stage_passes(later, plan, shards=whole)


def test_plans_and_sources_are_made_without_weights() -> None:
    """Nothing is checked, and nothing told, where nothing will train."""
    with FakeTensorMode():
        model = Ways({"noisy": noisy})
    plan = mm.plan(model, batch(), tensor_parallel=2, cluster="1x2xH100")
    assert any("tp_sum" in program.source for program in mm.stage_programs(model, batch(), plan).values())


def test_passes_come_in_the_order_of_the_table() -> None:
    model = ALL["llava"].build(torch.float32)
    found = captured_step(model, ALL["llava"].batch(torch.float32))
    plan = shared(even_plan(found.graph, {}), 2, 2)
    plan = replace(plan, autocast=("language_model",), attention="bitfield")
    plan = replace(plan, chains=tuple(replace(chain, fsdp=True, dp=2) for chain in plan.chains))
    names = [own.name for own in passes_for(plan, found.graph, own=(ModalityDag(),))]
    order = [own.name for own in STAGES]
    assert names == [
        "autocast",
        "bitfield-attention",
        "modality-dag",
        "context-parallel",
        "tensor-parallel",
        "sharded-parameters",
    ]
    places = [order.index(OWN if name == "modality-dag" else name) for name in names]
    assert places == sorted(places)
