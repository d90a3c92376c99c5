"""`Cost`: FLOPs, bytes and saved memory of every node and layer, under the model's real `requires_grad` flags.

Backward work of a node (thesis section 3.3.1): a weight gradient for each operand that is made of trainable parameters
only, an input gradient for each other operand that carries gradient, nothing if neither. Sizes are those of the
captured batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import fx

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.graph import Component, ModelGraph, annotate, info
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.gradient_flow import trainable_names
from mmcompile.passes.op_flops import op_flops
from mmcompile.passes.op_memory import is_view, saved_for_backward
from mmcompile.passes.values import aten_ops, num_bytes, op_name, storage_bytes, storage_of, tensors

Place = tuple[str, int]
"""(component, layer)."""

MEASURED = [field.name for field in fields(LayerCost) if field.name not in ("parameter_bytes", "trainable_bytes")]
LOOKUPS = aten_ops("embedding index index_select gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """What each layer of each component costs for one microbatch."""

    layers: Mapping[str, tuple[LayerCost, ...]]
    """Component -> one cost per layer. A shared node is counted in the first layer that needs it."""

    def __getitem__(self, component: str) -> tuple[LayerCost, ...]:
        return self.layers[component]

    def total(self) -> LayerCost:
        """Sum over all layers (`output_bytes` too: what crosses if every layer is a stage)."""
        costs = [cost for costs in self.layers.values() for cost in costs]
        return LayerCost(
            **{field.name: sum(getattr(cost, field.name) for cost in costs) for field in fields(LayerCost)}
        )

    def __str__(self) -> str:
        header = ("layer", "forward", "input grad", "weight grad", "[MFLOP]", "saved", "parameters", "output", "[KiB]")
        lines = ["{:<28}{:>12}{:>12}{:>13}{:>9}{:>12}{:>12}{:>12}{:>7}".format(*header)]
        for name, costs in self.layers.items():
            lines += [_row(f"{name}.{index}", cost) for index, cost in enumerate(costs)]
        lines.append(_row("total", self.total()))
        return "\n".join(lines)


def _row(label: str, cost: LayerCost) -> str:
    mflops = "".join(f"{flops / 1e6:>{width}.3f}" for flops, width in zip(_flops(cost), (12, 12, 13), strict=True))
    kib = "".join(f"{size / 1024:>12.2f}" for size in (cost.activation_bytes, cost.parameter_bytes, cost.output_bytes))
    return f"{label:<28}{mflops}{'':9}{kib}"


def _flops(cost: LayerCost) -> tuple[int, int, int]:
    return cost.forward_flops, cost.input_grad_flops, cost.weight_grad_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost(Analysis[CostTable]):
    """Sets `NodeInfo.*_flops` and `bytes_moved`, and returns the cost of every layer."""

    name: ClassVar[str] = "cost"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COST,)

    def run(self, graph: ModelGraph) -> CostTable:
        meter = _Meter(graph)
        places = _places(graph)
        sums: dict[Place, Counter[str]] = defaultdict(Counter)
        counted: set[int] = set()
        for node, place in places.items():
            work = meter.measure(node)
            annotate(
                node,
                forward_flops=work["forward_flops"],
                input_grad_flops=work["input_grad_flops"],
                weight_grad_flops=work["weight_grad_flops"],
                bytes_moved=work["forward_bytes"],
            )
            sums[place].update(work)
            saved = meter.saved(node)
            sums[place]["activation_bytes"] += sum(size for storage, size in saved.items() if storage not in counted)
            counted.update(saved)
        for place, size in _crossing(graph, places).items():
            sums[place]["output_bytes"] = size
        return CostTable(
            layers={component.name: _layer_costs(graph, component, sums) for component in graph.components}
        )


class _Meter:
    """Measures single nodes of one graph."""

    def __init__(self, graph: ModelGraph) -> None:
        fx_graph = graph.module.graph
        self._trainable = trainable_names(graph)
        self._parameter_only = _made_of_attributes(fx_graph)
        attributes = [node for node in fx_graph.nodes if node.op == "get_attr" and "val" in node.meta]
        self._permanent = {storage_of(tensor) for node in attributes for tensor in tensors(node)}

    def carries(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether `node`'s backward makes a gradient for its input `source`."""
        if source.op == "call_function":
            return info(node).carries_gradient and info(source).carries_gradient
        return info(node).carries_gradient and source.op == "get_attr" and source.target in self._trainable

    def saved(self, node: fx.Node) -> dict[int, int]:
        """Storages that `node` keeps for backward, parameters and constants excluded."""
        if not info(node).carries_gradient:
            return {}
        kept = saved_for_backward(node, lambda source: self.carries(node, source))
        return {storage: size for storage, size in kept.items() if storage not in self._permanent}

    def measure(self, node: fx.Node) -> Counter[str]:
        """Forward and backward work of a node, by the field names of `LayerCost`."""
        flops = op_flops(node)
        work: Counter[str] = Counter(
            forward_flops=flops.forward, forward_bytes=0, input_grad_flops=0, weight_grad_flops=0
        )
        for operand, size in flops.operands:
            if self.carries(node, operand):
                work["weight_grad_flops" if operand in self._parameter_only else "input_grad_flops"] += size
        if any(self.carries(node, operand) for operand in flops.joint_operands):
            work["input_grad_flops"] += flops.joint
        if not is_view(node):
            work["forward_bytes"] += _forward_bytes(node)
            work["kernels"] += 1
            if info(node).carries_gradient:
                self._add_backward(node, [operand for operand, _ in flops.operands], work)
        return work

    def _add_backward(self, node: fx.Node, operands: list[fx.Node], work: Counter[str]) -> None:
        """Bytes and kernels: a product per operand; else one kernel reading what was saved."""
        out = sum(num_bytes(tensor) for tensor in tensors(node))
        wanted = [source for source in node.all_input_nodes if self.carries(node, source)]
        if operands:
            every_operand = sum(_node_bytes(operand) for operand in operands)
            work["backward_kernels"] += len(wanted)
            for source in wanted:
                work["backward_bytes"] += out + (every_operand if source in operands else _node_bytes(source))
        else:
            kept = saved_for_backward(node, lambda source: self.carries(node, source))
            work["backward_kernels"] += 1
            work["backward_bytes"] += out + sum(kept.values()) + sum(_node_bytes(source) for source in wanted)


