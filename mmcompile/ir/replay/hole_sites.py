"""`HoleSites`: places of a model's Python where batches were found to differ, for calls of which there is one example only.

A batch may call otherwise than all before it (a modality is missing, a mask is all true), so that nothing is known of what may
differ in its calls. Lines that were reached before are then taken to differ as they did there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from mmcompile.ir.replay.gathers import Layout, layouts
from mmcompile.ir.replay.program import Sources
from mmcompile.ir.replay.script import Script
from mmcompile.ir.replay.script_template import Position, ScriptTemplate
from mmcompile.ir.replay.values import Value

Place: TypeAlias = tuple[str, str, int]
"""Name of a function, line that calls it, and index of one of its leaves, or of its results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HoleSites:
    """Differences between batches, by place."""

    dims: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Name of an input -> dims that differ."""
    numbers: Mapping[Place, tuple[str, int]] = field(default_factory=dict)
    """Place of a number -> the input and the dim whose size it is; else a name that equal numbers share, and -1."""
    tensors: Mapping[Place, frozenset[int]] = field(default_factory=dict)
    """Place of a host tensor -> dims that differ."""
    gathers: frozenset[Place] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.dims or self.numbers or self.tensors or self.gathers)

    def with_holes(
        self, template: ScriptTemplate, sources: Sources, varying: Mapping[str, frozenset[int]], inputs: Container[str]
    ) -> HoleSites:
        """Return these places and those of a template's holes.

        Args:
            template: the template.
            sources: inputs that fill its holes.
            varying: name of an input -> dims that differ.
            inputs: names of the batch's own inputs.
        """
        numbers: dict[Place, tuple[str, int]] = {}
        shared: dict[str, str] = {}
        for call in template.script.calls(template.wholes):
            for leaf in range(len(call.leaves)):
                source = sources.numbers.get((id(call), leaf))
                if source is not None:
                    place = (call.name, call.where, leaf)
                    name = shared.setdefault(source.name, repr(place))
                    numbers[place] = (name, -1) if source.offset else (source.name, source.dim)
        tensors = {_place(value): varying.get(name, frozenset()) for value, name in sources.tensors.items()}
        inputs = {name: dims for name, dims in varying.items() if name in inputs}
        return HoleSites(
            dims=_joined(self.dims, inputs),
            numbers={**numbers, **self.numbers},
            tensors=_joined(self.tensors, {place: dims for place, dims in tensors.items() if place is not None}),
            gathers=self.gathers | {place for value in sources.gathers if (place := _place(value)) is not None},
        )

    def number_positions(self, script: Script, wholes: frozenset[str]) -> dict[Position, tuple[str, int]]:
        """Return where a script has a number at one of these places -> what it is."""
        return {
            (id(call), leaf): self.numbers[call.name, call.where, leaf]
            for call in script.calls(wholes)
            for leaf, value in enumerate(call.leaves)
            if type(value) is int and (call.name, call.where, leaf) in self.numbers
        }

    def host_tensors(self, script: Script, wholes: frozenset[str]) -> frozenset[Value]:
        """Return the host tensors of a script at these places."""
        return frozenset(value for value in _leaves(script, wholes) if value.host and _place(value) in self.tensors)

    def gathered(self, script: Script, wholes: frozenset[str]) -> dict[Value, Layout]:
        """Return the moved tensors of a script at these places -> how they are gathered."""
        found: dict[Value, Layout] = {}
        for value in _leaves(script, wholes):
            if not value.host and _place(value) in self.gathers:
                layout = next(layouts(value, wholes), None)
                if layout is not None:
                    found[value] = layout
        return found

    def dims_of(self, value: Value) -> frozenset[int]:
        """Return the dims of a host tensor that differ between batches."""
        place = _place(value)
        return self.tensors.get(place, frozenset()) if place is not None else frozenset()

    def dims_of_inputs(self, batch: Mapping[str, object]) -> dict[str, frozenset[int]]:
        """Return name of an input -> its dims that differ, for the tensors of a batch."""
        return {name: dims for name, dims in self.dims.items() if isinstance(batch.get(name), Tensor)}


def _place(value: Value) -> Place | None:
    if not value.origins or not value.origins[0][0].where:
        return None
    call, index = value.origins[0]
    return call.name, call.where, index


def _leaves(script: Script, wholes: frozenset[str]) -> list[Value]:
    leaves = (leaf for call in script.calls(wholes) for leaf in call.leaves if isinstance(leaf, Value))
    return list(dict.fromkeys([*leaves, script.loss]))


def _joined(one: Mapping[Any, frozenset[int]], other: Mapping[Any, frozenset[int]]) -> dict[Any, frozenset[int]]:
    return {key: one.get(key, frozenset()) | other.get(key, frozenset()) for key in (*one, *other)}
