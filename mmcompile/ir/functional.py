"""Rewrite in-place ops into functional ones, so that a node's value never changes after it is computed.

Only then can a graph be cut anywhere. Which nodes share memory is read from the storages of their fake tensors, not from a list
of views, so that any view and any op that returns its input is followed. In-place updates of the model's own buffers (batch-norm
counters) are state, and stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mmcompile.errors import CaptureError
from mmcompile.ir.compat import FakeTensor, OpOverload, is_mutating_op, op_schema, shape_hint, size_hint, storage_of
from mmcompile.ir.nodes import with_value

aten = torch.ops.aten

_SCATTERS: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""View op -> op that returns the viewed tensor with the elements that the view shows replaced by new values."""
_RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.view_as.default,
    aten.reshape.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
_SAME = (aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.dropout.default)
"""Ops that may return their input itself; then result and input share memory."""
_MANY = (
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.unbind.int,
)
"""Ops that return several views."""
_FUNCTIONAL = {
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "__lshift__",
    "__irshift__": "__rshift__",
    "normal_": "normal_functional",
}
"""In-place op -> functional op, where the name is not the same without `_`."""
_OVERLOADS = {"bernoulli_.float": "p"}
"""In-place overload -> overload name of the functional op, where the two differ."""
NO_GRAD = "no_grad"
"""Key in `node.meta` of nodes that the model computes under `torch.no_grad`."""


def functionalize(graph: fx.Graph) -> None:
    """Replace every in-place op on a value by its functional form, and later uses of the same memory by the new value.

    Gradients follow autograd's rules: a write under `torch.no_grad`, or through a detached view, changes the value of a tensor
    and leaves its gradient as it was.

    Raises:
        CaptureError: an in-place op has no functional form, writes through a view of another dtype, or reads a part of what it
            writes.
    """
    memory = _Memory(graph)
    for node in list(graph.nodes):
        memory.refresh(node)
        if not _is_in_place(node):
            memory.add(node)
            continue
        target = _target(node)
        if torch.Tag.inplace_view in node.target.tags or node.target is aten.detach_.default:
            node.target = _functional(node)  # another view of the same memory, which is not written
            memory.add(node)
        elif memory.base(target).op == "get_attr":
            memory.add(node)
        else:
            memory.write(node, target)


@dataclass(slots=True)
class _Memory:
    """Nodes that share memory, and the node that holds the present value of each.

    Keys are nodes as captured. After a write, views of the same memory are computed again when they are next read.
    """

    graph: fx.Graph
    viewed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """View -> the node it views."""
    present: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node -> node with its value after some number of in-place writes to its memory; `seen` holds that number."""
    seen: dict[fx.Node, int] = field(default_factory=dict)
    writes: dict[fx.Node, int] = field(default_factory=dict)
    """Node that allocated some memory -> number of in-place writes to this memory so far."""
    captured: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node of the rewritten graph -> node as captured whose value it holds."""
    results: dict[tuple[fx.Node, Any], fx.Node] = field(default_factory=dict)
    """(call that makes several new tensors, index) -> first node that takes this one of them."""
    bases: dict[int, fx.Node] = field(default_factory=dict)
    """Identity of a storage -> node that allocated it."""

    def refresh(self, node: fx.Node) -> None:
        """Replace a node's arguments by nodes with the values that they have after all writes so far."""
        with self.graph.inserting_before(node):
            node.args = fx.map_arg(node.args, self.value)
            node.kwargs = fx.map_arg(node.kwargs, self.value)

    def add(self, node: fx.Node) -> None:
        """Record whether the result of `node`, which writes nothing, shares memory with one of its inputs."""
        storages = _storages(node)
        sources = [self._original(source) for source in node.all_input_nodes]
        if node.target is aten.lift_fresh_copy.default:  # its fake tensor shares memory, the real one does not
            sources = []
        if node.target is operator.getitem and sources[0] not in self.viewed:  # one of several new tensors
            first = self.results.setdefault((sources[0], node.args[1]), node)
            sources = [] if first is node else [first]
        source = next((source for source in sources if storages & _storages(source)), None)
        if source is not None:
            self.viewed[node] = source
        else:
            for storage in storages:
                if self.bases.setdefault(storage, node).op not in ("get_attr", node.op):
                    raise _refused(
                        node, f"shares memory with {self.bases[storage].name} in a way that the graph does not show"
                    )
        self._hold(node, node)

    def base(self, node: fx.Node) -> fx.Node:
        node = self._original(node)
        while node in self.viewed:
            node = self.viewed[node]
        return node

    def value(self, node: fx.Node) -> fx.Node:
        """Return the node with the present value of `node`. Views of memory written since are computed again here."""
        node = self._original(node)
        if self.seen[node] == self.writes.get(self.base(node), 0):
            return self.present[node]
        parent = self.viewed[node]
        now = self.value(parent)
        fresh = self.graph.node_copy(node, lambda source: now if self._original(source) is parent else source)
        fresh.meta = {**node.meta, "val": _run(fresh)}
        return self._hold(node, fresh)

    def write(self, node: fx.Node, target: fx.Node) -> None:
        """Replace `node`, an in-place op on `target`, by functional ops that compute the new values of all memory it wrote."""
        written = self._original(target)
        base = self.base(written)
        for source in map(self._original, node.all_input_nodes):
            if self.base(source) is base and _overlap_in_part(written.meta["val"], source.meta["val"]):
                raise _refused(node, "reads a part of what it writes, in an order that torch does not define")
        with self.graph.inserting_before(node):
            chain = [(written, _update(self.graph, node, target))]
            while written in self.viewed:
                view, new = chain[-1]
                written = self.viewed[written]
                if written.target in _MANY:  # (view, number) of some views: their source is written
                    written = self.viewed[written]
                chain.append((written, _write_back(self.graph, node, view, self.value(written), new)))
        self.writes[base] = self.writes.get(base, 0) + 1
        for held, value in chain:
            self._hold(held, value)
        result = chain[0][1]
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _original(self, node: fx.Node) -> fx.Node:
        return self.captured.get(node, node)

    def _hold(self, node: fx.Node, value: fx.Node) -> fx.Node:
        self.present[node], self.captured[value] = value, node
        self.seen[node] = self.writes.get(self.base(node), 0)
        return value


