"""`Cost`: FLOPs, bytes and saved memory of every node and layer, under the model's real `requires_grad` flags.

Backward work of a node (thesis section 3.3.1): a weight gradient for each operand that is made of trainable parameters
only, an input gradient for each other operand that carries gradient. Amounts are those of the captured batch, kept
apart by what they grow with (`op_load`), so that one capture prices every load.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.compat import storage_of
from mmcompile.ir.functional import changed_buffers
from mmcompile.ir.graph import Component, ModelGraph, Place, annotate, info
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.cost.cost_table import SIZED, CostTable, GrowingCost
from mmcompile.passes.cost.op_backward import backward_kernels, is_joint
from mmcompile.passes.cost.op_flops import ATTENTION, keys_and_values, op_flops
from mmcompile.passes.cost.op_load import Growth, Growths, captured_sequences, load_of
from mmcompile.passes.cost.op_memory import EXCHANGES, Saved, is_view, saved_for_backward
from mmcompile.passes.gradient_flow import makes_gradient, trainable_names
from mmcompile.passes.values import aten_ops, needing_layers, num_bytes, op_name, storage_bytes, tensors

Work = Counter[tuple[str, Growth]]
"""Amounts by (field of `LayerCost`, growth with the load)."""

_EXCHANGES = {f"mmcompile.{name}" for name in EXCHANGES}
_LOOKUPS = aten_ops("embedding index index_select gather")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost(Analysis[CostTable]):
    """Pass that sets `NodeInfo.*_flops` and `bytes_moved`, and returns the cost of every layer."""

    name: ClassVar[str] = "cost"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COST,)

    def run(self, graph: ModelGraph) -> CostTable:
        """Set the cost fields of every node, and return the cost of every layer."""
        places = _places(graph)
        fixed = _made_of_attributes(graph.module.graph)
        members: dict[str, list[fx.Node]] = {component.name: [] for component in graph.components}
        for node, (component, _) in places.items():
            if node not in fixed:
                members[component].append(node)
        sequences = captured_sequences(graph, members)
        growths = {name: Growths(found, fixed) for name, found in sequences.items()}
        meter = _Meter(graph, fixed)
        sums: dict[Place, Work] = defaultdict(Counter)
        for node, place in places.items():
            work = meter.measure(node, growths[place[0]])
            annotate(
                node,
                forward_flops=_total(work, "forward_flops"),
                input_grad_flops=_total(work, "input_grad_flops"),
                weight_grad_flops=_total(work, "weight_grad_flops"),
                bytes_moved=_total(work, "forward_bytes"),
            )
            sums[place].update(work)
        _add_kept(meter, places, growths, sums)
        _keep_stateful(places, sums)
        _add_crossing(graph, places, growths, sums)
        growing = {component.name: _growing(graph, component, sums) for component in graph.components}
        loads = {name: load_of(found) for name, found in sequences.items()}
        return CostTable(
            layers={name: tuple(cost.total for cost in costs) for name, costs in growing.items()},
            loads=loads,
            growing=growing,
            captured_loads=loads,
        )


def _total(work: Work, name: str) -> int:
    return sum(work[name, growth] for growth in Growth)


class _Meter:
    """Measures the work and memory of single nodes of a graph.

    Args:
        graph: graph whose nodes have the notes of the pass gradient-flow.
        fixed: nodes made of parameters, buffers and constants only.
    """

    def __init__(self, graph: ModelGraph, fixed: set[fx.Node]) -> None:
        self._trainable = trainable_names(graph)
        self._fixed = fixed
        attributes = [node for node in graph.module.graph.nodes if node.op == "get_attr" and "val" in node.meta]
        self._permanent = {storage_of(tensor) for node in attributes for tensor in tensors(node)}

    def carries(self, node: fx.Node, source: fx.Node) -> bool:
        return makes_gradient(node, source, self._trainable)

    def saved(self, node: fx.Node) -> dict[int, Saved]:
        """Return storage id -> memory that `node` keeps for its backward; parameters and constants are left out."""
        if not info(node).carries_gradient:
            return {}
        kept = saved_for_backward(node, lambda source: self.carries(node, source))
        return {storage: saved for storage, saved in kept.items() if storage not in self._permanent}

    def held(self, node: fx.Node, *, whole: bool) -> dict[int, Saved]:
        """Return storage id -> memory of a node's value, parameters left out. If `whole`, a view counts all of its storage."""
        if "val" not in node.meta:
            return {}
        return {
            storage_of(tensor): Saved(num_bytes=storage_bytes(tensor) if whole else num_bytes(tensor), owner=node)
            for tensor in tensors(node)
            if storage_of(tensor) not in self._permanent
        }

    def measure(self, node: fx.Node, growths: Growths) -> Work:
        flops, growth, work = op_flops(node), growths.work(node), Work()
        work["forward_flops", growth] += flops.forward
        for operand, size in flops.operands:
            if self.carries(node, operand):
                work["weight_grad_flops" if operand in self._fixed else "input_grad_flops", growth] += size
        if any(self.carries(node, operand) for operand in flops.joint_operands):
            work["input_grad_flops", growth] += flops.joint
        if not is_view(node):
            work["kernels", Growth.FIXED] += 1
            results = sum(map(num_bytes, tensors(node)))
            is_lookup = op_name(node) in _LOOKUPS  # reads the rows it returns, not the whole table
            work["forward_bytes", growths.size(node)] += 2 * results if is_lookup else results
            _add_bytes("forward_bytes", node.all_input_nodes[1 if is_lookup else 0 :], growths, work)
        if info(node).carries_gradient:
            self._add_backward(node, growths, work)
        _add_shares(node, growths, work)
        return work

    def _add_backward(self, node: fx.Node, growths: Growths, work: Work) -> None:
        kernels = backward_kernels(node, self.carries)
        if is_joint(node):
            kernels.append([node, *(source for source in node.all_input_nodes if self.carries(node, source))])
            for saved in saved_for_backward(node, lambda source: self.carries(node, source)).values():
                work["backward_bytes", growths.size(saved.owner)] += saved.num_bytes
        work["backward_kernels", Growth.FIXED] += len(kernels)
        for kernel in kernels:
            _add_bytes("backward_bytes", kernel, growths, work)


