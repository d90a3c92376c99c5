"""`OpCosts`: an op counts what its rule says, forward and backward; others count as before."""

from __future__ import annotations

import pytest
import torch
from support.graphs.hand_graph import small_graph
from torch import fx

from mmcompile.errors import ConfigError
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.op_costs import OpCosts
from mmcompile.passes.cost.op_flops import OpFlops
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline


def silu_flops(node: fx.Node) -> OpFlops:
    return OpFlops(forward=1000, operands=((node.all_input_nodes[0], 300),))


def test_a_rule_counts_in_every_layer_with_the_op() -> None:
    graph, cost = small_graph(), Cost()
    plain = Pipeline(passes=(GradientFlow(), cost)).run(graph).of(cost).total()
    rules = OpCosts(rules={"aten.silu": silu_flops})
    found = Pipeline(passes=(GradientFlow(), rules, cost)).run(small_graph())
    total = found.of(cost).total()
    assert found.of(rules) == sum(node.target is torch.ops.aten.silu.default for node in graph.module.graph.nodes) == 4
    assert total.forward_flops == plain.forward_flops + 4 * 1000
    assert total.input_grad_flops == plain.input_grad_flops + 4 * 300
    assert total.weight_grad_flops == plain.weight_grad_flops


def test_a_rule_of_no_op_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cost rule is given for 'aten.silou', which is no op of torch's"):
        OpCosts(rules={"aten.silou": silu_flops})
