"""Ranks that share tokens: each its part of all layers but the first, and exchanges by the heads of the model."""

from __future__ import annotations

import pytest
import torch
from support.graphs.bitfield_graph import with_words
from support.models.tiny_language import TinyLanguage, tiny_batch
from support.plans.toy_plan import cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import ring_s
from mmcompile.costmodel.compute import seconds
from mmcompile.ir.capture import capture
from mmcompile.ir.graph import ComponentKind, info
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.values import op_name
from mmcompile.planner.pricing.shared_tokens import SharedTokens

GRAPH = toy_graph(
    {"vision": (ComponentKind.ENCODER, 2), "language_model": (ComponentKind.LANGUAGE_MODEL, 4)},
    [("vision", "language_model")],
)
COSTS = {"vision": (frozen(1.0),) * 2, "language_model": (cost(2.0),) * 4}


def test_a_rank_does_its_share_of_all_layers_but_the_first() -> None:
    shared = SharedTokens(graph=GRAPH, num_ranks=4, cluster=Cluster.parse("1x8xH100"), dtype="bfloat16")
    costs = shared.costs(COSTS)
    assert costs["vision"] == COSTS["vision"]
    assert costs["language_model"][0] == COSTS["language_model"][0]
    whole, share = COSTS["language_model"][1], costs["language_model"][1]
    assert share.forward_flops == whole.forward_flops // 4
    assert share.activation_bytes == whole.activation_bytes // 4
    assert share.parameter_bytes == whole.parameter_bytes
    assert share.trainable_bytes == whole.trainable_bytes


def test_exchanges_are_those_of_the_attention_in_the_graph() -> None:
    torch.manual_seed(0)
    graph = with_words(capture(TinyLanguage(lambda _, x: x.relu(), num_blocks=2), tiny_batch()).graph)
    pass_ = Cost()
    table = Pipeline(passes=(GradientFlow(), pass_)).run(graph).of(pass_)
    cluster = Cluster.parse("1x8xL4")
    shared = SharedTokens(graph=graph, num_ranks=2, cluster=cluster, dtype="float32")
    share = shared.costs({"language_model": table["language_model"]})["language_model"]
    calls = [node for node in graph.module.graph.nodes if op_name(node) == "mmcompile.bitfield_attention"]
    assert len(calls) == 2
    for node in calls:
        if (layer := info(node).layer) == 0:
            continue
        key = node.args[1].meta["val"]
        steps = key.shape[1] // shared.head_stride
        gather_s = ring_s(2 * key.numel() * key.element_size(), 2, cluster.intra)
        return_s = ring_s(2 * key.numel() * 4, 2, cluster.intra)
        back = info(node).input_grad_flops + info(node).weight_grad_flops
        for got_s, exchange_s, flops in (
            (share[layer].forward_exchange_s, gather_s, info(node).forward_flops),
            (share[layer].backward_exchange_s, gather_s + return_s, back),
        ):
            attention_s = seconds(flops // 2, 0, 0, cluster.device, "float32")
            assert got_s == pytest.approx(exchange_s / steps + (1 - 1 / steps) * max(0.0, exchange_s - attention_s))
            assert got_s > 0
