"""Which layers compute activations again: those with gradient and a product in their backward."""

from __future__ import annotations

import pytest
import torch
from support.graphs.hand_graph import Block, SmallModel, build_graph, small_batch, with_flags
from support.graphs.split import captured
from support.models.freezing import freeze
from torch import Tensor, nn

from mmcompile.config import Recompute
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.deferred_weights import DeferredWeights
from mmcompile.passes.cost.recompute import Recomputed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline

FROZEN = {"encoder": False, "projector": True, "language_model": False, "adapter": False}


def graph_of(name: str, **trained: bool) -> tuple[nn.Module, ModelGraph]:
    model, _, found = captured(name)
    freeze(model, {**dict.fromkeys(FROZEN, True), **trained})
    graph = with_flags(found.graph, model)
    Pipeline(passes=(GradientFlow(),)).run(graph)
    return model, graph


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("trained", [{}, FROZEN])
def test_layers_that_compute_again_are_those_of_the_memory_model(
    recompute: Recompute, trained: dict[str, bool]
) -> None:
    _, graph = graph_of("llava", **trained)
    table = Cost().run(graph)
    wanted = {
        (component.name, layer.index)
        for component in graph.components
        for layer in component.layers
        if table[component.name][layer.index].has_backward
    }
    every = [(component.name, layer.index) for component in graph.components for layer in component.layers]
    found = Recomputed(modes=dict.fromkeys(every, recompute)).run(graph)
    assert found == dict.fromkeys(wanted, recompute)
    assert ("vision_tower" in {component for component, _ in found}) == (trained != FROZEN)
    # A frozen language model above a projector that trains has input gradients.
    assert ("language_model", 1) in found


def test_nothing_is_computed_again_where_not_asked_for() -> None:
    assert Recomputed().run(graph_of("llava")[1]) == {}


class Counting(Block):
    """Updates a running mean, as a batch norm that trains does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.add_(hidden.detach().mean())
        return super().forward(hidden)


def test_a_layer_that_changes_a_buffer_does_not_run_twice_and_is_planned_so() -> None:
    model = SmallModel()
    model.layers[1] = Counting()
    graph = build_graph(model, small_batch())
    GradientFlow().run(graph)
    every = [(component.name, layer.index) for component in graph.components for layer in component.layers]
    found = Recomputed(modes=dict.fromkeys(every, "full")).run(graph)
    assert ("language_model", 1) in found and ("language_model", 2) not in found
    plain, counting = Cost().run(graph)["language_model"][1:3]
    assert plain.full_bytes < plain.selective_bytes < plain.activation_bytes
    assert counting.full_bytes == counting.selective_bytes == counting.activation_bytes > 0


def test_weights_that_train_are_deferred_and_no_others() -> None:
    model, graph = graph_of("llava", **FROZEN)
    found = DeferredWeights().run(graph)
    names = {str(weight.weight.target) for weight in found.values()}
    linears = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    assert names == linears.keys() != set()
    assert all(
        (weight.bias is not None) == (linears[str(weight.weight.target)].bias is not None) for weight in found.values()
    )
