"""`GradientFlow` and `Verify` on captured Hugging Face models with a LoRA adapter, for every freeze pattern."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hand_graph import PARTS, with_flags
from torch import nn
from zoo import FAMILIES

from mmcompile.ir.capture import capture
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.verify import Verify

PATTERNS = [dict(zip(PARTS, bits, strict=True)) for bits in itertools.product((False, True), repeat=len(PARTS))]


def add_adapter(model: nn.Module) -> None:
    """LoRA on the query projections of the language model."""
    peft = pytest.importorskip("peft")
    targets = [name for name, _ in model.named_modules() if name.endswith("q_proj") and "language_model" in name]
    assert targets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0), model)


def part_of(name: str) -> str:
    """Which of `PARTS` a parameter belongs to."""
    if "lora_" in name:
        return "adapter"
    if "merger" in name or "multi_modal_projector" in name:
        return "projector"
    return "encoder" if any(word in name for word in ("vision", "visual", "audio_tower")) else "language_model"


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
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(pattern[part_of(parameter_name)])
        report = GradientFlow().run(with_flags(graph, model))
        assert report.parameters_with_gradient == eager_gradients(model, batch), pattern
    frozen = capture(model.requires_grad_(False), batch).graph
    assert GradientFlow().run(frozen).parameters_with_gradient == frozenset()
