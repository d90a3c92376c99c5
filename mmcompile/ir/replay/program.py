"""`Program`: a template as a module that `torch.export` captures; its holes are inputs.

It makes the calls that the model's Python made on the example, in the same modules, and no others: no value is read, and no work
of the host is in it that a hole replaces.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from mmcompile.ir.compat import size_expression
from mmcompile.ir.replay.gathers import Layout, bases_of, gathered
from mmcompile.ir.replay.script_template import Position, ScriptTemplate, needed_calls
from mmcompile.ir.replay.values import (
    Call,
    ModuleCall,
    Structure,
    Value,
    ValueKind,
    flatten,
    rebuild,
    tensors_of,
)

OFFSET = 2
"""A number n is given as the length n + 2 of an empty tensor: export takes no numbers, and 0 and 1 as lengths are special."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberSource:
    """Place from which a program takes a number: the size of an input in a dim, less `offset`, times `sign`."""

    name: str
    dim: int = 0
    offset: int = 0
    sign: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Inputs from which a program takes the values of holes."""

    tensors: Mapping[Value, str]
    """Host value -> name of the input."""
    numbers: Mapping[Position, NumberSource]
    gathers: Mapping[Value, tuple[str, Layout]]
    """Moved value -> name of the input with its index, and how its rows lie."""


@dataclass(slots=True)
class ModuleShapes:
    """Symbolic sizes of one call of a module that is one step."""

    given: list[tuple[Any, ...] | None]
    """Shape of each leaf of the arguments that is a tensor."""
    structure: Structure
    made: list[Any]
    """(shape, dtype) of each leaf of the results that is a tensor, or (index of an earlier leaf that is the same,).

    Plain values are as they are.
    """


@dataclass(kw_only=True, eq=False)
class Program:
    """Runs a template on a model.

    Args:
        model: the model itself; its modules' forwards are those that the template recorded.
        template: what to call.
        sources: where the values of the template's holes come from.
    """

    model: nn.Module
    template: ScriptTemplate
    sources: Sources
    shapes: dict[str, list[ModuleShapes]] = field(default_factory=dict)
    """Path of a module that is one step -> the shapes of its calls in the last run."""

    def __post_init__(self) -> None:
        self._needed = needed_calls(self.template)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch.

        Args:
            inputs: input name -> tensor; those of the holes too.
        """
        self._inputs = inputs
        self._made: dict[Value, Tensor] = {}
        self.shapes.clear()
        try:
            self._run(self.template.script.entries)
            return self._tensor(self.template.script.loss)
        finally:
            _set_grad(True)
            self._made = {}
            self._inputs = {}

    def _run(self, entries: Sequence[Call | ModuleCall]) -> None:
        for entry in entries:
            if isinstance(entry, Call):
                if id(entry) in self._needed:
                    self._bind(entry, self._call(entry))
            elif entry.path in self.template.wholes:
                self._bind(entry.call, self._whole(entry.call))
            elif entry.path == "":
                self._run(entry.entries)
            else:
                module = self.model.get_submodule(entry.path)
                with _plain_forward(module, lambda entry=entry: self._run(entry.entries)):
                    module()

    def _call(self, call: Call) -> Any:
        args, kwargs = self._arguments(call)
        _set_grad(call.grad)
        return call.function(*args, **kwargs)

    def _whole(self, call: Call) -> Any:
        args, kwargs = self._arguments(call)
        module = self.model.get_submodule(call.name)
        _set_grad(call.grad)
        with _plain_forward(module, None):
            out = module(*args, **kwargs)
        given: list[Any] = []
        flatten((args, kwargs), given)
        leaves: list[Any] = []
        structure = flatten(out, leaves)
        self.shapes.setdefault(call.name, []).append(
            ModuleShapes(
                given=[_sizes(leaf) if isinstance(leaf, Tensor) else None for leaf in given],
                structure=structure,
                made=_made(leaves),
            )
        )
        return out

    def _arguments(self, call: Call) -> Any:
        leaves = (
            self._tensor(leaf) if isinstance(leaf, Value) else self._number(id(call), index, leaf)
            for index, leaf in enumerate(call.leaves)
        )
        return rebuild(call.structure, leaves)

    def _number(self, call: int, leaf: int, value: Any) -> Any:
        source = self.sources.numbers.get((call, leaf))
        return value if source is None else source.sign * (self._inputs[source.name].shape[source.dim] - source.offset)

    def _bind(self, call: Call, out: Any) -> None:
        tensors = tensors_of(out)
        if call.role != "module" and (call.name == "__setitem__" or len(tensors) < len(call.results)):
            tensors = [self._tensor(call.leaves[0])]
        for value, tensor in zip(call.results, tensors, strict=False):
            self._made[value] = tensor

    def _tensor(self, value: Value) -> Tensor:
        if value in self.sources.tensors:
            return self._inputs[self.sources.tensors[value]]
        if value in self.sources.gathers:
            name, layout = self.sources.gathers[value]
            bases = [self._tensor(base) for base in bases_of(value, self.template.wholes)]
            return gathered(bases, layout, self._inputs[name])
        if value in self._made:
            return self._made[value]
        if value.kind is ValueKind.INPUT:
            return self._inputs[value.name]
        if value.kind in (ValueKind.PARAMETER, ValueKind.BUFFER):
            path, _, name = value.name.rpartition(".")
            return getattr(self.model.get_submodule(path), name)
        assert value.kind is ValueKind.CONSTANT and value.host, f"no call made {value}"
        return value.tensor