def changed_buffers(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """Return the buffers that nodes change, by name: in place, or as running statistics of a norm in training mode.

    The value is a node that changes the buffer.
    """
    found: dict[str, fx.Node] = {}
    for node in nodes:
        changed: tuple[Any, ...] = ()
        if node.op == "call_function" and is_mutating_op(node.target):
            changed = node.args[:1]
        elif node.target in (aten.batch_norm.default, aten.instance_norm.default) and node.args[5]:
            changed = node.args[3:5]
        for buffer in changed:
            while isinstance(buffer, fx.Node) and buffer.op == "call_function":
                buffer = buffer.all_input_nodes[0]
            if isinstance(buffer, fx.Node) and buffer.op == "get_attr":
                found[str(buffer.target)] = node
    return found


def _is_in_place(node: fx.Node) -> bool:
    return node.op == "call_function" and is_mutating_op(node.target) and node.target.namespace == "aten"  # type: ignore[union-attr]


def _target(node: fx.Node) -> fx.Node:
    assert isinstance(node.target, OpOverload)
    written = [argument.name for argument in op_schema(node.target).arguments if argument.is_write]
    if written != [op_schema(node.target).arguments[0].name] or not isinstance(node.args[0], fx.Node):
        raise _refused(node, f"writes {', '.join(written)}")
    return node.args[0]


def _refused(node: fx.Node, what: str) -> CaptureError:
    where = node.meta.get("stack_trace", "").strip().splitlines()[-2:]
    return CaptureError(
        f"in-place {node.target} {what}, which cannot be made functional ({node.format_node()}); "
        f"make the update out of place in the model{': ' if where else ''}{' '.join(line.strip() for line in where)}"
    )


def _functional(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    full = node.target.__name__
    name, overload = full.split(".")
    packet = getattr(aten, _FUNCTIONAL.get(name, name.rstrip("_")), None)
    functional = getattr(packet, _OVERLOADS.get(full, overload), None)
    if functional is None or is_mutating_op(functional):
        raise _refused(node, "has no functional form")
    return functional


def _storages(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {storage_of(leaf) for leaf in leaves if isinstance(leaf, FakeTensor)}


def _overlap_in_part(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors in the same memory have elements in common, but are not the same view of it."""
    views: list[dict[str, Any]] = []
    for view in (one, other):
        size = view.itemsize
        dims = [(n, size_hint(s) * size) for n, s in zip(shape_hint(view), view.stride(), strict=True) if n != 1]
        place = (1 + size_hint(view.storage_offset()) * size, True)
        shape, strides = tuple(n for n, _ in dims), tuple(step for _, step in dims)
        views.append({"data": place, "shape": shape, "strides": strides, "typestr": f"|V{size}", "version": 3})
    # numpy solves it exactly from addresses; it reads none of them.
    first, second = (np.asarray(SimpleNamespace(__array_interface__=view)) for view in views)
    return views[0] != views[1] and np.shares_memory(first, second)


def _run(node: fx.Node) -> Any:
    """Return the fake result of a node's op, run on the fake results recorded for its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    modes = (leaf.fake_mode for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    assert callable(node.target)
    with next(modes), torch.no_grad():
        return node.target(*args, **kwargs)


def _call(graph: fx.Graph, near: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: value for key, value in near.meta.items() if key != "val"}
    node.meta["val"] = _run(node)
    return node


def _update(graph: fx.Graph, node: fx.Node, target: fx.Node) -> fx.Node:
    """Return a functional node with the value that `target` has after the in-place op `node` has written to it."""
    _, *rest = node.args
    kind: Tensor = target.meta["val"]
    if node.target is aten.copy_.default:
        new = _call(graph, node, aten.expand_as.default, _cast(graph, node, rest[0], kind.dtype), target)
        new.meta["val"] = new.meta["val"].clone()
    elif node.target is aten.zero_.default:
        new = _call(graph, node, aten.zeros_like.default, target)
    else:
        new = _cast(graph, node, _call(graph, node, _functional(node), target, *rest, **node.kwargs), kind.dtype)
    return _same_gradient(graph, node, target, new) if node.meta.get(NO_GRAD) else new


def _same_gradient(graph: fx.Graph, near: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
    """Return a node with the value of `new` and the gradient of `old`, for a write made under `no_grad` or through `.data`."""
    if not _may_carry_gradient(old):
        return _call(graph, near, aten.detach.default, new) if _may_carry_gradient(new) else new
    return _call(graph, near, with_value, old, new)


def _may_carry_gradient(node: fx.Node) -> bool:
    """Return False if no gradient can flow through a node: no float parameter or input reaches it, or only through `detach`."""
    waiting, known = [node], {node}
    while waiting:
        node = waiting.pop()
        value = node.meta.get("val")
        if node.target is aten.detach.default or isinstance(value, Tensor) and not value.is_floating_point():
            continue
        if node.op in ("placeholder", "get_attr"):
            return True
        waiting += [source for source in node.all_input_nodes if source not in known]
        known.update(waiting)
    return False


def _cast(graph: fx.Graph, near: fx.Node, node: Any, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else _call(graph, near, aten.to.dtype, node, dtype)


def _write_back(graph: fx.Graph, near: fx.Node, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    """Return the node of the new value of `source`, after the values `new` were written through `view`, a view of `source`."""
    seen: Tensor = view.meta["val"]
    whole: Tensor = source.meta["val"]
    parts = view.all_input_nodes[0] if view.target is operator.getitem else None
    if parts is not None and parts.target not in _MANY and source.target is operator.getitem:
        return new  # the same one of several new tensors, taken twice
    if view.target in (aten.detach.default, aten.alias.default):
        return _same_gradient(graph, near, source, new) if view.target is aten.detach.default else new
    if seen.dtype != whole.dtype:
        raise _refused(near, f"writes through {view.target}")
    if view.target in _SCATTERS:
        return _call(graph, near, _SCATTERS[view.target], source, new, *view.args[1:], **view.kwargs)
    if view.target in _RESHAPES:
        return _call(graph, near, aten.reshape_as.default, new, source)
    if view.target is aten.transpose.int:
        return _call(graph, near, view.target, new, *view.args[1:])
    if view.target in _SAME:
        return new
    return _scatter(graph, near, view, source, new)


def _scatter(graph: fx.Graph, near: fx.Node, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    """Return a node of `source` in which the elements that its view `view` shows are replaced by `new`, for any view op.

    The same view, taken of a tensor of element indices, gives their indices.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return _call(graph, near, target, *args, **kwargs)

    ones = call(aten.ones_like.default, source, dtype=torch.int64)
    count = call(aten.cumsum.default, call(aten.reshape.default, ones, [-1]), 0)
    positions = call(aten.reshape_as.default, call(aten.sub.Tensor, count, 1), source)
    if view.target is operator.getitem:
        parts = view.all_input_nodes[0]
        shown = call(parts.target, positions, *parts.args[1:], **parts.kwargs)
        shown = call(operator.getitem, shown, view.args[1])
    else:
        shown = call(view.target, positions, *view.args[1:], **view.kwargs)
    flat = call(aten.reshape.default, source, [-1])
    shown, values = call(aten.reshape.default, shown, [-1]), call(aten.reshape.default, new, [-1])
    return call(aten.reshape_as.default, call(aten.index_copy.default, flat, 0, shown, values), source)
