"""`Autocast` against the eager model under `torch.autocast`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from zoo import ALL, Batch, samples

from mmcompile.data.collate import collate
from mmcompile.errors import ConfigError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.ir.inputs import completed
from mmcompile.passes.autocast import Autocast
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.values import op_name


def _captured(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Batch, Capture]:
    model = ALL[family].build(dtype)
    batch = completed(model, collate(samples(ALL[family], 2, seed=1, dtype=dtype)))
    return model, dict(batch), capture(model, batch)


def _autocast(graph: ModelGraph, *components: str) -> ModelGraph:
    names = components or tuple(component.name for component in graph.components)
    return Pipeline(passes=(Autocast(components=names), GradientFlow())).run(graph).graph


def _loss(found: Capture, graph: ModelGraph, batch: Batch) -> Tensor:
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    sizes = found.sizes.size_inputs(found.sizes.bind(tensors) or {})
    values: Mapping[str, object] = {**tensors, **sizes, **found.host.run({**tensors, **sizes}).values}
    loss, *count = graph.module(*(values[str(n.target)] for n in graph.module.graph.nodes if n.op == "placeholder"))
    return loss / count[0] if count else loss


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _distance(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Of all gradients as one vector, relative."""
    assert got.keys() == wanted.keys()
    apart = sum(float((got[name] - wanted[name]).square().sum()) for name in wanted)
    return (apart / sum(float(tensor.square().sum()) for tensor in wanted.values())) ** 0.5


@pytest.mark.parametrize(
    "family", ["llava", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_audio", "mllama"))]
)
def test_loss_and_gradients_are_those_of_torch_autocast(family: str) -> None:
    model, batch, found = _captured(family)
    exact = _gradients(model, model(**batch).loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(**batch).loss
    theirs = _gradients(model, wanted)
    loss = _loss(found, _autocast(found.graph), batch)
    ours = _gradients(model, loss)
    # On CPUs torch has other lists: norms and softmax are in bfloat16 there. Ours must be no farther from float32.
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-3)
    assert 0 < _distance(ours, exact) < 1.2 * _distance(theirs, exact)


def test_other_components_compute_as_before() -> None:
    model, batch, found = _captured("llava")
    graph = _autocast(found.graph, "language_model")
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and op_name(node) == "aten.linear":
            half = info(node).component == "language_model"
            assert node.meta["val"].dtype == (torch.bfloat16 if half else torch.float32), node.name
    assert torch.isfinite(_loss(found, graph, batch))
    # A narrow value is widened where another component reads it.
    graph = _autocast(found.graph, "vision_tower")
    assert torch.isfinite(_loss(found, graph, batch))
    assert model.dtype == torch.float32


def test_recorded_types_are_those_computed() -> None:
    _, batch, found = _captured("gemma3")
    graph = _autocast(found.graph)
    recorded = {n.name: n.meta["val"].dtype for n in graph.module.graph.nodes if isinstance(n.meta.get("val"), Tensor)}

    class Check(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                assert value.dtype == recorded[n.name], n.name
            return value

    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    values = {**tensors, **found.host.run(tensors).values}
    inputs = [values[str(n.target)] for n in graph.module.graph.nodes if n.op == "placeholder"]
    Check(graph.module).run(*inputs)


def test_what_has_no_effect_is_refused() -> None:
    _, _, found = _captured("llava", torch.float64)
    with pytest.raises(ConfigError, match="no component 'llm' to autocast; components are vision_tower"):
        _autocast(found.graph, "llm")
    with pytest.raises(ConfigError, match="autocast of vision_tower has no effect"):
        _autocast(found.graph)
