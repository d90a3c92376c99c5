"""Extract a part of a captured graph as a graph module."""

from __future__ import annotations

from torch import fx

from mmcompile.ir.graph import ModelGraph, info, reached
from mmcompile.ir.host_shapes import attribute


def component_module(graph: ModelGraph, name: str) -> fx.GraphModule:
    """Extract one component as a graph module, from batch inputs and other components' values to the values that others read.

    Shared values it needs are computed inside. Inputs and outputs keep their names; parameters keep the model's.

    Raises:
        KeyError: there is no such component.
    """
    graph.component(name)
    nodes, order = [node for node in graph.calls if info(node).component == name], list(graph.module.graph.nodes)
    wanted = reached(nodes, lambda n: [s for s in n.all_input_nodes if s.op == "call_function" and info(s).shared])
    part, copies = fx.Graph(), {}
    for node in order:
        if node in wanted or not any(user in wanted for user in node.users):
            continue
        copies[node] = part.node_copy(node) if node.op == "get_attr" else part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in order:
        if node in wanted:
            copies[node] = part.node_copy(node, copies.__getitem__)
    output = graph.module.graph.output_node()
    results = [n for n in nodes if any(user is output or _elsewhere(user, name) for user in n.users)]
    part.output(tuple(copies[node] for node in results))
    tensors = {str(n.target): attribute(graph.module, str(n.target)) for n in copies if n.op == "get_attr"}
    return fx.GraphModule(tensors, part, name)


def _elsewhere(user: fx.Node, component: str) -> bool:
    return user.op == "call_function" and not info(user).shared and info(user).component != component
