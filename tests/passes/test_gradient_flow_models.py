"""`GradientFlow` and `Verify` on captured Hugging Face models with a LoRA adapter, for every freeze pattern."""

from __future__ import annotations

import pytest
import torch
from support.graphs.hand_graph import PARTS, with_flags
from support.models.freezing import PATTERNS, add_adapter, freeze, part_of
from torch import nn
from zoo import FAMILIES

from mmcompile.ir.capture import capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.verify import Verify


def eager_gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> set[str]:
    """First names of the parameters with a gradient after a real backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch)["loss"]
    if loss.requires_grad:
        loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen2_audio"])
def test_prediction_equals_eager_for_every_freeze_pattern(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.build(), family.batch()
    add_adapter(model)
    model.requires_grad_(True)
    assert {part_of(parameter) for parameter, _ in model.named_parameters()} == set(PARTS)
    graph = capture(model, batch).graph
    Verify().run(graph)
    for pattern in PATTERNS:
        freeze(model, pattern)
        report = GradientFlow().run(with_flags(graph, model))
        assert report.parameters_with_gradient == eager_gradients(model, batch), pattern
    frozen = capture(model.requires_grad_(False), batch).graph
    assert GradientFlow().run(frozen).parameters_with_gradient == frozenset()
