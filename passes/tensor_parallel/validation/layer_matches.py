"""`LayerMatches`: inputs and outputs of layers of a sharded graph, matched with those of the whole graph.

The pass tensor-parallel keeps the order of values: the n-th output of a sharded layer corresponds to the n-th output of
the whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ModelGraph, Place, info
from mmcompile.passes.values import op_name

_EXIT = "mmcompile.tp_exit"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMatches:
    """Correspondence between the values of a sharded graph and of the whole graph.

    Methods take the nodes of a layer in either graph, and return values as nodes of the whole graph.
    """

    whole: Mapping[Place, Sequence[fx.Node]]
    """(component, layer) -> its call nodes in graph order, in the whole graph."""
    sharded: Mapping[Place, Sequence[fx.Node]]
    _value_of: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, whole: ModelGraph, sharded: ModelGraph) -> LayerMatches:
        """Match nodes of a sharded graph with those of the whole graph: by name, and layer outputs by their order.

        Raises:
            VerifyError: a layer has different numbers of outputs in the two graphs.
        """
        before, after = whole.layer_nodes(), sharded.layer_nodes()
        names = {node.name: node for node in whole.module.graph.nodes}
        value_of = {node: node for node in whole.module.graph.nodes}
        value_of |= {node: names[node.name] for node in sharded.module.graph.nodes if node.name in names}
        for place, nodes in after.items():
            wanted, found = _leaving(before.get(place, ())), _leaving(nodes)
            if len(wanted) != len(found):
                names_of = [", ".join(node.name for node in own) for own in (found, wanted)]
                raise VerifyError(
                    f"layer {place[1]} of {place[0]} gives others {len(found)} values once sharded ({names_of[0]}), and "
                    f"{len(wanted)} before ({names_of[1]}); please report the model"
                )
            value_of |= zip(found, wanted, strict=True)
        return cls(whole=before, sharded=after, _value_of=value_of)

    def sources(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Return value from outside the layer -> nodes by which the layer's graph reads it: the value or its `tp_exit`."""
        members, found = set(nodes), dict[fx.Node, list[fx.Node]]()
        for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes):
            if source.op == "call_function" and source not in members:
                made = source.all_input_nodes[0] if op_name(source) == _EXIT else source
                found.setdefault(self._value_of[made], []).append(source)
        return found

    def outputs(self, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Return pairs (value that others read, as a node of the whole graph; the node of this layer that makes it)."""
        return [(self._value_of[node], node) for node in _leaving(nodes)]

    def ends(self, nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
        """Yield (value, node, foreign) for each gradient that enters the layer in the backward.

        It is the gradient of `value` (a node of the whole graph) and enters at `node`; `foreign`: another component sends it.
        """
        members = set(nodes)
        for value, node in self.outputs(nodes):
            exits = [user for user in node.users if _is_exit(user)]
            readers = [user for user in node.users if user not in members]
            foreign = {user.op == "call_function" and info(user).component != info(node).component for user in readers}
            if False in foreign:
                yield value, node, False
            if exits:
                yield value, exits[0], True
            elif True in foreign:
                yield value, node, True


def _leaving(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    members = set(nodes)
    own = [node for node in nodes if op_name(node) != _EXIT]
    return [node for node in own if any(user not in members or _is_exit(user) for user in node.users)]


def _is_exit(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node) == _EXIT and bool(node.users)
