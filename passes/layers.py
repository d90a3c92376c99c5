"""`Layers`: the units a plan can move, with their sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from mmcompile.ir.graph import ComponentKind, ModelGraph, info
from mmcompile.passes.base import Analysis, Fact


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer of one component."""

    component: str
    kind: ComponentKind
    index: int
    name: str
    """Module path."""
    nodes: int
    """Number of `call_function` nodes; shared ones belong to no layer."""
    parameters: int
    """Number of parameter elements. A parameter that two layers read counts in both."""
    trainable: int
    """Number of elements that train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTable:
    """All layers, in the order of the components."""

    rows: tuple[LayerRow, ...]
    shared_nodes: int
    """Number of nodes that every stage may compute again: masks, positions, rotary tables."""

    def of(self, component: str) -> tuple[LayerRow, ...]:
        """Return the layers of one component; empty if there is no such component."""
        return tuple(row for row in self.rows if row.component == component)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0) + 2
        labels = [f"{row.component}.{row.index}" for row in self.rows]
        first = max((len(label) for label in [*labels, "shared"]), default=0) + 2
        lines = [f"{'':<{first}}{'module':<{width}}{'nodes':>7}{'parameters':>16}{'trainable':>16}"]
        lines += [
            f"{label:<{first}}{row.name:<{width}}{row.nodes:>7}{row.parameters:>16,}{row.trainable:>16,}"
            for label, row in zip(labels, self.rows, strict=True)
        ]
        return "\n".join([*lines, f"{'shared':<{first}}{'':<{width}}{self.shared_nodes:>7}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers(Analysis[LayerTable]):
    """Counts nodes and parameters of every layer."""

    name: ClassVar[str] = "layers"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED,)
    ensures: ClassVar[tuple[Fact, ...]] = ()

    def run(self, graph: ModelGraph) -> LayerTable:
        """Return the table of layers."""
        annotations = [info(node) for node in graph.module.graph.nodes if node.op == "call_function"]
        nodes = Counter((note.component, note.layer) for note in annotations)
        specs = {name: spec for spec in graph.parameters for name in (spec.name, *spec.aliases)}
        rows = []
        for component in graph.components:
            for layer in component.layers:
                own = {specs[name].name: specs[name] for name in layer.parameters}.values()
                rows.append(
                    LayerRow(
                        component=component.name,
                        kind=component.kind,
                        index=layer.index,
                        name=layer.name,
                        nodes=nodes[component.name, layer.index],
                        parameters=sum(spec.num_elements for spec in own),
                        trainable=sum(spec.num_elements for spec in own if spec.trainable),
                    )
                )
        return LayerTable(rows=tuple(rows), shared_nodes=sum(note.shared for note in annotations))
