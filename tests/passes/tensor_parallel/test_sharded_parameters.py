"""The pass sharded-parameters: what is shared, what stays whole, and where it is gathered."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import cast

import pytest
import torch
from support.graphs.hand_graph import with_flags
from support.graphs.split import captured
from support.models.freezing import freeze
from support.models.tensor_blocks import SHARDED, Ways, batch
from torch import fx

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.sharded_parameters import ShardedParameters
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.text import graph_text
from mmcompile.passes.values import op_name

LLAVA = {"vision_tower": 2, "multi_modal_projector": 2, "language_model": 2}


def sharded(graph: ModelGraph, **degrees: int) -> ModelGraph:
    """The graph after the pass, verified."""
    pass_ = ShardedParameters(degrees=tuple(degrees.items()))
    return Pipeline(passes=(GradientFlow(), pass_, GradientFlow())).run(graph).graph


def gathers(graph: ModelGraph) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if op_name(node) == "mmcompile.gather_parameter"]


def gathered(node: fx.Node) -> str:
    return str(node.all_input_nodes[0].target)


@pytest.fixture(scope="module")
def llava() -> Capture:
    return captured("llava")[2]


def test_matrices_are_shared_by_rows_and_vectors_stay_whole(llava: Capture) -> None:
    graph = sharded(llava.graph, **LLAVA)
    used = {str(node.target) for node in llava.graph.module.graph.nodes if node.op == "get_attr"}
    matrices = {spec.name: spec.shape for spec in graph.parameters if len(spec.shape) >= 2 and spec.name in used}
    odd = {name for name, shape in matrices.items() if shape[0] % 2}
    assert graph.shards.keys() == matrices.keys() - odd
    assert odd == {"model.vision_tower.embeddings.position_embedding.weight"}
    for name, shard in graph.shards.items():
        assert (shard.dim, shard.blocks, shard.count) == (0, matrices[name][:1], 2)
    assert len(graph.rewrites) == 3
    assert all("whole: " in line and "vectors" in line for line in graph.rewrites)


def test_every_reader_in_a_layer_reads_one_gathered_parameter(llava: Capture) -> None:
    graph = sharded(llava.graph, **LLAVA)
    places = Counter((gathered(node), info(node).component, info(node).layer) for node in gathers(graph))
    assert set(places.values()) == {1}
    for node in gathers(graph):
        source = node.all_input_nodes[0]
        shard = graph.shards[gathered(node)]
        assert source.meta["val"].shape[0] * 2 == node.meta["val"].shape[0] == shard.size
        assert [op_name(user) for user in source.users if user.op == "call_function"] == [
            "mmcompile.gather_parameter"
        ] * len(source.users)
        for reader in node.users:
            assert (info(reader).component, info(reader).layer) == (info(node).component, info(node).layer)
        # Right before its first reader, so that nothing else of the layer waits for it.
        assert node.next in node.users


def test_gradient_flows_through_what_trains() -> None:
    model, _, found = captured("llava")
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    freeze(model, {"encoder": False, "projector": True, "language_model": True, "adapter": True})
    graph = sharded(with_flags(found.graph, model), **LLAVA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags[name])
    for node in gathers(graph):
        assert info(node).carries_gradient == ("vision_tower" not in gathered(node)), gathered(node)
    assert any("vision_tower" in gathered(node) for node in gathers(graph))


@pytest.fixture(scope="module")
def tied() -> ModelGraph:
    """A table that is also the head, and a projection in two layers."""
    torch.manual_seed(0)
    model = Ways({name: SHARDED[name] for name in ("gated", "adapted")}, tied=True).double().train()
    model.layers[1].up = model.layers[0].up
    return capture(model, batch()).graph


def test_a_tied_parameter_is_one_shard_that_each_layer_gathers(tied: ModelGraph) -> None:
    graph = sharded(tied, language_model=2)
    layers: dict[str, list[int]] = {}
    for node in gathers(graph):
        layers.setdefault(gathered(node), []).append(info(node).layer)
    assert layers["embed.weight"] == [0, 3]
    assert layers["layers.0.up.weight"] == [1, 2]
    assert "layers.1.up.weight" not in graph.shards


def test_rows_that_do_not_divide_stay_whole(tied: ModelGraph) -> None:
    used = {str(node.target) for node in tied.module.graph.nodes if node.op == "get_attr" and node.users}
    rows = {spec.name: spec.shape[0] for spec in tied.parameters if len(spec.shape) > 1 and spec.name in used}
    degree = 16
    graph = sharded(tied, language_model=degree)
    assert graph.shards.keys() == {name for name, number in rows.items() if number % degree == 0}
    assert graph.shards.keys() != rows.keys()
    assert f"whose rows do not divide by {degree}" in graph.rewrites[-1]


def test_parts_of_tensor_parallel_ranks_are_shared_again_along_the_same_dim(tied: ModelGraph) -> None:
    passes = (
        GradientFlow(),
        TensorParallel(degrees=(("language_model", 2),)),
        GradientFlow(),
        ShardedParameters(degrees=(("language_model", 2),)),
        GradientFlow(),
    )
    ranks, both = (Pipeline(passes=passes[:count]).run(tied).graph for count in (2, 5))
    assert {shard.dim for shard in ranks.shards.values()} == {0, 1}
    shapes = {spec.name: spec.shape for spec in tied.parameters}
    for node in gathers(both):
        name, shard = gathered(node), both.shards[gathered(node)]
        assert shard.replicas == 2
        # What is gathered is the part of a rank, or the whole parameter where ranks hold it whole.
        before = ranks.shards[name].local_shape(shapes[name]) if name in ranks.shards else shapes[name]
        assert node.meta["val"].shape == before
        whole = torch.arange(math.prod(shapes[name])).reshape(shapes[name])
        for rank in range(shard.count // 2):
            computes = ranks.shards[name].part(whole, rank) if name in ranks.shards else whole
            held = [shard.part(whole, shard.index(rank) + replica) for replica in range(2)]
            dim, blocks = cast("tuple[int, list[int]]", node.args[3:])
            assert torch.equal(TensorShard(dim=dim, blocks=tuple(blocks), count=2).joined(held), computes)
    # Vectors stay as the ranks hold them.
    assert {shard.replicas for name, shard in both.shards.items() if len(shapes[name]) == 1} == {1}
    assert "vectors" in both.rewrites[-1]


def test_the_same_graph_gives_the_same_text_and_is_left_alone(llava: Capture) -> None:
    GradientFlow().run(llava.graph)
    before = graph_text(llava.graph)
    texts = {graph_text(sharded(llava.graph, **LLAVA)) for _ in range(2)}
    assert len(texts) == 1
    assert graph_text(llava.graph) == before
    assert not llava.graph.shards


def test_what_makes_no_sense_is_refused(llava: Capture) -> None:
    with pytest.raises(ConfigError, match="component llm is given several numbers of replicas; give one"):
        ShardedParameters(degrees=(("llm", 2), ("llm", 4)))
    with pytest.raises(ConfigError, match="llm has 1 replicas, and parameters are shared by 2 or more: leave it out"):
        ShardedParameters(degrees=(("llm", 1),))
    with pytest.raises(ConfigError, match="no component 'llm' to shard; components are .*language_model"):
        sharded(llava.graph, llm=2)
    only_vectors = replace(
        llava.graph, parameters=tuple(spec for spec in llava.graph.parameters if len(spec.shape) < 2)
    )
    with pytest.raises(PlanError, match="no parameter can be shared, so leave out fsdp: .* whole: .* vectors"):
        ShardedParameters(degrees=(("language_model", 2),)).run(only_vectors)