def _add_bytes(name: str, nodes: Iterable[fx.Node], growths: Growths, work: Work) -> None:
    for node in nodes:
        if "val" in node.meta:
            size = sum(min(num_bytes(tensor), storage_bytes(tensor)) for tensor in tensors(node))
            work[name, growths.size(node)] += size


def _is_kept(node: fx.Node) -> bool:
    """Return whether selective recomputation keeps a node's result: a product, convolution, attention or `tp_*` collective."""
    return bool(op_flops(node).forward) or op_name(node) in _EXCHANGES


def _add_shares(node: fx.Node, growths: Growths, work: Work) -> None:
    """Add to `work`, the work of one node, the fields that count a share of it once more.

    For attention: its FLOPs, and the bytes of keys and values. If selective recomputation keeps the node's result: `kept_*`, the
    bytes and kernels of its forward.
    """
    growth = growths.work(node)
    if op_name(node) in ATTENTION or growth == Growth.SQUARES:
        work["attention_flops", growth] = work["forward_flops", growth]
        work["attention_backward_flops", growth] = work["input_grad_flops", growth]
        keys = keys_and_values(node) or [operand for operand, _ in op_flops(node).operands[1:]]
        _add_bytes("kv_bytes", keys, growths, work)
    if _is_kept(node):
        for growth in Growth:
            work["kept_forward_bytes", growth] = work["forward_bytes", growth]
        work["kept_kernels", Growth.FIXED] = work["kernels", Growth.FIXED]


@dataclass(kw_only=True, slots=True)
class _Read:
    """Memory that layers of a component read but do not make.

    `first` and `last` are the indices of the first and the last layer that reads it.
    """

    saved: Saved
    first: int
    last: int


