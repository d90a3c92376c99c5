"""`GradientFlow`: nodes through which gradient passes, and parameters that receive one.

A node carries gradient if an input carries gradient or a parameter it reads is trainable (thesis section 3.3.1, Eq.
3.1-3.3: p(L) = trainable(L) or p(any input of L)), *and* the loss depends on it through differentiable nodes. The
second half makes the answer exact: a trainable parameter on which the loss does not depend gets no gradient, and no
stage waits for its gradient.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ModelGraph, annotate, info, reached
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.values import aten_ops, op_name, tensors

# Float results without history in autograd. Not floor or sign: their gradient is zero, not absent.
_NOT_DIFFERENTIABLE = aten_ops(
    "detach zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty "
    "new_empty_strided empty_strided zeros ones full empty arange linspace scalar_tensor nextafter heaviside histc"
)
_SET_GRAD_REGION = "wrap_with_set_grad_enabled"
SET_GRAD_SWITCH = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentGradient:
    """Numbers of parameters and nodes of one component that train or have a gradient."""

    component: str
    trainable: int
    """Number of trainable parameters in the component's layers."""
    receiving: int
    """Number of parameters in the component's layers that receive a gradient."""
    nodes: int
    carrying: int
    """Number of nodes of the component through which gradient passes; 0 if the component only runs forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientReport:
    """Parameters, component edges and components through which gradient flows."""

    parameters_with_gradient: frozenset[str]
    """Original names of parameters with gradient; a tied parameter appears once, under its first name."""
    unused: frozenset[str]
    """Trainable parameters on which the loss does not depend: their `.grad` stays None."""
    components: tuple[ComponentGradient, ...]
    edges: tuple[tuple[str, str, bool], ...]
    """One entry (producer, consumer, True if gradient flows back) for each edge of the component DAG."""

    def __str__(self) -> str:
        lines = [
            f"{row.component}: {row.carrying} of {row.nodes} nodes carry gradient, "
            f"{row.receiving} of {row.trainable} trainable parameters receive one"
            for row in self.components
        ]
        lines += [
            f"{producer} -> {consumer}: {'gradient' if flows else 'forward only'}"
            for producer, consumer, flows in self.edges
        ]
        lines += [f"unused: {name}" for name in sorted(self.unused)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientFlow(Analysis[GradientReport]):
    """Pass that sets `NodeInfo.carries_gradient` and returns the components and parameters that receive gradient."""

    name: ClassVar[str] = "gradient-flow"
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.GRADIENT_FLOW,)

    def run(self, graph: ModelGraph) -> GradientReport:
        """Annotate the nodes that carry gradient, and return the report."""
        fx_graph = graph.module.graph
        trainable = trainable_names(graph)
        requiring = _requires_grad(fx_graph, trainable.keys())
        loss = _loss_node(fx_graph)
        flowing = reached({loss} & requiring, lambda node: [s for s in node.all_input_nodes if s in requiring]).keys()
        for node in graph.calls:
            annotate(node, carries_gradient=node in flowing)
        receiving = frozenset(trainable[str(node.target)] for node in flowing if node.op == "get_attr")
        return _report(graph, flowing, receiving, frozenset(trainable.values()))


def trainable_names(graph: ModelGraph) -> dict[str, str]:
    """Return a mapping from every name of a trainable parameter, aliases included, to the parameter's first name."""
    return {name: spec.name for spec in graph.parameters if spec.trainable for name in (spec.name, *spec.aliases)}


def makes_gradient(node: fx.Node, source: fx.Node, trainable: Container[str]) -> bool:
    """Return whether the backward of `node` makes a gradient for its input `source`; `trainable`: parameters that train."""
    if not info(node).carries_gradient:
        return False
    if source.op == "call_function":
        return info(source).carries_gradient
    return source.op == "get_attr" and str(source.target) in trainable


def _loss_node(graph: fx.Graph) -> fx.Node:
    result = graph.output_node().args[0]
    first = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(first, fx.Node):
        raise VerifyError(f"the graph returns {result!r}; the first result must be the loss")
    return first


def is_no_grad_region(node: fx.Node) -> bool:
    """Return whether a node is a `torch.no_grad()` block, which torch.export keeps as one node with a graph of its own."""
    return op_name(node) == _SET_GRAD_REGION and node.args[0] is False


def _requires_grad(graph: fx.Graph, trainable: Iterable[str]) -> set[fx.Node]:
    names = frozenset(trainable)
    requiring: set[fx.Node] = set()
    enabled = True
    for node in graph.nodes:
        if node.op == "get_attr":
            if node.target in names:
                requiring.add(node)
        elif node.op == "call_function":
            if node.target is SET_GRAD_SWITCH:
                enabled = bool(node.args[0])
            elif enabled and _differentiable(node) and any(source in requiring for source in node.all_input_nodes):
                requiring.add(node)
    return requiring


def _differentiable(node: fx.Node) -> bool:
    if op_name(node) in _NOT_DIFFERENTIABLE or is_no_grad_region(node):
        return False
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors(node))


def _report(
    graph: ModelGraph, flowing: Set[fx.Node], receiving: frozenset[str], trainable: frozenset[str]
) -> GradientReport:
    names = {node.name: node for node in graph.module.graph.nodes}
    specs, components = graph.specs, []
    for component in graph.components:
        own = {specs[parameter].name for layer in component.layers for parameter in layer.parameters}
        nodes = [node for node in graph.calls if info(node).component == component.name]
        components.append(
            ComponentGradient(
                component=component.name,
                trainable=len(own & trainable),
                receiving=len(own & receiving),
                nodes=len(nodes),
                carrying=sum(node in flowing for node in nodes),
            )
        )
    edges = tuple(
        (producer, consumer, any(names[tensor] in flowing for tensor in flowing_names if tensor in names))
        for producer, consumer, flowing_names in graph.edges
    )
    return GradientReport(
        parameters_with_gradient=receiving, unused=trainable - receiving, components=tuple(components), edges=edges
    )
