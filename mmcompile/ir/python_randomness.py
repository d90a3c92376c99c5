"""Random numbers that a model draws outside torch, which a graph would freeze: found while the model is traced, and refused.

torch's own random numbers stay ops of the graph. Those of numpy and of Python's `random` (SpecAugment, layer drop) are numbers of
Python by the time they reach a tensor.
"""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from mmcompile.errors import CaptureError

_NOT_DRAWING = ("seed", "get_state", "set_state", "getstate", "setstate", "get_bit_generator", "set_bit_generator")
_SOURCES = ("default_rng", "RandomState", "Random", "SystemRandom", "Generator")
"""Constructors of generators: without a seed, they draw one."""
_UNIT = ("random", "random_sample", "rand", "uniform")
"""Functions that draw one number of [0, 1) when called so."""


class _Undecided:
    """Random number of [0, 1). Only comparisons that all such numbers answer alike have a result (layer drop of rate 0)."""

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
    return CaptureError(
        f"{what} that numpy or Python draws, not torch, so a graph would repeat one draw for ever: {own.filename}:{own.lineno}: "
        f"{own.line}; switch it off in the model's config (apply_spec_augment=False, layerdrop=0), or draw with torch"
    )


def _watched(name: str, function: Callable[..., Any], seeded: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "seed":
            seeded.append(name)
        elif name in _SOURCES:
            if not kwargs and (not args or args[0] is None):
                raise _refusal("a generator without a seed")
        elif name not in _NOT_DRAWING and not seeded:
            if name in _UNIT and not kwargs and tuple(args) in ((), (0, 1), (0.0, 1.0)):
                return _Undecided()
            raise _refusal("a random number")
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def no_python_randomness() -> Generator[None]:
    """Raise CaptureError in the block where a model draws from numpy or Python, unless it sets the seed itself."""
    seeded: list[str] = []
    before: list[tuple[ModuleType, str, object]] = []
    for module in (np.random, random):
        for name in dir(module):
            value = getattr(module, name)
            drawing = callable(value) and not isinstance(value, type) and not name.startswith("_")
            if drawing or name in _SOURCES and name != "Generator":
                before.append((module, name, value))
                if not isinstance(value, type):
                    setattr(module, name, _watched(name, value, seeded))
    state = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
    if not seeded and (random.getstate() != state[0] or repr(np.random.get_state(legacy=False)) != repr(state[1])):
        raise CaptureError(
            "the model drew random numbers from numpy or Python while it was traced, which a graph would freeze; draw with torch"
        )