def _node_bytes(node: fx.Node) -> int:
    return sum(min(num_bytes(tensor), storage_bytes(tensor)) for tensor in tensors(node))


def _forward_bytes(node: fx.Node) -> int:
    out = sum(num_bytes(tensor) for tensor in tensors(node))
    if op_name(node) in LOOKUPS:  # reads the rows it returns, not the whole table
        return 2 * out + sum(_node_bytes(source) for source in node.all_input_nodes[1:])
    return out + sum(_node_bytes(source) for source in node.all_input_nodes if "val" in source.meta)


def _made_of_attributes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes computed from parameters, buffers and constants only: their gradient is weight gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and all(source in found for source in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _places(graph: ModelGraph) -> dict[fx.Node, Place]:
    """Layer of every `call_function` node; a shared node has the layer of its first reader, or of the loss."""
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    order = {node: index for index, node in enumerate(nodes)}
    last: Place = (graph.loss_component, len(graph.component(graph.loss_component).layers) - 1)
    first_reader: dict[fx.Node, fx.Node] = {}
    for node in reversed(nodes):
        if not info(node).shared:
            first_reader[node] = node
            continue
        readers = [first_reader[user] for user in node.users if user in first_reader]
        if readers:
            first_reader[node] = min(readers, key=order.__getitem__)
    places: dict[fx.Node, Place] = {}
    for node in nodes:
        reader = first_reader.get(node)
        places[node] = last if reader is None else (str(info(reader).component), info(reader).layer)
    return places


def _crossing(graph: ModelGraph, places: Mapping[fx.Node, Place]) -> Counter[Place]:
    """(component, i) -> bytes made in layers <= i and read in its layers > i; for its last layer, read outside."""
    crossing: Counter[Place] = Counter()
    last = {component.name: len(component.layers) - 1 for component in graph.components}
    for node, (component, layer) in places.items():
        if info(node).shared:
            continue
        readers = [info(user) for user in node.users if user.op == "call_function" and not info(user).shared]
        size = sum(num_bytes(tensor) for tensor in tensors(node))
        for cut in range(
            layer, max((reader.layer for reader in readers if reader.component == component), default=layer)
        ):
            crossing[component, cut] += size
        if any(reader.component != component for reader in readers):
            crossing[component, last[component]] += size
    return crossing


def _layer_costs(graph: ModelGraph, component: Component, sums: Mapping[Place, Counter[str]]) -> tuple[LayerCost, ...]:
    specs = {name: spec for spec in graph.parameters for name in (spec.name, *spec.aliases)}
    costs = []
    for layer in component.layers:
        own = {specs[name].name: specs[name] for name in layer.parameters}.values()
        work = sums.get((component.name, layer.index), Counter())
        costs.append(
            LayerCost(
                **{name: work[name] for name in MEASURED},
                parameter_bytes=sum(spec.num_bytes for spec in own),
                trainable_bytes=sum(spec.num_bytes for spec in own if spec.trainable),
            )
        )
    return tuple(costs)
