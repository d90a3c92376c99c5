"""Copies of graphs: whole, for a rewriting pass to change, and of one component."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from mmcompile.ir.graph import ModelGraph, info, reached
from mmcompile.ir.host_shapes import attribute


def copied(graph: ModelGraph) -> ModelGraph:
    """Return the same graph with new nodes: names and annotations are kept, tensors are shared.

    Parameters, buffers and constants are the same objects, so training one trains the other.
    """
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.module.graph, {}))
    module = fx.GraphModule(graph.module, nodes, type(graph.module).__name__)
    # fx takes over what the graph reads; a model also has tensors that the loss does not depend on.
    for name, value in graph.module.named_parameters(remove_duplicate=False):
        _own(module, name, value)
    for name, value in graph.module.named_buffers(remove_duplicate=False):
        _own(module, name, value)
    return replace(graph, module=module)


def rewritten(graph: ModelGraph, lines: Iterable[str], **changes: Any) -> ModelGraph:
    """Check a graph that a pass has changed, generate its code again, and return it with other fields.

    Args:
        graph: result of `copied`, after the pass changed it.
        lines: lines to add to `ModelGraph.rewrites`.
        changes: fields of `ModelGraph`, with their new values.
    """
    graph.module.graph.lint()
    graph.module.recompile()
    return replace(graph, rewrites=(*graph.rewrites, *lines), **changes)


def _own(module: nn.Module, path: str, value: torch.Tensor) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        if not isinstance(getattr(module, owner, None), nn.Module):
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    if hasattr(module, name):
        return
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value)


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
