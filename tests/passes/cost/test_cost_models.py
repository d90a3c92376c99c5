"""`Cost` on captured Hugging Face models: FLOPs and saved bytes equal those of the graph's own forward and backward.

Counted on the graph, not on the original: capture drops what the loss does not see (LLaVA reads the last but one layer
of its tower, so the last is never run).
"""

from __future__ import annotations

import pytest
import torch
from support.graphs.hand_graph import with_flags
from support.oracles.flop_oracle import counted_flops, saved_bytes
from zoo import FAMILIES

from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import with_positions
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline

TOWERS = ("vision_tower", "audio_tower", "visual")
FROZEN: list[tuple[str, ...]] = [(), TOWERS, ("language_model", "lm_head"), (*TOWERS, "language_model")]


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_flops_and_saved_bytes_equal_the_graphs_own(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.build(), family.batch()
    captured = capture(model, batch)
    batch = with_positions(model, batch)
    graph, cost = captured.graph, Cost()
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    values = {**tensors, **captured.host.run(tensors).values}
    arguments = [values[spec.name] for spec in graph.inputs]
    permanent = [*model.parameters(), *model.buffers()]
    for frozen in FROZEN:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(word in parameter_name for word in frozen))
        total = Pipeline(passes=(GradientFlow(), cost)).run(with_flags(graph, model)).of(cost).total()
        counted = counted_flops(lambda: graph.module(*arguments)[0])
        got = (total.forward_flops, total.input_grad_flops + total.weight_grad_flops)
        assert got == counted, frozen
        assert total.activation_bytes == pytest.approx(
            saved_bytes(lambda: graph.module(*arguments)[0], permanent), rel=0.01
        )
