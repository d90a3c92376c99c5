"""What tensor parallelism is priced for, against what the rewritten graph exchanges: nodes `tp_*` counted by what they carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from support.graphs.split import captured
from zoo import ALL

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.ir.capture import capture
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.tensor_axes import tensor_axes
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.values import num_bytes, op_name, tensors
from mmcompile.planner.pricing.pricing import LayerSharding, Pricing

FORWARD = ("mmcompile.tp_sum",)
BACKWARD = ("mmcompile.tp_copy", "mmcompile.tp_exit")
IN_CORE = ("llava", "qwen2_5_vl")


def counted(graph: ModelGraph, component: str) -> list[TensorShare]:
    """Exchanges of a sharded graph, layer by layer."""
    sent: dict[str, Counter[int]] = {name: Counter() for name in ("sums", "summed", "copies", "copied")}
    for node in graph.module.graph.nodes:
        if node.op != "call_function" or info(node).component != component:
            continue
        layer, name = info(node).layer, op_name(node)
        if name in FORWARD or name in BACKWARD:
            way = ("sums", "summed") if name in FORWARD else ("copies", "copied")
            sent[way[0]][layer] += 1
            sent[way[1]][layer] += num_bytes(tensors(node)[0])
        if name == "mmcompile.tp_token_loss":
            # The largest logit of each token; then sums of exponentials and the label's logit.
            of_tokens = tensors(node)[2]
            sent["sums"][layer] += 2
            sent["summed"][layer] += 3 * num_bytes(of_tokens)
    specs = {spec.name: spec for spec in graph.parameters}
    first = {name: spec.name for spec in graph.parameters for name in (spec.name, *spec.aliases)}
    found = []
    for layer in graph.component(component).layers:
        own = [specs[name] for name in {first[name] for name in layer.parameters} if name in graph.shards]
        found.append(
            TensorShare(
                sums=sent["sums"][layer.index],
                copies=sent["copies"][layer.index],
                summed_bytes=sent["summed"][layer.index],
                copied_bytes=sent["copied"][layer.index],
                parameter_bytes=sum(spec.num_bytes for spec in own),
                trainable_bytes=sum(spec.num_bytes for spec in own if spec.trainable),
            )
        )
    return found


def sharded(graph: ModelGraph, degrees: Mapping[str, int]) -> ModelGraph:
    return (
        Pipeline(passes=(GradientFlow(), TensorParallel(degrees=tuple(degrees.items())), GradientFlow()))
        .run(graph)
        .graph
    )


def graph_of(name: str) -> ModelGraph:
    if name in IN_CORE:
        return captured(name)[2].graph
    return capture(ALL[name].build(torch.float32), ALL[name].batch(torch.float32)).graph


@pytest.mark.parametrize("name", [n if n in IN_CORE else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_shares_are_those_of_the_rewritten_graph(name: str) -> None:
    graph = graph_of(name)
    GradientFlow().run(graph)
    axes = tensor_axes(graph, 4)
    for degree in (2, 4):
        # Legal or not: what divides is shared.
        parts = {
            part: degree for part, found in axes.items() if any(each.parameter_bytes for each in found.layers[degree])
        }
        made = sharded(graph, parts)
        for part in parts:
            assert list(axes[part].layers[degree]) == counted(made, part), part


def test_layers_are_priced_at_what_they_exchange() -> None:
    """In the language model of Qwen2.5-VL, whatever a layer hands on beside its hidden states."""
    graph = captured("qwen2_5_vl")[2].graph
    GradientFlow().run(graph)
    table, axes = Cost().run(graph), tensor_axes(graph, 2)
    cluster = Cluster.parse("1x8xH100")
    pricing = Pricing(
        table=table,
        cluster=cluster,
        dtype="bfloat16",
        tensor_degrees={name: found.degrees for name, found in axes.items()},
        tensor_shares={name: found.layers for name, found in axes.items()},
    )
    for part in axes:
        wanted = counted(sharded(graph, {part: 2}), part)
        for cost, share, whole in zip(
            pricing.costs(part, table.loads[part], LayerSharding(tp=2)), wanted, table[part], strict=True
        ):
            forward = share.sums * collective_s("all_reduce", share.summed_bytes / max(share.sums, 1), 2, cluster)
            assert cost.forward_exchange_s == pytest.approx(forward, rel=1e-6)
            held = whole.parameter_bytes - share.parameter_bytes // 2
            assert cost.parameter_bytes == held
        twice = pricing.costs(part, table.loads[part] * 2.0, LayerSharding(tp=2))
        for cost, share in zip(twice, wanted, strict=True):
            forward = share.sums * collective_s("all_reduce", 2 * share.summed_bytes / max(share.sums, 1), 2, cluster)
            assert cost.forward_exchange_s == pytest.approx(forward, rel=1e-6)
