"""Records of a replay: tensors that a model's Python used, calls that made them, and the tree of module calls around these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor


class ValueKind(StrEnum):
    """Origin of a tensor in a replay."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """Tensor of no recorded call: an attribute of a module, or made by a function that torch does not report."""
    RESULT = "result"


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of a replay."""

    kind: ValueKind
    tensor: Tensor
    """On the host, the real tensor; else a fake tensor of the batch's sizes."""
    host: bool
    """True if it was computed from integer inputs, buffers and constants alone."""
    name: str = ""
    """Name of the input, parameter or buffer."""
    origins: list[tuple[Call, int]] = field(default_factory=list)
    """Calls that returned the tensor, with its place among their results: the op first, then the modules around it."""
    written: bool = False
    """True if its memory was written to in place, so that its value does not follow from its call."""


Structure: TypeAlias = Any
"""Containers of arguments: None for a leaf, (type, *children) for a sequence or slice, (type, *(key, child)) for a dict."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a function of torch, or of a module, with its arguments."""

    role: Literal["step", "move", "host", "module"]
    """A step computes with parameters or float inputs; a move only rearranges their elements; host calls read neither."""
    function: Callable[..., Any]
    name: str
    structure: Structure
    leaves: list[Any]
    """Leaves of (args, kwargs): a `Value` for each tensor; others as they are."""
    grad: bool
    """True if autograd records the call."""
    where: str = ""
    """Line of Python that made the call: `modeling_llava.py:87`."""
    results: list[Value] = field(default_factory=list)
    dynamic: bool = False
    """True if the shape of a result depends on values, not on shapes alone."""

    @property
    def key(self) -> object:
        """Function or module that the call runs, equal in all replays of a model."""
        if self.name == "__get__":
            return getattr(self.function, "__self__", None)
        return self.name if self.role == "module" else self.function


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module, with all calls in it, in order."""

    path: str
    call: Call
    entries: list[Call | ModuleCall] = field(default_factory=list)
    reads: bool = False
    """True if Python read the value of a tensor in it."""
    plain: bool = False
    """True if arguments and results are tensors and plain values in plain containers."""
    outputs: tuple[Structure, tuple[Any, ...]] = (None, ())
    """Structure of the results and their leaves: `Value`s and plain values."""


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Append the leaves of nested lists, tuples, dicts and slices to `leaves`; return the structure."""
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return (kind, *(flatten(item, leaves) for item in value))
    if isinstance(value, dict):
        return (kind, *((name, flatten(item, leaves)) for name, item in value.items()))
    if kind is slice:
        return (kind, flatten(value.start, leaves), flatten(value.stop, leaves), flatten(value.step, leaves))
    leaves.append(int(value) if isinstance(value, np.integer) else value)
    return None


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return nested containers of a structure, the inverse of `flatten`."""
    if structure is None:
        return next(leaves)
    kind, *children = structure
    if issubclass(kind, dict):
        items = {name: rebuild(child, leaves) for name, child in children}
        return items if kind is dict else kind(**items) if hasattr(kind, "__dataclass_fields__") else kind(items)
    made = [rebuild(child, leaves) for child in children]
    if kind is slice:
        return slice(*made)
    if kind is list:
        return made
    return kind(*made) if hasattr(kind, "_fields") else tuple(made)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        return [value]
    leaves: list[Any] = []
    flatten(value, leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def is_plain(leaf: object) -> bool:
    """Return True for a tensor, or a value without tensors inside."""
    return leaf is None or isinstance(leaf, (Value, Tensor, bool, int, float, str, torch.dtype, torch.device))


def calls_in(entries: Sequence[Call | ModuleCall]) -> Iterator[Call]:
    """Yield all calls of functions in order, those inside module calls too."""
    for entry in entries:
        if isinstance(entry, Call):
            yield entry
        else:
            yield from calls_in(entry.entries)


def modules_in(entries: Sequence[Call | ModuleCall]) -> Iterator[ModuleCall]:
    """Yield all module calls, outer ones first."""
    for entry in entries:
        if isinstance(entry, ModuleCall):
            yield entry
            yield from modules_in(entry.entries)


def origin_in(value: Value, wholes: frozenset[str]) -> tuple[Call, int]:
    """Return the call that returned a value, where calls of modules in `wholes` are one call each, and its place."""
    found = (origin for origin in value.origins if origin[0].role == "module" and origin[0].name in wholes)
    return next(found, value.origins[0])
