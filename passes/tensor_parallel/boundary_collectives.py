"""`add_borders`: inserts boundary collectives between components with different tensor-parallel degrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from mmcompile.ir.graph import META_KEY, ModelGraph, component_of, info
from mmcompile.kernels.tensor_parallel.boundary_ops import tp_exit as tp_exit
from mmcompile.passes.context_parallel.token_axis import sizes
from mmcompile.passes.values import tensors


def add_borders(graph: ModelGraph, degrees: Mapping[str, int], group: str) -> ModelGraph:
    """Insert nodes that keep gradients whole between components, where one has a tensor-parallel degree above 1.

    Each rank of the consumer has the whole gradient: `tp_enter` zeroes it on all ranks but one, so that the sum over
    ranks is the gradient. One rank of the producer receives this sum: `tp_exit` sends it to all ranks of the producer.
    """
    exits: dict[fx.Node, fx.Node] = {}
    enters: dict[tuple[fx.Node, str, int], fx.Node] = {}
    for node in [node for node in graph.module.graph.nodes if node.op == "call_function" and not info(node).shared]:
        consumer = component_of(node)
        for value in node.all_input_nodes:
            if value.op != "call_function" or info(value).shared or component_of(value) == consumer:
                continue
            if not info(value).carries_gradient or not info(node).carries_gradient:
                continue
            made = value
            if degrees[component_of(value)] > 1:
                if value not in exits:
                    exits[value] = _border("tp_exit", value, value, group, degrees[component_of(value)])
                made = exits[value]
            if degrees[consumer] > 1:
                key = (value, consumer, info(node).layer)
                if key not in enters:
                    enters[key] = _border("tp_enter", made, node, group, degrees[consumer])
                made = enters[key]
            if made is not value:
                node.replace_input_with(value, made)
    return replace(graph, edges=_edges(graph))


def _border(name: str, value: fx.Node, place: fx.Node, group: str, count: int) -> fx.Node:
    """Insert a node with op `name` (`tp_enter`, `tp_exit`) on `value`: behind `place` if it is `value` itself, else before it."""
    graph, target = value.graph, getattr(torch.ops.mmcompile, name).default
    with graph.inserting_after(value) if place is value else graph.inserting_before(place):
        made = graph.call_function(target, (value, group, count))
    (tensor,) = tensors(value)
    note = info(place)
    made.meta = {
        META_KEY: replace(note, forward_flops=0, input_grad_flops=0, weight_grad_flops=0, bytes_moved=0),
        "val": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
        "symbolic_shape": sizes(value),
        "module_path": note.module_path,
    }
    return made


def _edges(graph: ModelGraph) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """Return the edges of the component DAG in the order of `graph.edges`, with the names of the values now sent."""
    flowing: dict[tuple[str, str], dict[str, None]] = {edge[:2]: {} for edge in graph.edges}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes if node.op == "call_function" and not info(node).shared else ():
            if source.op == "call_function" and not info(source).shared and component_of(source) != component_of(node):
                flowing[component_of(source), component_of(node)][source.name] = None
    return tuple((producer, consumer, tuple(names)) for (producer, consumer), names in flowing.items())
