"""Bytes and kernels of forward and backward are near those of the joint graph that torch traces of a whole model.

`Cost` derives the backward from the forward graph, for tracing the joint graph of a model of real size takes a minute.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.graphs.split import root_values
from torch import fx
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from zoo import FAMILIES

from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import completed
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.op_memory import is_view
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.values import aten_ops, num_bytes, op_name, storage_bytes, tensors

# Views that their schemas do not call so.
VIEWS = aten_ops("detach t _unsafe_view")


def traffic(graph: fx.Graph) -> tuple[int, int]:
    """(bytes read and written, kernels) of a traced graph."""
    kernels = [node for node in graph.nodes if node.op == "call_function" and "val" in node.meta and _runs(node)]
    touched = [other for node in kernels for other in (node, *node.all_input_nodes) if "val" in other.meta]
    return sum(min(num_bytes(t), storage_bytes(t)) for node in touched for t in tensors(node)), len(kernels)


def _runs(node: fx.Node) -> bool:
    return not (is_view(node) or op_name(node) in VIEWS)


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen2_audio"))]
)
def test_traffic_is_near_that_of_the_joint_graph(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.build(), family.batch()
    found = capture(model, batch)
    module = found.graph.module
    GradientFlow().run(found.graph)
    total = Cost().run(found.graph).total()
    roots = root_values(found, completed(model, batch))
    arguments = tuple(roots[str(node.target)] for node in module.graph.nodes if node.op == "placeholder")
    parameters = {name: value.detach().requires_grad_() for name, value in module.named_parameters()}

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(module, values, arguments)[0]

    def step(values: dict[str, torch.Tensor]) -> Any:
        return torch.autograd.grad(loss(values), list(values.values()), allow_unused=True)

    forward_bytes, kernels = traffic(make_fx(loss)(parameters).graph)
    step_bytes, step_kernels = traffic(make_fx(step)(parameters).graph)
    assert total.forward_bytes == pytest.approx(forward_bytes, rel=0.12)
    assert total.kernels == pytest.approx(kernels, rel=0.05)
    assert total.backward_bytes == pytest.approx(step_bytes - forward_bytes, rel=0.12)
    assert total.backward_kernels == pytest.approx(step_kernels - kernels, rel=0.15)
