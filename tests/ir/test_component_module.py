"""Components taken out one by one and chained are the whole model."""

from __future__ import annotations

import pytest
import torch
from support.graphs.split import captured, root_values
from torch import Tensor, nn

from mmcompile.ir.copy import component_module


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "mllama", "two_encoder_net"])
def test_components_in_order_are_the_whole(name: str) -> None:
    _, batch, found = captured(name)
    graph = found.graph
    known: dict[str, Tensor] = dict(root_values(found, batch))
    inputs = [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        wanted = graph.module(*(known[target] for target in inputs))
        for component in graph.components:
            module = component_module(graph, component.name)
            module.graph.lint()
            names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
            results = module(*(known[value] for value in names))
            outputs = [node.name for node in module.graph.output_node().all_input_nodes]
            known |= dict(zip(outputs, results, strict=True))
    assert len(graph.components) > 1
    for got, want in zip(results, wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["llava", "two_encoder_net"])
def test_a_component_reads_and_returns_what_the_edges_say(name: str) -> None:
    graph = captured(name)[2].graph
    batch_inputs = {node.name for node in graph.module.graph.nodes if node.op == "placeholder"}
    for component in graph.components:
        module = component_module(graph, component.name)
        read = {node.name for node in module.graph.nodes if node.op == "placeholder"} - batch_inputs
        assert read == {t for _, consumer, tensors in graph.edges if consumer == component.name for t in tensors}
        if component.name != graph.loss_component:
            returned = {node.name for node in module.graph.output_node().all_input_nodes}
            assert returned == {t for producer, _, ts in graph.edges if producer == component.name for t in ts}


def test_parameters_are_the_models_own_and_only_those_read() -> None:
    model, _, found = captured("two_encoder_net")
    own = dict(model.named_parameters())
    seen: set[str] = set()
    for component in found.graph.components:
        parameters = dict(component_module(found.graph, component.name).named_parameters())
        assert set(parameters) == {name for layer in component.layers for name in layer.parameters}
        assert all(parameter is own[name] for name, parameter in parameters.items())
        assert not seen & set(parameters)
        seen |= set(parameters)
    assert seen == set(own)


def test_the_graph_itself_is_left_as_it_was() -> None:
    _, _, found = captured("two_encoder_net")
    before = str(found.graph.module.graph)
    component_module(found.graph, "vision")
    assert str(found.graph.module.graph) == before


def test_an_unknown_component_is_named_with_those_there_are() -> None:
    graph = captured("two_encoder_net")[2].graph
    with pytest.raises(KeyError, match="no component 'ears'; components are vision, vision_projector, hearing"):
        component_module(graph, "ears")


def test_the_module_is_a_module_that_trains() -> None:
    graph = captured("two_encoder_net")[2].graph
    module = component_module(graph, "hearing")
    assert isinstance(module, nn.Module)
    (result,) = module(torch.randn(2, 32, 16, dtype=torch.float64))
    gradients = torch.autograd.grad(result.square().sum(), list(module.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients if gradient.numel() > 32)
