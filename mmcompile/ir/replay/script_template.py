"""`ScriptTemplate`: a script with holes, which other batches of the same script fill with values of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmcompile.ir.capture_errors import Mismatch
from mmcompile.ir.replay import functions
from mmcompile.ir.replay.gathers import Layout, bases_of, gather_index, layouts
from mmcompile.ir.replay.script import Script
from mmcompile.ir.replay.values import Call, Value, ValueKind, origin_in

Position = tuple[int, int]
"""Identity of a call of the template, and index of one of its leaves."""


class _Differs(Exception):
    """Two values of two scripts were made by different calls."""


@dataclass(kw_only=True, slots=True)
class Filling:
    """Values of a batch where a template has holes, or would need them."""

    tensors: dict[Value, Tensor] = field(default_factory=dict)
    """Host value of the template -> the batch's tensor."""
    numbers: dict[Position, int] = field(default_factory=dict)
    gathers: dict[Value, tuple[Tensor, Layout]] = field(default_factory=dict)
    """Moved value of the template -> index by which the batch's is gathered from the same tensors, and how."""
    missing: list[str] = field(default_factory=list)
    """Lines of Python where the batch differs, but the template has no hole."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScriptTemplate:
    """A script, and the places in it where batches may differ."""

    script: Script
    shapes: Mapping[str, Sequence[int]]
    """Name of an input -> its shape in the example."""
    wholes: frozenset[str]
    """Paths of the modules that are one step each."""
    tensors: frozenset[Value] = frozenset()
    """Host values that the graph takes as inputs."""
    numbers: frozenset[Position] = frozenset()
    """Numbers that the graph takes as inputs."""
    gathers: Mapping[Value, Layout] = field(default_factory=dict)
    """Moved value -> how it is gathered."""

    def fill(self, script: Script, shapes: Mapping[str, Sequence[int]]) -> Filling:
        """Compare the script of a batch with this template, and return what the batch has where they differ or there is a hole.

        Args:
            script: its script.
            shapes: name of an input -> its shape in the batch.

        Raises:
            Mismatch: the script makes other calls, so that no hole can help.
        """
        return _Comparison(self, script, shapes).run()


class _Comparison:
    def __init__(self, template: ScriptTemplate, script: Script, shapes: Mapping[str, Sequence[int]]) -> None:
        self.template = template
        self.sizes = set(_pairs(template.shapes, shapes))
        self.ours = template.script.steps(template.wholes)
        self.theirs = script.steps(template.wholes)
        self.found = Filling()
        self.place: dict[int, int] = {}
        self.same: dict[tuple[int, int], bool] = {}
        self.losses = template.script.loss, script.loss

    def run(self) -> Filling:
        for place, (a, b) in enumerate(zip(self.ours, self.theirs, strict=False)):
            if a.key != b.key:
                raise Mismatch(f"{a.where or b.where}: {a.name} where the other batch calls {b.name}")
            if a.structure != b.structure:
                raise Mismatch(
                    f"{a.where or b.where}: {a.name} has other arguments in the other batch, or a None among them"
                )
            if a.grad != b.grad:
                raise Mismatch(f"{a.where or b.where}: {a.name} has a gradient in one batch only")
            self.place[id(a)] = self.place[id(b)] = place
        if len(self.ours) != len(self.theirs):
            longer = max(self.ours, self.theirs, key=len)
            raise Mismatch(
                f"{longer[min(len(self.ours), len(self.theirs))].where}: {len(self.ours)} steps against {len(self.theirs)}"
            )
        for a, b in zip(self.ours, self.theirs, strict=True):
            for leaf in range(len(a.leaves)):
                self._leaf(a, b, leaf)
        self._step_value(*self.losses, "the loss")
        return self.found

    def _leaf(self, a: Call, b: Call, leaf: int) -> None:
        x, y = a.leaves[leaf], b.leaves[leaf]
        if isinstance(x, Value) != isinstance(y, Value):
            raise Mismatch(f"{a.where}: argument {leaf} of {a.name} is a tensor in one batch only")
        if isinstance(x, Value):
            self._step_value(x, y, f"{a.where}: argument {leaf} of {a.name}")
        elif not self._number(a, leaf, x, y):
            raise Mismatch(f"{a.where}: argument {leaf} of {a.name} is {x!r}, in the other batch {y!r}")

    def _step_value(self, x: Value, y: Value, what: str) -> None:
        try:
            self._value(x, y)
        except _Differs as error:
            if x.host or y.host:
                raise Mismatch(f"{what} is made otherwise ({error})") from None
            self._gather(x, y, what)

    def _number(self, a: Call, leaf: int, x: object, y: object) -> bool:
        """Compare two plain leaves; return False if they differ and are no numbers that may."""
        position = id(a), leaf
        known = position in self.template.numbers
        if type(x) is int and type(y) is int and a.name not in functions.FROM_DATA:
            if a.role == "host" and not known and x != y and (x, y) not in self.sizes:
                return False
            if known or x != y:
                self.found.numbers[position] = y
                if not known:
                    self.found.missing.append(f"{a.where}: argument {leaf} of {a.name} is {x}, in the other batch {y}")
            return True
        return type(x) is type(y) and same_plain(x, y)

    def _value(self, x: Value, y: Value) -> None:
        if x in self.template.tensors or x.written:
            return self._tensor(x, y)
        if x in self.template.gathers:
            return self._gather(x, y, "a moved tensor")
        try:
            self._same_value(x, y)
        except _Differs:
            if not x.host:
                raise
            self._tensor(x, y)
        return None

    def _same_value(self, x: Value, y: Value) -> None:
        if x.kind is not y.kind or x.host != y.host or x.name != y.name:
            raise _Differs(f"{x.kind} {x.name} or {y.kind} {y.name}")
        same = x.tensor is y.tensor or x.host and _equal_tensors(x.tensor, y.tensor)
        if x.kind is ValueKind.CONSTANT and not same:
            raise _Differs("another constant")
        if x.kind is not ValueKind.RESULT:
            return
        (a, i), (b, j) = (origin_in(value, self.template.wholes) for value in (x, y))
        if i != j or a.role != b.role:
            raise _Differs(f"{a.name} or {b.name}")
        if a.role in ("step", "module"):
            if self.place.get(id(a), -1) != self.place.get(id(b), -2):
                raise _Differs(f"{a.name} or {b.name}")
            return
        key = id(a), id(b)
        if key not in self.same:
            self.same[key] = False
            self._same_call(a, b)
            self.same[key] = True
        elif not self.same[key]:
            raise _Differs(a.where)

    def _same_call(self, a: Call, b: Call) -> None:
        if a.key != b.key or a.structure != b.structure or a.dynamic or a.grad != b.grad and a.role == "move":
            raise _Differs(a.where)
        for leaf, (x, y) in enumerate(zip(a.leaves, b.leaves, strict=True)):
            if isinstance(x, Value) and isinstance(y, Value):
                self._value(x, y)
            elif a.role == "move" and a.name in functions.SPLITS and x != y:
                raise _Differs(a.where)  # pieces of any sizes, which may be empty, are a gather
            elif not self._number(a, leaf, x, y):
                raise _Differs(a.where)

    def _tensor(self, x: Value, y: Value) -> None:
        if not y.host or x.tensor.dim() != y.tensor.dim() or x.tensor.dtype != y.tensor.dtype:
            raise _Differs("a host tensor of another rank or type")
        known = self.found.tensors.setdefault(x, y.tensor)
        if known is not y.tensor and not _equal_tensors(known, y.tensor):
            raise Mismatch("one host tensor is two in the other batch")
        if x not in self.template.tensors:
            origin = x.origins[0][0] if x.origins else None
            self.found.missing.append(f"{origin.where}: {origin.name}" if origin is not None else "a constant")

    def _gather(self, x: Value, y: Value, what: str) -> None:
        ours, theirs = (bases_of(value, self.template.wholes) for value in (x, y))
        try:
            if len(ours) != len(theirs):
                raise _Differs("moved from other tensors")
            for one, two in zip(ours, theirs, strict=True):
                self._same_value(one, two)
            self.found.gathers[x] = self._index(x, y)
        except _Differs as error:
            raise Mismatch(f"{what}: {error}") from None
        if x not in self.template.gathers:
            self.found.missing.append(what)

    def _index(self, x: Value, y: Value) -> tuple[Tensor, Layout]:
        wholes = self.template.wholes
        known = self.template.gathers.get(x)
        for layout in layouts(x, wholes) if known is None else (known,):
            if (index := gather_index(y, layout, wholes)) is not None:
                return index, layout
        raise _Differs("moved by other rows")


def _pairs(ours: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the sizes in two batches of every dim of an input, and of every run of dims."""
    for name, shape in ours.items():
        other = theirs[name]
        for first in range(len(shape)):
            for last in range(first, len(shape)):
                yield math.prod(shape[first : last + 1]), math.prod(other[first : last + 1])


