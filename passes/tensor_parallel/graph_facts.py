"""Facts of a graph that sharding needs: projections (products with a weight) and values that carry gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import fx

from mmcompile.ir.graph import ModelGraph, info, reached
from mmcompile.ir.nodes import token_loss
from mmcompile.passes.cost.op_flops import keys_and_values
from mmcompile.passes.gradient_flow import trainable_names
from mmcompile.passes.values import aten_ops, op_name, shape

_CASTS = aten_ops("to _to_copy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A product of activations [..., inputs] with a two-dimensional weight."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    output_dim: int
    """Dim of the weight that runs over outputs; the other one runs over inputs."""


def projection(node: fx.Node) -> Projection | None:
    """Return the projection that a node computes, as linear or as matmul with a weight; None for other ops."""
    name = op_name(node) if node.op == "call_function" else ""
    if name == "aten.linear":
        source, weight, *bias = node.args
        return _projection(source, weight, (*bias, node.kwargs.get("bias"), None)[0], 0)
    if name == "aten.addmm" and not node.kwargs:
        bias, source, weight = node.args
        return _projection(source, weight, bias, 1)
    if name in ("aten.mm", "aten.matmul"):
        source, weight = node.args
        return _projection(source, weight, None, 1)
    return None


def uncast(node: fx.Node) -> fx.Node:
    """Return the node whose value `node` has in another dtype, as autocast's casts of weights; `node` if it is no cast."""
    while node.op == "call_function" and op_name(node) in _CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _projection(source: object, weight: object, bias: object, output_dim: int) -> Projection | None:
    if not isinstance(source, fx.Node) or not isinstance(weight, fx.Node) or uncast(weight).op != "get_attr":
        return None
    if len(shape(weight)) != 2 or isinstance(bias, fx.Node) and len(shape(bias)) != 1:
        return None
    return Projection(
        source=source, weight=weight, bias=bias if isinstance(bias, fx.Node) else None, output_dim=output_dim
    )


@dataclass(kw_only=True, slots=True)
class GraphFacts:
    """Looks up layers, parameters and readers of a graph whose `carries_gradient` is set; computed once for all degrees."""

    graph: ModelGraph
    tables: Set[str] = frozenset()
    """First names of parameters that are known to be tables of token embeddings."""
    layers: Mapping[tuple[str, int], Sequence[fx.Node]] = field(init=False)
    """(component, layer) -> its call nodes in graph order."""
    parameters: Mapping[str, str] = field(init=False)
    """Name or alias of a parameter -> the parameter's first name."""
    readers: Mapping[str, Sequence[tuple[fx.Node, fx.Node]]] = field(init=False)
    """First name of a parameter -> pairs (node that reads it, the `get_attr` node through which it is read)."""
    uses: Mapping[str, Sequence[tuple[fx.Node, fx.Node]]] = field(init=False)
    """Same pairs as `readers`, but the readers of a cast of the parameter, each with the cast, in place of the cast."""
    losses: Sequence[fx.Node] = field(init=False)
    """Nodes of the graph that compute the token loss from logits."""
    _trainable: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        readers: dict[str, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
        self.layers = self.graph.layer_nodes()
        self.parameters = {name: spec.name for name, spec in self.graph.specs.items()}
        self._trainable = trainable_names(self.graph)
        for node in self.graph.module.graph.nodes:
            if node.op == "get_attr" and node.target in self.parameters:
                readers[self.parameters[str(node.target)]] += [(user, node) for user in node.users]
        self.readers = dict(readers)
        self.uses = {name: [use for pair in pairs for use in _uses(*pair)] for name, pairs in readers.items()}
        self.losses = [node for node in self.graph.calls if node.target is token_loss]

    def carries(self, node: fx.Node) -> bool:
        """Return whether gradient passes through a node's value."""
        if node.op == "get_attr":
            return node.target in self._trainable
        return node.op == "call_function" and info(node).carries_gradient

    def is_parameter(self, node: fx.Node) -> bool:
        """Return whether a node is the `get_attr` node of a parameter, or a cast of one."""
        return uncast(node).op == "get_attr" and uncast(node).target in self.parameters

    def name_of(self, node: fx.Node) -> str:
        """Return the first name of the parameter that a node reads or casts."""
        return self.parameters[str(uncast(node).target)]


def _uses(reader: fx.Node, source: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    cast = reader.op == "call_function" and op_name(reader) in _CASTS
    return [use for user in reader.users for use in _uses(user, reader)] if cast else [(reader, source)]


@dataclass(kw_only=True, slots=True)
class LayerFacts:
    """Looks up facts of one layer during the search for regions: sets of nodes whose values are sharded over ranks."""

    whole: GraphFacts
    nodes: Sequence[fx.Node]
    members: Set[fx.Node] = field(init=False)
    taken: set[fx.Node] = field(default_factory=set)
    """Nodes found so far that run sharded: those of regions, and token embeddings."""
    refused: set[fx.Node] = field(default_factory=set)
    """Projections that were found to be impossible to shard."""
    head_counts: Set[int] = field(init=False)
    """Numbers of heads that the layer's attention ops have, for error messages."""

    def __post_init__(self) -> None:
        self.members = frozenset(self.nodes)
        attention = [node for node in self.nodes if keys_and_values(node)]
        sizes = [shape(source) for node in attention for source in node.all_input_nodes[:3]]
        self.head_counts = {own[-3] for own in sizes if len(own) >= 3}

    def projections_of(self, value: fx.Node, count: int) -> list[fx.Node]:
        """Return nearest projections that `value` is made from, not `taken` or `refused`, with outputs divisible by `count`."""

        def before(node: fx.Node) -> Iterable[fx.Node]:
            return node.all_input_nodes if node in self.members and projection(node) is None else ()

        found = [node for node in reached([value], before) if node in self.members and projection(node) is not None]
        return [node for node in found if node not in self.taken | self.refused and shape(node)[-1] % count == 0]

    def counted(self, number: int) -> str:
        """Format a number for messages: `20 heads` if the layer's attention has as many heads or key/value heads; else `20`."""
        return f"{number} heads" if any(heads % number == 0 for heads in self.head_counts) else str(number)
