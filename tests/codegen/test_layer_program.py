"""A layer alone computes what it computes in the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import ALL

from mmcompile.codegen.layer_program import layer_programs, shared_values
from mmcompile.codegen.load import load_stage
from mmcompile.ir.capture import capture
from mmcompile.ir.graph import info
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_layers_one_after_another_give_the_loss(name: str) -> None:
    family = ALL[name]
    model = family.build(torch.float64)
    batch = completed(model, family.batch(torch.float64))
    captured = capture(model, batch)
    graph = captured.graph
    Pipeline(passes=(GradientFlow(),)).run(graph)
    given = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    inputs = {**given, **captured.host.run(given).values}
    places = [(component.name, layer.index) for component in graph.components for layer in component.layers]
    programs = layer_programs(graph, places)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {n for p in programs.values() for n in p.arguments if n.op == "call_function" and info(n).shared}
    values = {node.name: value for node, value in shared_values(graph, wanted, inputs).items()} | inputs
    waiting = dict(programs)
    while waiting:
        place = next(p for p, layer in waiting.items() if all(port.name in values for port in layer.program.inputs))
        program = waiting.pop(place).program
        results = load_stage(program, tensors)(*(values[port.name] for port in program.inputs))
        values |= {port.name: result for port, result in zip(program.outputs, results, strict=True)}
    last = programs[places[-1]].program
    assert last.is_loss
    loss_sum, num_tokens = (values[port.name] for port in last.outputs[-2:])
    # transformers makes its loss in float32.
    torch.testing.assert_close((loss_sum / num_tokens).float(), model(**batch).loss, rtol=1e-6, atol=0.0)