def _made(leaves: Sequence[Any]) -> list[Any]:
    """Return `ModuleShapes.made` of the leaves of a result."""
    first = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}

    def made(index: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return (_sizes(leaf), leaf.dtype) if first[id(leaf)] == index else (first[id(leaf)],)

    return list(itertools.starmap(made, enumerate(leaves)))


def _set_grad(enabled: bool) -> None:
    # Every switch is a region of the exported graph, and each region takes export a while.
    if torch.is_grad_enabled() != enabled:
        torch.set_grad_enabled(enabled)


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    sizes = (size_expression(size) if isinstance(size, torch.SymInt) else size for size in tensor.shape)
    return tuple(int(size) if isinstance(size, sympy.Expr) and size.is_number else size for size in sizes)


@contextlib.contextmanager
def _plain_forward(module: nn.Module, run: Callable[[], None] | None) -> Generator[None]:
    """Call a module without its hooks, whose calls the template has beside it; `run`: what it calls in place of its forward."""
    own = vars(module)
    hooks = {name: own[name] for name in ("_forward_hooks", "_forward_pre_hooks")}
    forward = own.get("forward")
    for name in hooks:
        own[name] = {}
    if run is not None:
        own["forward"] = lambda *args, **kwargs: run()
    try:
        yield
    finally:
        own.update(hooks)
        if run is not None:
            if forward is None:
                own.pop("forward", None)
            else:
                own["forward"] = forward


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultShapes:
    """Sizes of a module's results as they follow from those of its arguments."""

    structure: Structure
    made: tuple[Any, ...]
    """(dtype, sizes) of each leaf of the results that is a tensor, or (index of an earlier leaf that is the same,).

    A size is an int, or (leaf of the arguments, dim).
    """
    ranks: tuple[tuple[int, int], ...]
    """(leaf of the arguments, its number of dims) of each tensor."""
    fixed: tuple[tuple[int, int, int], ...]
    """(leaf of the arguments, dim, size) of each size for which alone this holds."""

    @classmethod
    def of(cls, calls: Sequence[ModuleShapes]) -> ResultShapes | None:
        """Return what holds of all calls of a module; None if a size of its results is no size of its arguments."""
        found = {cls._of(call) for call in calls}
        return found.pop() if len(found) == 1 else None

    @classmethod
    def _of(cls, call: ModuleShapes) -> ResultShapes | None:
        places: dict[Any, tuple[int, int]] = {}
        fixed: list[tuple[int, int, int]] = []
        ranks: list[tuple[int, int]] = []
        for leaf, sizes in enumerate(call.given):
            if sizes is None:
                continue
            ranks.append((leaf, len(sizes)))
            for dim, size in enumerate(sizes):
                if isinstance(size, int):
                    fixed.append((leaf, dim, size))
                else:
                    places.setdefault(size, (leaf, dim))
        made: list[Any] = []
        for result in call.made:
            if not isinstance(result, tuple) or len(result) == 1:
                made.append(result)
                continue
            sizes, dtype = result
            found = tuple(size if isinstance(size, int) else places.get(size) for size in sizes)
            if None in found:
                return None
            made.append((dtype, found))
        return cls(structure=call.structure, made=tuple(made), ranks=tuple(ranks), fixed=tuple(fixed))
