"""Facts of one node, read from the graph: op name, recorded tensors, sizes, views, and inputs changed in place."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.compat import HigherOrderOperator, OpOverload, op_schema


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
    """Return a size at the captured batch: an int as it is, a symbol by its hint."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise VerifyError(f"size {size} has no value at the captured batch; it depends on the data")
    return int(hint)


def concrete_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor at the captured batch."""
    return tuple(_concrete_int(size) for size in tensor.shape)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements at the captured batch (an expanded view counts each element)."""
    count = tensor.element_size()
    for size in concrete_shape(tensor):
        count *= size
    return count


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory behind a recorded value, at the captured batch."""
    return _concrete_int(tensor.untyped_storage().nbytes())


def arguments(node: fx.Node) -> Iterator[tuple[torch.Argument, object]]:
    """Yield (schema argument, value that the node passes) of an ATen or custom op; nothing is yielded for other targets."""
    if not isinstance(node.target, OpOverload):
        return
    for position, argument in enumerate(op_schema(node.target).arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs that the node changes in place."""
    return tuple(
        value
        for argument, value in arguments(node)
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write
    )


def aliased(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the inputs that the node's result may be a view of."""
    if node.target is operator.getitem:
        return (node.args[0],) if isinstance(node.args[0], fx.Node) else ()
    return tuple(
        value for argument, value in arguments(node) if isinstance(value, fx.Node) and argument.alias_info is not None
    )
