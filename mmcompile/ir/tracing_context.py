"""State around a trace: options that are switched off for it, and what the model's Python leaves behind, which is taken back."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mmcompile.ir.compat import FakeTensor, fake_mode_of

_MAX_DEPTH = 4
"""Depth to which plain objects inside modules are searched for state."""


@contextlib.contextmanager
def python_state_kept(model: nn.Module) -> Generator[None]:
    """Take fake tensors out of a real model's Python after the block: attributes of modules and of plain objects in them.

    A forward may keep what it computes (cached properties, tables for the longest input so far, positions of the last batch). In
    a trace these are fake tensors, with which the next forward fails or computes nothing.
    """
    kept = {} if fake_mode_of(model) is not None else _states(model)
    try:
        yield
    finally:
        for state, before in kept.values():
            for name, value in list(state.items()):
                if value is not before.get(name) and _has_fakes(value):
                    state.pop(name)
                    if name in before:
                        state[name] = before[name]


def _states(model: nn.Module) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of all modules and of the plain objects in them, and a copy of each, by identity."""
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def visit(value: Any, depth: int) -> None:
        state = getattr(value, "__dict__", None)
        plain = type(state) is dict and not isinstance(value, (type, torch.Tensor)) and not (depth and callable(value))
        if plain and id(state) not in found:
            found[id(state)] = state, dict(state)
            for inner in list(state.values()) if depth < _MAX_DEPTH else ():
                visit(inner, depth + 1)

    for module in model.modules():
        visit(module, 0)
    return found


def _has_fakes(value: Any, depth: int = 0) -> bool:
    leaves = pytree.tree_leaves(value)
    if any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return True
    inner = (vars(leaf) for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)))
    return depth < _MAX_DEPTH and any(_has_fakes(dict(state), depth + 1) for state in inner)


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Generator[dict[str, Any]]:
    """Switch `use_cache` off in every sub-config (a cache adds two cats per layer), and yield options for the call."""
    configs = {
        id(config): config for module in model.modules() if (config := module.__dict__.get("config")) is not None
    }
    changed = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        yield options
    finally:
        for config in changed:
            config.use_cache = True


@contextlib.contextmanager
def quiet_export() -> Generator[None]:
    """Silence export's warnings about dims that the model fixes and about attributes that its forward leaves behind."""
    logger = logging.getLogger("torch._export.non_strict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attributes? .* (was|were) assigned during export")
            yield
    finally:
        logger.setLevel(level)
