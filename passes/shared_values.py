"""Layers that need a shared value: one of no single layer (a mask, a rotary table), computed where it is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from mmcompile.ir.graph import info

Place = tuple[str, int]
"""(component, layer)."""


def needing_layers(graph: fx.Graph) -> Mapping[fx.Node, frozenset[Place]]:
    """Return the layers of the whole model that need each call: its own, or all that in the end read a shared value.

    A shared value that a single layer needs is computed in that layer, and computed again with it; others stand before
    the layers of a stage, which keep them.
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
