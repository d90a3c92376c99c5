"""Freeze patterns of captured models: which of encoder, projector, language model and a LoRA adapter train."""

from __future__ import annotations

import itertools
import warnings

import pytest
from torch import nn

from support.graphs.hand_graph import PARTS

PATTERNS = [dict(zip(PARTS, bits, strict=True)) for bits in itertools.product((False, True), repeat=len(PARTS))]
"""Part -> whether it trains; all sixteen."""


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


def freeze(model: nn.Module, pattern: dict[str, bool]) -> None:
    """Set `requires_grad` of every parameter by its part."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(pattern[part_of(name)])
