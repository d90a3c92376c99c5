"""State around a trace: options switched off for it, fake tensors that a model keeps, random numbers drawn outside torch.

After a trace, options are restored and the fake tensors are removed. torch's random ops stay in the graph. Draws from numpy and
Python's `random` (SpecAugment, layer drop) are refused: they reach tensors as plain numbers, which a graph would repeat.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pickle
import random
import traceback
import warnings
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import FakeTensor, fake_mode_of

_MAX_DEPTH = 4
"""Depth to which plain objects inside modules are searched for state."""
_NOT_DRAWING = ("seed", "get_state", "set_state", "getstate", "setstate", "get_bit_generator", "set_bit_generator")
_UNIT = ("random", "random_sample", "rand", "uniform")
"""Names of functions that, without arguments or with the bounds 0 and 1, draw one number of [0, 1)."""


@contextlib.contextmanager
def python_state_kept(model: nn.Module) -> Generator[None]:
    """Remove, after the block, fake tensors that tracing left in a real model's modules, or in plain objects in their attributes.

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
    """Return, for every module of a model and every plain object in its attributes: id -> (attributes, a copy of them)."""
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def visit(value: Any, depth: int) -> None:
        state: Any = getattr(value, "__dict__", None)
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
    """Switch `use_cache` off in all configs (a cache adds two ops per layer); yield keyword arguments for the forward."""
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


class _Undecided:
    """Stand-in for a random number between 0 and 1. A comparison with it must have one result for all of [0, 1).

    Otherwise it raises an error, since the trace would depend on the draw.
    """

    def __lt__(self, other: float) -> bool:
        if 0 < other < 1:
            raise _refusal("a random number decides what is computed")
        return other >= 1

    __le__ = __lt__

    def __gt__(self, other: float) -> bool:
        return not self < other

    __ge__ = __gt__

    def _refused(self, *_: object) -> NoReturn:
        raise _refusal("a random number reaches the computation")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refused
    __pow__ = __float__ = __int__ = __bool__ = __round__ = __array__ = _refused


def _refusal(what: str) -> CaptureError:
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    own = next((frame for frame in reversed(frames) if "/numpy/" not in frame.filename), frames[-1])
    where = f"{own.filename.rpartition('site-packages/')[2]}:{own.lineno}: {own.line}"
    return CaptureError(
        f"{what} that numpy or Python draws, not torch, so a graph would repeat one draw for ever: {where}; switch it off in the "
        "model's config (apply_spec_augment=False, layerdrop=0), or draw with torch"
    )


def _watched(name: str, function: Callable[..., Any], seeded: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "seed":
            seeded.append(name)
        elif name == "default_rng":
            if not kwargs and (not args or args[0] is None):
                raise _refusal("a generator without a seed")
        elif name not in _NOT_DRAWING and not seeded:
            if name in _UNIT and not kwargs and tuple(args) in ((), (0, 1), (0.0, 1.0)):
                return _Undecided()
            raise _refusal("a random number")
        return function(*args, **kwargs)

    return call


class _SeededOnly(type):
    """Metaclass of stand-ins for generator classes: a call with a seed makes an instance of the class; one without is refused."""

    made: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        ignores_seeds = cls.__name__ == "SystemRandom"
        if ignores_seeds or all(value is None for value in (*args, *kwargs.values())):
            raise _refusal("a generator without a seed")
        return cls.made(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.made)


@contextlib.contextmanager
def no_python_randomness(model: nn.Module) -> Generator[None]:
    """Raise CaptureError in the block where a model draws from numpy or Python, unless it sets the seed itself.

    Generators that are attributes of modules are checked at the end of the block: none may have been drawn from.
    """
    own = {
        f"{path}.{name}".lstrip("."): (value, pickle.dumps(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random)
    }
    seeded: list[str] = []
    before: list[tuple[ModuleType, str, object]] = []
    for module in (np.random, random):
        for name in dir(module):
            value = getattr(module, name)
            if callable(value) and not name.startswith("_"):
                is_class = isinstance(value, type)  # of generators, of their bits or of seeds
                before.append((module, name, value))
                setattr(
                    module, name, _SeededOnly(name, (), {"made": value}) if is_class else _watched(name, value, seeded)
                )
    state = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
    drawn = [place for place, (value, kept) in own.items() if pickle.dumps(value) != kept]
    if drawn:
        raise CaptureError(
            f"the model drew random numbers from {', '.join(drawn)} while it was traced, which a graph would freeze; draw with "
            "torch"
        )
    if not seeded and (random.getstate() != state[0] or repr(np.random.get_state(legacy=False)) != repr(state[1])):
        raise CaptureError(
            "the model drew random numbers from numpy or Python while it was traced, which a graph would freeze; draw with torch"
        )
