"""Pass `Verify`: a table of the rules that every `ModelGraph` keeps. A broken rule is a bug of mmcompile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import torch
from torch import fx

from mmcompile.errors import VerifyError
from mmcompile.ir.compat import HigherOrderOperator, OpOverload
from mmcompile.ir.graph import META_KEY, CaptureMode, ModelGraph, dtype_name, info
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.gradient_flow import is_no_grad_region, trainable_names
from mmcompile.passes.text import around, layer_text
from mmcompile.passes.values import aliased, op_name, tensors, written

_KNOWN_OPS = ("placeholder", "get_attr", "call_function", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One breach of a rule in a graph: the message, and the node at which the rule is broken, or None."""

    message: str
    node: fx.Node | None = None


GraphRule = Callable[[ModelGraph], Iterator[Violation]]
"""Function that yields the violations, in a graph, of a property that every graph must have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify(Analysis[str]):
    """Pass that checks every rule of a graph; the first violation raises VerifyError."""

    name: ClassVar[str] = "verify"
    requires: ClassVar[tuple[Fact, ...]] = ()
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.VERIFIED)

    def run(self, graph: ModelGraph) -> str:
        """Check all rules, and return the numbers of rules and nodes as text.

        Raises:
            VerifyError: a rule is broken; the message has the rule, and the node with five lines around it.
        """
        for name, rule in _RULES.items():
            for violation in rule(graph):
                where = f"\n{around(violation.node)}" if violation.node is not None else ""
                raise VerifyError(f"{graph.name} breaks rule {name}: {violation.message}{where}")
        return f"{len(_RULES)} rules hold over {len(graph.module.graph.nodes)} nodes"


def _annotated(graph: ModelGraph) -> Iterator[Violation]:
    for node in graph.module.graph.nodes:
        if node.op not in _KNOWN_OPS:
            yield Violation(message=f"{node.name} is a {node.op}; nodes are {', '.join(_KNOWN_OPS)}", node=node)
        elif node.op == "call_function" and META_KEY not in node.meta:
            yield Violation(message=f"{node.name} has no NodeInfo", node=node)
        elif node.op in ("placeholder", "call_function") and "val" not in node.meta:
            yield Violation(message=f"{node.name} has no recorded value (node.meta['val'])", node=node)


def _place(graph: ModelGraph) -> Iterator[Violation]:
    layers = {component.name: len(component.layers) for component in graph.components}
    for node in graph.calls:
        note = info(node)
        if note.component is not None and note.component not in layers:
            message = f"{node.name} is in component {note.component!r}; components are {', '.join(layers)}"
            yield Violation(message=message, node=node)
        elif note.component is not None and not 0 <= note.layer < layers[note.component]:
            message = f"{node.name} is in {layer_text(node)}, which has {layers[note.component]} layers"
            yield Violation(message=message, node=node)
    for component in graph.components:
        indices = [layer.index for layer in component.layers]
        if indices != list(range(len(indices))):
            yield Violation(message=f"layers of {component.name} are numbered {indices}, not 0 to {len(indices) - 1}")


def _layer_order(graph: ModelGraph) -> Iterator[Violation]:
    for node in graph.calls:
        note = info(node)
        for source in node.all_input_nodes:
            if source.op != "call_function" or note.shared or info(source).component != note.component:
                continue
            later = info(source).layer
            if later > note.layer:
                message = f"{node.name} ({layer_text(node)}) reads {source.name} of later layer {later}"
                yield Violation(message=message, node=node)


def _component_dag(graph: ModelGraph) -> Iterator[Violation]:
    dag = graph.dag()
    if not nx.is_directed_acyclic_graph(dag):
        yield Violation(message=f"components form a cycle: {' -> '.join(str(edge[0]) for edge in nx.find_cycle(dag))}")
        return
    sinks = sorted(name for name, degree in dag.out_degree() if degree == 0)
    if len(sinks) != 1:
        yield Violation(message=f"components {', '.join(sinks)} have no consumer; exactly one ends in the loss")
    real, readers = _real_edges(graph)
    stated = {(producer, consumer): set(names) for producer, consumer, names in graph.edges}
    for pair in sorted(real.keys() | stated.keys()):
        if real.get(pair) != stated.get(pair):
            wanted, got = (", ".join(sorted(edges.get(pair, ()))) or "nothing" for edges in (real, stated))
            message = f"edge {pair[0]} -> {pair[1]} is stated with {got} but the nodes read {wanted}"
            yield Violation(message=message, node=readers.get(pair))


def _real_edges(graph: ModelGraph) -> tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], fx.Node]]:
    """Return two mappings with keys (producer, consumer): to the names of the tensors that flow, and to one reading node."""
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    readers: dict[tuple[str, str], fx.Node] = {}
    for node in graph.calls:
        for source in node.all_input_nodes:
            if source.op == "call_function" and not info(source).shared and not info(node).shared:
                pair = (str(info(source).component), str(info(node).component))
                if pair[0] != pair[1]:
                    edges[pair].add(source.name)
                    readers.setdefault(pair, node)
    return dict(edges), readers


def _shared(graph: ModelGraph) -> Iterator[Violation]:
    trainable = trainable_names(graph)
    for node in graph.calls:
        if not info(node).shared:
            continue
        for source in node.all_input_nodes:
            reason = None
            if source.op == "call_function" and not info(source).shared:
                reason = f"a node of {info(source).component}"
            elif source.op == "get_attr" and source.target in trainable:
                reason = "a parameter that trains"
            elif source.op == "placeholder" and not source.meta.get("from_integers", False):
                # Floats that the host computes from integers (interpolation weights) are shared, too.
                floating = any(tensor.is_floating_point() for tensor in tensors(source))
                reason = "a float input" if floating else None
            if reason:
                yield Violation(message=f"shared node {node.name} reads {source.name}, {reason}", node=node)


def _parameters(graph: ModelGraph) -> Iterator[Violation]:
    module = dict(graph.module.named_parameters(remove_duplicate=False))
    stated = graph.specs
    for spec in graph.parameters:
        if not module.keys() & {spec.name, *spec.aliases}:
            yield Violation(message=f"parameter {spec.name} is stated but the module has none of that name")
    for name in sorted(module.keys() - stated.keys()):
        yield Violation(message=f"the module has parameter {name} but it is not stated")
    for name in sorted(stated.keys() & module.keys()):
        spec, value = stated[name], module[name]
        if tuple(value.shape) != spec.shape or dtype_name(value.dtype) != spec.dtype:
            got = f"{dtype_name(value.dtype)}{list(value.shape)}"
            yield Violation(message=f"parameter {name} is stated as {spec.dtype}{list(spec.shape)} but is {got}")
    for component in graph.components:
        for layer in component.layers:
            for name in sorted(set(layer.parameters) - stated.keys()):
                message = f"layer {layer.name} of {component.name} lists parameter {name}, which is not stated"
                yield Violation(message=message)


def _tied(graph: ModelGraph) -> Iterator[Violation]:
    counts = Counter(name for spec in graph.parameters for name in (spec.name, *spec.aliases))
    for name in sorted(name for name, count in counts.items() if count > 1):
        yield Violation(
            message=f"parameter {name} is stated {counts[name]} times; a tied parameter is one spec with aliases"
        )
    module = dict(graph.module.named_parameters(remove_duplicate=False))
    for spec in graph.parameters:
        names = [name for name in (spec.name, *spec.aliases) if name in module]
        for alias in names[1:]:
            if module[alias] is not module[names[0]]:
                yield Violation(message=f"{alias} is stated as tied to {names[0]} but is another tensor")


def _output(graph: ModelGraph) -> Iterator[Violation]:
    node = graph.module.graph.output_node()
    results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
    wanted = ("loss sum", "valid tokens") if graph.loss.per_token else ("loss",)
    if len(results) != len(wanted):
        yield Violation(message=f"the graph returns {len(results)} values, wanted ({', '.join(wanted)})", node=node)
        return
    for label, value in zip(wanted, results, strict=True):
        found = tensors(value) if isinstance(value, fx.Node) else ()
        floating = label != "valid tokens"
        if len(found) != 1 or found[0].dim() != 0 or found[0].is_floating_point() != floating:
            kind = "float" if floating else "integer"
            yield Violation(
                message=f"{label} must be one {kind} scalar, got {value}",
                node=value if isinstance(value, fx.Node) else node,
            )


def _static_shapes(graph: ModelGraph) -> Iterator[Violation]:
    """Yield a violation for each op whose result has a size that depends on values unknown at capture, and so cannot be sent."""
    for node in graph.calls:
        if not _data_dependent(node):
            continue
        varying = [size for tensor in tensors(node) for size in tensor.shape if isinstance(size, torch.SymInt)]
        unknown = any(size.node.hint is None for size in varying)
        if unknown or (graph.mode is CaptureMode.SYMBOLIC and not info(node).shared):
            message = f"the shape of {node.name} depends on values ({op_name(node)}); fold or pad it at capture"
            yield Violation(message=message, node=node)


def _data_dependent(node: fx.Node) -> bool:
    if op_name(node) == "aten.index":  # tagged dynamic for the sake of boolean indices only
        indices = [index for index in node.args[1] if isinstance(index, fx.Node)]  # type: ignore[union-attr]
        return any(tensors(index)[0].dtype in (torch.bool, torch.uint8) for index in indices)
    return isinstance(node.target, OpOverload) and torch.Tag.dynamic_output_shape in node.target.tags


def _functional(graph: ModelGraph) -> Iterator[Violation]:
    """Yield a violation for each op that changes a value in place, except the model's buffers, which are state."""
    for node in graph.calls:
        for target in written(node):
            base = target
            while base.op == "call_function" and aliased(base):
                base = aliased(base)[0]
            if base.op != "get_attr" or base.target not in graph.buffers:
                yield Violation(message=f"{node.name} changes {target.name} in place ({op_name(node)})", node=node)


def _regions(graph: ModelGraph) -> Iterator[Violation]:
    for node in graph.calls:
        if isinstance(node.target, HigherOrderOperator) and not is_no_grad_region(node):
            message = f"{node.name} is a {op_name(node)}; of the ops that hold a graph only no_grad is known"
            yield Violation(message=message, node=node)


_RULES: Mapping[str, GraphRule] = {
    "annotated": _annotated,
    "place": _place,
    "layer-order": _layer_order,
    "component-dag": _component_dag,
    "shared": _shared,
    "parameters": _parameters,
    "tied": _tied,
    "output": _output,
    "static-shapes": _static_shapes,
    "functional": _functional,
    "regions": _regions,
}
"""Rules by name, in the order in which they are checked: a rule may rely on the earlier ones."""
