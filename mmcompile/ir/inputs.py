"""Inputs that the model would compute from other inputs in Python, computed before the graph instead of in it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def with_positions(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with `position_ids`, where the model offers `get_rope_index` to compute them.

    Multimodal rotary positions depend on where images stand among the tokens: computed inside, every new text would be a new
    pattern; as an input, one graph serves all. Values are the model's own, so results do not change.
    """
    owner = next((m for m in (model, getattr(model, "model", None), _base(model)) if hasattr(m, "get_rope_index")), None)
    accepts = "position_ids" in inspect.signature(model.forward).parameters
    if owner is None or not accepts or batch.get("position_ids") is not None or batch.get("input_ids") is None:
        return dict(batch)
    parameters = inspect.signature(owner.get_rope_index).parameters
    arguments = {name: batch[name] for name in parameters if name in batch}
    missing = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty and name not in arguments]
    if any(name not in ("args", "kwargs") for name in missing):
        return dict(batch)
    with torch.no_grad():
        positions, _ = owner.get_rope_index(**arguments)
    return {**batch, "position_ids": positions}


def _base(model: nn.Module) -> nn.Module | None:
    """What transformers calls the base model: the model without its head."""
    base = getattr(model, "base_model", None)
    return base if isinstance(base, nn.Module) else None
