"""Rewrite in-place ops into functional ones, so that a node's value never changes after it is computed.

Only then can a graph be cut anywhere. In-place updates of the model's own buffers (batch-norm counters) are state, and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import OpOverload, is_mutating_op

aten = torch.ops.aten

# View -> how to write a new value of the view back into what it views.
_SCATTERS: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPES = (
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
)
_TRANSPOSES = (aten.transpose.int,)
_ALIASES = (aten.detach.default, aten.alias.default, aten.detach_.default)
_VIEWS = (*_SCATTERS, *_RESHAPES, *_TRANSPOSES, *_ALIASES, aten.expand.default, aten.permute.default)


def functionalize(graph: fx.Graph) -> None:
    """Replace every in-place op on a value by its functional form, and later uses by the new value.

    Raises:
        CaptureError: an in-place op writes through a view that cannot be written back.
    """
    for node in list(graph.nodes):
        if node.target is aten.detach_.default:
            node.target = aten.detach.default
        elif _is_in_place(node) and isinstance(node.args[0], fx.Node) and _base(node.args[0]).op != "get_attr":
            _rewrite(graph, node)


def _is_in_place(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and is_mutating_op(node.target)
        and node.target.namespace == "aten"
    )


def _base(node: fx.Node) -> fx.Node:
    """Return the tensor that a chain of views starts from."""
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _functional_call(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a functional node with the same update as an in-place node, inserted at the current position."""
    operands: tuple[Any, ...] = node.args
    target, *rest = operands
    assert isinstance(node.target, OpOverload)
    name, overload = node.target.__name__.split(".")
    if name == "copy_":
        cast = graph.call_function(aten.to.dtype, (rest[0], target.meta["val"].dtype))
        call = graph.call_function(aten.expand_as.default, (cast, target))
        cast.meta = dict(node.meta)
        cast.meta["val"] = rest[0].meta["val"].to(target.meta["val"].dtype)
    else:
        plain = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}.get(
            name, name.rstrip("_")
        )
        functional = getattr(getattr(aten, plain), overload)
        call = graph.call_function(functional, (target, *rest), dict(node.kwargs))
        if name == "zero_":
            call.target = aten.zeros_like.default
    call.meta = dict(node.meta)
    call.meta["val"] = target.meta["val"]
    return call


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    base = _base(target)
    order = {other: position for position, other in enumerate(graph.nodes)}
    later = [user for user in graph.nodes if order[user] > order[node]]
    views = [view for view in graph.nodes if order[view] < order[node] and view is not base and _base(view) is base]
    with graph.inserting_before(node):
        new = _functional_call(graph, node)
        view = target
        while view is not base:
            new = _write_back(graph, node, view, new)
            view = view.all_input_nodes[0]
        fresh = {base: new}
        for old in views:  # in graph order, so a view's own source was renewed before it
            copy = graph.node_copy(old, lambda source: fresh.get(source, source))
            copy.meta = dict(old.meta)
            fresh[old] = copy
    for user in later:
        user.args = fx.map_arg(user.args, lambda source: fresh.get(source, source))
        user.kwargs = fx.map_arg(user.kwargs, lambda source: fresh.get(source, source))
    node.replace_all_uses_with(fresh[target])
    graph.erase_node(node)


def _write_back(graph: fx.Graph, node: fx.Node, view: fx.Node, new: fx.Node) -> fx.Node:
    """Insert and return the viewed tensor's value after `new` was written through `view`."""
    source = view.all_input_nodes[0]
    if view.target in _SCATTERS:
        written = graph.call_function(_SCATTERS[view.target], (source, new, *view.args[1:]), dict(view.kwargs))
    elif view.target in _ALIASES:
        return new
    elif view.target in _RESHAPES:
        written = graph.call_function(aten.reshape_as.default, (new, source))
    elif view.target in _TRANSPOSES:
        written = graph.call_function(view.target, (new, *view.args[1:]))
    else:
        raise CaptureError(
            f"in-place {node.target} writes through {view.target} ({view.format_node()}), which cannot be written back; "
            "make the update out of place in the model"
        )
    written.meta = dict(node.meta)
    written.meta["val"] = source.meta["val"]
    return written
