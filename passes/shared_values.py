"""Layers that need a shared value (a mask, a rotary table), which belongs to no layer and is computed where it is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mmcompile.ir.graph import Place, info


def needing_layers(graph: fx.Graph) -> Mapping[fx.Node, frozenset[Place]]:
    """Return call node -> layers of the whole model that need its value.

    A node of a layer is needed by this layer; a shared node by all layers that read it, directly or through shared nodes.
    A shared value that a single layer needs is computed in that layer, and computed again with it; a value that several
    layers need is computed once, before the layers of a stage, and kept.
    """
    needing: dict[fx.Node, frozenset[Place]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        component = info(node).component
        if component is not None:
            needing[node] = frozenset([(component, info(node).layer)])
        else:
            needing[node] = frozenset[Place]().union(*(needing[user] for user in node.users if user in needing))
    return needing