def same_plain(x: Any, y: Any) -> bool:
    """Return True if two plain arguments are equal."""
    if isinstance(x, float):
        return x == y or x != x and y != y
    try:
        return x is y or bool(x == y)
    except (RuntimeError, ValueError, TypeError):  # arrays
        return False


def _equal_tensors(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y)


def needed_calls(template: ScriptTemplate, script: Script | None = None) -> dict[int, Call]:
    """Return identity -> call, for all calls that the template's steps need; holes need none."""
    needed: dict[int, Call] = {}
    waiting: list[Value] = [template.script.loss]

    def add(call: Call) -> None:
        if id(call) not in needed:
            needed[id(call)] = call
            waiting.extend(leaf for leaf in call.leaves if isinstance(leaf, Value))

    for call in template.script.steps(template.wholes):
        add(call)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or value in template.tensors:
            continue
        seen.add(id(value))
        if value in template.gathers:
            waiting += bases_of(value, template.wholes)
        elif value.origins:
            add(origin_in(value, template.wholes)[0])
    return needed


def forced_holes(script: Script, wholes: frozenset[str]) -> frozenset[Value]:
    """Return the host values that no graph can compute: their shape depends on values, or they were written in place."""
    found: set[Value] = set()
    while True:
        needed = needed_calls(ScriptTemplate(script=script, shapes={}, wholes=wholes, tensors=frozenset(found)))
        new = {
            leaf
            for call in needed.values()
            for leaf in call.leaves
            if isinstance(leaf, Value) and leaf.host and leaf not in found and _is_forced(leaf)
        }
        if not new:
            return frozenset(found)
        found |= new


def _is_forced(value: Value) -> bool:
    if value.written:
        return True
    call = value.origins[0][0] if value.origins else None
    return call is not None and (call.dynamic or functions.draws(call.name))
