"""Facts of a node, read from the graph: op name, tensors, sizes, views, inputs changed in place, layers that need its value."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.compat import HigherOrderOperator, OpOverload, is_random_op, op_schema
from mmcompile.ir.graph import Place, info
from mmcompile.ir.sizes import Shape

_META = torch.device("meta")


def op_name(node: fx.Node) -> str:
    """Return the op of a node: `aten.linear`, `mmcompile.packed_attention`, or a Python function's name (`getitem`)."""
    target = node.target
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target.overloadpacket.__name__}"
    if isinstance(target, HigherOrderOperator):
        return target.name()
    return target if isinstance(target, str) else target.__name__


def aten_ops(names: str) -> frozenset[str]:
    """Return the `op_name`s of ATen ops named in one string: `"add sub"` gives `aten.add` and `aten.sub`."""
    return frozenset(f"aten.{name}" for name in names.split())


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """Return the tensors a node produces, as described in `node.meta["val"]`; () for sizes and nodes without a result.

    Raises:
        VerifyError: the node has no recorded value.
    """
    if "val" not in node.meta:
        raise VerifyError(
            f"node {node.format_node()} has no recorded value; a pass that makes a node must set node.meta['val']"
        )
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _concrete_int(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise VerifyError(f"size {size} has no value at the captured batch; it depends on the data")
    return int(hint)


def concrete_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor at the captured batch."""
    return tuple(_concrete_int(size) for size in tensor.shape)


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's first tensor at the captured batch."""
    return concrete_shape(tensors(node)[0])


def sizes(node: fx.Node) -> Shape:
    """Return the shape of a tensor node, with symbols for sizes that may vary."""
    return node.meta.get("symbolic_shape") or shape(node)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements at the captured batch (an expanded view counts each element)."""
    return tensor.element_size() * prod(concrete_shape(tensor))


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory behind a recorded value, at the captured batch."""
    return _concrete_int(tensor.untyped_storage().nbytes())


def _arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, object]]:
    if not isinstance(node.target, OpOverload):
        return
    for position, argument in enumerate(op_schema(node.target).arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def passed(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments that a call of an ATen or custom op passes, by the names of the op's schema."""
    return {argument.name: value for argument, value in _arguments(node)}


def given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen or custom op by name, with the defaults of those that it does not pass."""
    assert isinstance(node.target, OpOverload)
    return {**{entry.name: entry.default_value for entry in op_schema(node.target).arguments}, **passed(node)}


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument called `name` in the op's schema, as a call passes it, or its default."""
    return given(node)[name]


def has_argument(node: fx.Node, name: str) -> bool:
    """Return whether the schema of a node's op has an argument called `name`."""
    return name in given(node)


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set the argument called `name` in the op's schema to another value."""
    position = list(given(node)).index(name)
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    """Return whether the op of a node has the tag `tag` of torch, such as `torch.Tag.pointwise`."""
    return tag in getattr(node.target, "tags", ())


def draws_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers; a dropout that is off draws none."""
    if not is_random_op(node.target):
        return False
    if op_name(node) == "aten.scaled_dot_product_attention":
        return bool(argument(node, "dropout_p"))
    return "dropout" not in op_name(node) or bool(node.args[1]) and node.args[2] is not False


def on_meta(value: Any) -> Any:
    """Return a value with tensors on the meta device instead of its tensors, without data, of the same shapes and strides."""
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=_META),
        value,
    )


def computed(node: fx.Node) -> Any:
    """Run a call on the recorded values of its inputs, on the meta device, and return the result, which has no data."""
    passing = pytree.tree_map_only(torch.device, lambda _: _META, (node.args, dict(node.kwargs)))
    args, kwargs = fx.map_arg(passing, lambda source: on_meta(source.meta["val"]))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs that the node changes in place."""
    return tuple(
        value
        for argument, value in _arguments(node)
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write
    )


def aliased(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs that the node's result may be a view of."""
    if node.target is operator.getitem:
        return (node.args[0],) if isinstance(node.args[0], fx.Node) else ()
    return tuple(
        value for argument, value in _arguments(node) if isinstance(value, fx.Node) and argument.alias_info is not None
    )


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
