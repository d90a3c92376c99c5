"""Copy of a graph that a rewriting pass may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from mmcompile.ir.graph import ModelGraph


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
    """Return a copy of a graph whose nodes a pass has changed, once it is consistent and its code is generated again.

    Args:
        graph: result of `copied`, after the pass changed it.
        lines: lines to add to `ModelGraph.rewrites`.
        changes: other fields of the graph, with their new values.
    """
    graph.module.graph.lint()
    graph.module.recompile()
    return replace(graph, rewrites=(*graph.rewrites, *lines), **changes)


def _own(module: nn.Module, path: str, value: torch.Tensor) -> None:
    """Set the tensor at a dotted path, unless the path already holds one."""
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
