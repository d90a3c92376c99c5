"""Text of a graph, one line per node: printed by `MMCOMPILE_DEBUG=4`, and shown by errors around the node concerned."""

from __future__ import annotations

from torch import fx

from mmcompile.ir.graph import META_KEY, ModelGraph, dtype_name, info
from mmcompile.passes.values import op_name, tensors

_CONTEXT_LINES = 5


def graph_text(graph: ModelGraph) -> str:
    """Return the text of all nodes of a graph, annotations included: graphs are equal if their texts are."""
    return "\n".join(_node_text(node) for node in graph.module.graph.nodes)


def _node_text(node: fx.Node) -> str:
    # `linear: float32[2, 8] = aten.linear(x, a_weight, a_bias)  # encoder.0 a`
    if node.op == "output":
        return f"return {_value_text(node.args[0])}"
    values = tensors(node) if "val" in node.meta else None
    kind = "?" if values is None else ", ".join(f"{dtype_name(own.dtype)}{list(own.shape)}" for own in values)
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name}: {kind} = {node.op} {node.target}"
    arguments = [*map(_value_text, node.args), *(f"{name}={_value_text(v)}" for name, v in node.kwargs.items())]
    return f"{node.name}: {kind} = {op_name(node)}({', '.join(arguments)})  # {place_text(node)}"


def place_text(node: fx.Node) -> str:
    """Return the component, layer and module of a node, with a mark if it carries gradient."""
    if META_KEY not in node.meta:
        return "not annotated"
    note = info(node)
    where = "shared" if note.shared else f"{note.component}.{note.layer}"
    return " ".join(part for part in (where, note.module_path, "gradient" if note.carries_gradient else "") if part)


def layer_text(node: fx.Node) -> str:
    """Return the layer of a node that is not shared, in words for messages."""
    return f"layer {info(node).layer} of {info(node).component}"


def origin(node: fx.Node) -> str:
    """Return the module that made a node, in words for messages."""
    path = info(node).module_path
    return f"module {path}" if path else "the model's own forward"


def around(node: fx.Node) -> str:
    """Return the line of a node, marked, with the five lines of its graph before and after it."""
    nodes = list(node.graph.nodes)
    index = nodes.index(node)
    shown = nodes[max(0, index - _CONTEXT_LINES) : index + _CONTEXT_LINES + 1]
    return "\n".join(f"{'>' if own is node else ' '} {_node_text(own)}" for own in shown)


def _value_text(value: object) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_value_text(item) for item in value)}]"
    return str(value)