def _add_kept(
    meter: _Meter, places: Mapping[fx.Node, Place], growths: Mapping[str, Growths], sums: Mapping[Place, Work]
) -> None:
    """Add to `sums` the memory kept until each layer's backward, for each recomputation mode; a storage is counted once."""
    repeated = {
        place for place, work in sums.items() if _total(work, "input_grad_flops") + _total(work, "weight_grad_flops")
    }
    outside = _before_layers(places)
    savers: dict[int, Place] = {}
    counted: set[tuple[str, str, int]] = set()
    read: dict[tuple[str, int], _Read] = {}

    def count(name: str, place: Place, scope: str, kept: Mapping[int, Saved]) -> None:
        for storage, saved in kept.items():
            if (name, scope, storage) not in counted:
                counted.add((name, scope, storage))
                sums[place][name, growths[place[0]].size(saved.owner)] += saved.num_bytes

    for node, place in places.items():
        saved_here = meter.saved(node)
        count("activation_bytes", place, "", saved_here)
        for storage in saved_here:
            savers.setdefault(storage, place)
        if place not in repeated or node in outside:
            continue
        # What comes from another component has its own copy here.
        for source in node.all_input_nodes:
            if places.get(source) != place or source in outside:
                kept = meter.held(source, whole=source not in places or places[source][0] == place[0])
                count("selective_bytes", place, place[0], kept)
                count("full_bytes", place, place[0], kept)
                for storage, saved in kept.items():
                    value = read.setdefault((place[0], storage), _Read(saved=saved, first=place[1], last=place[1]))
                    value.first, value.last = min(value.first, place[1]), max(value.last, place[1])
        if _is_kept(node):
            count("selective_bytes", place, place[0], meter.held(node, whole=True))
    for (component, storage), value in read.items():
        size = growths[component].size(value.saved.owner)
        for layer in range(value.first + 1, value.last + 1):
            sums[component, layer]["shared_bytes", size] += value.saved.num_bytes
        if value.first < value.last and savers.get(storage) != (component, value.first):
            sums[component, value.first]["unsaved_bytes", size] += value.saved.num_bytes


def _keep_stateful(places: Mapping[fx.Node, Place], sums: Mapping[Place, Work]) -> None:
    # A layer that changes a buffer must not run twice: every recomputation mode keeps all its activations.
    for place in {places[node] for node in changed_buffers(places).values()}:
        for growth in Growth:
            for name in ("selective_bytes", "full_bytes"):
                sums[place][name, growth] = sums[place]["activation_bytes", growth]


def _before_layers(places: Mapping[fx.Node, Place]) -> set[fx.Node]:
    shared = [node for node in places if info(node).shared]
    if not shared:
        return set()
    needing = needing_layers(shared[0].graph)
    return {node for node in shared if len(needing[node]) != 1}


def _made_of_attributes(graph: fx.Graph) -> set[fx.Node]:
    """Return nodes computed from parameters, buffers and constants only; a gradient of such a node is a weight gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _places(graph: ModelGraph) -> dict[fx.Node, Place]:
    """Return the layer to which the cost of each call is added: its own; for a shared value, the layer of its first reader.

    A shared value that no layer reads is added to the layer of the loss.
    """
    last: Place = (graph.loss_component, len(graph.component(graph.loss_component).layers) - 1)
    first_reader: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.calls):
        if not info(node).shared:
            first_reader[node] = node
        elif readers := [first_reader[user] for user in node.users if user in first_reader]:
            first_reader[node] = min(readers)
    found = {node: place for place, nodes in graph.layer_nodes().items() for node in nodes}
    return {node: found[first_reader[node]] if node in first_reader else last for node in graph.calls}


def _add_crossing(
    graph: ModelGraph, places: Mapping[fx.Node, Place], growths: Mapping[str, Growths], sums: Mapping[Place, Work]
) -> None:
    """Add `output_bytes` to the `sums` of each layer: bytes that are sent if the stage ends after this layer.

    The last layer's are those sent to other components.
    """
    last = {component.name: len(component.layers) - 1 for component in graph.components}
    for node, (component, layer) in places.items():
        if info(node).shared:
            continue
        readers = [info(user) for user in node.users if user.op == "call_function" and not info(user).shared]
        within = max((reader.layer for reader in readers if reader.component == component), default=layer)
        cuts = list(range(layer, within))
        cuts += [last[component]] if any(reader.component != component for reader in readers) else []
        for cut in cuts:
            sums[component, cut]["output_bytes", growths[component].size(node)] += sum(map(num_bytes, tensors(node)))


def _growing(graph: ModelGraph, component: Component, sums: Mapping[Place, Work]) -> tuple[GrowingCost, ...]:
    specs, costs = graph.specs, []
    for layer in component.layers:
        own = {specs[name].name: specs[name] for name in layer.parameters}.values()
        work = Counter(sums.get((component.name, layer.index), Work()))
        work["parameter_bytes", Growth.FIXED] = sum(spec.num_bytes for spec in own)
        work["trainable_bytes", Growth.FIXED] = sum(spec.num_bytes for spec in own if spec.trainable)
        parts = [LayerCost(**{name: work[name, growth] for name in SIZED}) for growth in Growth]
        costs.append(GrowingCost(fixed=parts[0], by_tokens=parts[1], by_squares=parts[2]))
    return tuple(costs)
