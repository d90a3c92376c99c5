"""Source of a stage as readable Python.

It has a function for each kind of layer, called once a layer with tensors by their original names, a comment per
module, and our own loss and merge.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from mmcompile.codegen.canonical import canonical_layers
from mmcompile.codegen.cut import StageCut
from mmcompile.codegen.expressions import TAKEN, Expressions, comment, identifier, registering_imports, variable
from mmcompile.codegen.outline import NodeRun, module_paths, runs_of
from mmcompile.codegen.outline_text import LayerText, StageTensors
from mmcompile.codegen.weight_grad_inputs import products_of
from mmcompile.config import Recompute
from mmcompile.ir.graph import ModelGraph, Place
from mmcompile.passes.cost.deferred_weights import DeferredWeight

_HEADER = '''"""{title}

{notes}
"""

import math
import operator

import torch

import mmcompile.ir.nodes as mm
{imports}
aten = torch.ops.aten
'''
_SHARED = "shared values, computed in every stage that reads them"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChoices:
    """Options for writing layers: module paths, recomputation and deferred weight gradients."""

    names: Mapping[Place, str] = field(default_factory=dict)
    """Module path of each layer."""
    recompute: Mapping[Place, Recompute] = field(default_factory=dict)
    """Layer -> recomputation mode, for layers that recompute activations; other layers keep them."""
    deferred: Mapping[fx.Node, DeferredWeight] = field(default_factory=dict)
    """Product node -> its deferred weight gradient, for products whose weight gradient is computed after the backward."""


def layer_names(graph: ModelGraph) -> dict[Place, str]:
    """Return the module path of each layer of a model."""
    return {(component.name, layer.index): layer.name for component in graph.components for layer in component.layers}


def stage_source(
    part: StageCut,
    names: Mapping[fx.Node, str],
    constants: Mapping[fx.Node, str],
    results: Iterable[fx.Node],
    title: str,
    notes: str,
    *,
    trained: Container[str] = (),
    choices: LayerChoices | None = None,
) -> str:
    """Return the source text of one stage.

    Args:
        part: nodes that the stage runs.
        names: tensor node -> original parameter or buffer name, read as `self.t[name]`.
        constants: tensor node -> constant name, read as `self.c[name]`.
        results: nodes returned, in order.
        title: first line of the docstring.
        notes: further lines of the docstring.
        trained: names of trainable parameters.
        choices: options for writing layers.
    """
    results = list(results)
    tensors = StageTensors(names=names, constants=constants, trained=trained)
    writer = _Writer(
        tensors=tensors,
        choices=choices or LayerChoices(),
        results=frozenset(results),
        variables=frozenset(map(variable, (*part.roots, *part.received, *part.nodes))),
    )
    runs = runs_of(part.nodes, results)
    forward = list(writer.forward(runs))
    arguments = "".join(f", {variable(node)}" for node in (*part.roots, *part.received))
    text = [
        _HEADER.format(title=title, notes=notes, imports=_imports(part.nodes, writer.deferring)),
        *(f"\n\n{function}" for function in writer.functions()),
        f"\n\nclass Stage(StageModule):\n    def forward(self{arguments}):\n",
        *(f"        {line}\n" for line in forward),
        f"        return ({''.join(variable(node) + ', ' for node in results)})\n",
    ]
    return "".join(text)


@dataclass(kw_only=True, slots=True)
class _Function:
    """A generated layer function, and the names of the layers that call it, for a comment."""

    name: str
    first: LayerText
    prefix: str
    serves: list[str]


@dataclass(kw_only=True, slots=True)
class _Writer:
    """Writer of the source code of one stage, which collects the layer functions that its `forward` calls."""

    tensors: StageTensors
    choices: LayerChoices
    results: frozenset[fx.Node]
    variables: frozenset[str]
    """Python names of all values of the stage."""
    found: dict[str, _Function] = field(default_factory=dict)
    """Text of a layer function with numbers for names (`CanonicalLayer.text`) -> the layer function."""
    deferring: set[str] = field(default_factory=set)
    """Names of the functions of `mmcompile.codegen.weight_grad_split` that the stage calls."""

    def functions(self) -> Iterator[str]:
        """Return the source code of all layer functions, in the order of their first call."""
        for function in self.found.values():
            yield function.first.function(function.name, function.prefix, function.serves)

    def forward(self, runs: Iterable[NodeRun]) -> Iterator[str]:
        """Yield the source lines of the stage's `forward`, without its return statement."""
        runs = tuple(runs)
        last_reader = {node: at for at, run in enumerate(runs) for node in run.inputs}
        alive: list[fx.Node] = []
        for at, run in enumerate(runs):
            recompute = self._recompute(run)
            products = products_of(run, self.choices.deferred, recomputed=recompute != "none")
            layer = LayerText(run=run, tensors=self.tensors, products=products)
            self.deferring.update(name for product in products for name in product.functions)
            if run.is_inline:
                yield from self._inline(run)
                alive += run.nodes
            else:
                yield f"# {self._title(run)}"
                yield from layer.call(self._function(layer), recompute)
                alive += layer.returned
            dead = [n for n in alive if last_reader.get(n, at) <= at and n not in self.results]
            alive = [n for n in alive if last_reader.get(n, at) > at]
            if dead and at + 1 < len(runs):
                yield f"del {', '.join(map(variable, dead))}"

    def _inline(self, run: NodeRun) -> Iterator[str]:
        def name(node: fx.Node) -> str:
            return self.tensors.expression(node) if node.op == "get_attr" else variable(node)

        text = Expressions(name=name, device="self.device")
        for _, nodes in module_paths(run.nodes):
            yield f"# {comment(nodes[0])}"
            yield from (f"{variable(node)} = {text.call(node)}" for node in nodes)

    def _title(self, run: NodeRun) -> str:
        return _SHARED if run.place is None else self._path(run) or "the model's own forward"

    def _path(self, run: NodeRun) -> str:
        return self.choices.names.get(run.place, "") if run.place is not None else ""

    def _recompute(self, run: NodeRun) -> Recompute:
        return "none" if run.place is None else self.choices.recompute.get(run.place, "none")

    def _function(self, layer: LayerText) -> str:
        prefix, title = self._path(layer.run), self._title(layer.run)
        (canonical,) = canonical_layers(layer.function("layer", prefix, [title]), title).values()
        known = self.found.get(canonical.text)
        if known is None:
            name = self._free_name(layer.run)
            known = self.found[canonical.text] = _Function(name=name, first=layer, prefix=prefix, serves=[])
        known.serves.append(title)
        return known.name

    def _free_name(self, run: NodeRun) -> str:
        # `language_model_layer` for a numbered layer, `language_model_embed_tokens` for another.
        if run.place is None:
            base = "shared_values"
        else:
            leaf = self._path(run).rpartition(".")[2]
            base = identifier(f"{run.place[0]}_{'layer' if leaf.isdecimal() or not leaf else leaf}")
        used = {function.name for function in self.found.values()} | TAKEN | self.variables
        numbers = (f"{base}_{number}" for number in range(2, len(used) + 3))
        return next(name for name in (base, *numbers) if name not in used)


def _imports(nodes: Iterable[fx.Node], deferring: Iterable[str]) -> str:
    names = ", ".join(sorted(deferring))
    split = f"from mmcompile.codegen.weight_grad_split import {names}\n" if names else ""
    return f"{registering_imports(nodes)}{split}from mmcompile.codegen.stage_module import StageModule\n"
