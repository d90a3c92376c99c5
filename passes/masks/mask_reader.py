"""`MaskReader`: turns a mask's node into an expression of one of its elements.

A node's dims are indexed from the mask down to what it is made of: views, expansions, slices, casts and look-ups by
`arange` disappear, and what stays are comparisons of positions and of values per token, however the model spelled them.

    expand(unsqueeze(arange)) <= unsqueeze(arange)   ->   le(k, q)
    mask[arange(B)[:, None], arange(T)]              ->   mask[b, k]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from mmcompile.ir.host_shapes import attribute
from mmcompile.passes.masks.mask_expression import (
    AxisIndex,
    Elementwise,
    Expression,
    NodeElement,
    Number,
    Places,
    applied,
    dtype_of,
    linear,
    per_token,
)
from mmcompile.passes.values import aten_ops, given, op_name, shape

_MAX_SIZE = 2000
"""Maximum number of operations and operands in an expression: a node whose expression is larger is not analysed."""


class MaskReader:
    """Reader of the masks of one graph; expressions of nodes that masks share are computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, Places], Expression] = {}

    def at(self, node: fx.Node, index: Places) -> Expression:
        """Return the expression of the element of `node` at the given index, one entry per dim."""
        key = (node, index)
        if key not in self._known:
            found = self._read(node, index)
            if isinstance(found, Elementwise) and found.size > _MAX_SIZE:
                found = NodeElement(node, index)
            self._known[key] = found
        return self._known[key]

    def per_token(self) -> Iterator[tuple[Expression, fx.Node, Places]]:
        """Yield (expression, node, index) for each node read so far at the index of a query or key.

        The expression is the element of `node` at `index`, such as [b, t], with token t in place of the query or key.
        """
        for (node, index), expression in self._known.items():
            places = tuple(map(per_token, index))
            if AxisIndex("t") in places and not isinstance(expression, (AxisIndex, Number)):
                yield per_token(expression), node, places

    def _read(self, node: fx.Node, index: Places) -> Expression:
        if node.op == "get_attr":
            return _constant(node, index)
        rule = _RULES.get(op_name(node)) if node.op == "call_function" else None
        found = rule(self, node, index) if rule is not None else None
        return NodeElement(node, index) if found is None else found

    def argument(self, value: object, index: Places) -> Expression | None:
        """Return an operand of an elementwise node as an expression at the node's index: a broadcast tensor, or a number."""
        if isinstance(value, (bool, int, float)):
            return Number(value)
        if not isinstance(value, fx.Node):
            return None
        if not isinstance(value.meta["val"], torch.Tensor):
            return NodeElement(value, ())
        return self.at(value, _broadcast(value, index))


def _broadcast(node: fx.Node, index: Places) -> Places:
    sizes = shape(node)
    return tuple(
        Number(0) if size == 1 else place for size, place in zip(sizes, index[len(index) - len(sizes) :], strict=True)
    )


def _constant(node: fx.Node, index: Places) -> Expression:
    module = node.graph.owning_module
    assert module is not None
    value = attribute(module, str(node.target))
    if type(value) is torch.Tensor and value.device.type != "meta" and value.numel() == 1:
        return Number(value.item())
    return NodeElement(node, index)


Rule = Callable[[MaskReader, fx.Node, Places], Expression | None]


def _source(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]


def _same(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    return reader.at(_source(node), index)


def _cast(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    value = reader.at(_source(node), index)
    same = not isinstance(value, Number) and dtype_of(value) == node.meta["val"].dtype
    return value if same else applied("to", (value,), node)


def _reshaped(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
    source = _source(node)
    places = [place for size, place in zip(shape(node), index, strict=True) if size != 1]
    if [size for size in shape(node) if size != 1] != [size for size in shape(source) if size != 1]:
        return None
    rest = iter(places)
    return reader.at(source, tuple(Number(0) if size == 1 else next(rest) for size in shape(source)))


def _expanded(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    return reader.at(_source(node), _broadcast(_source(node), index))


def _sliced(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
    arguments = given(node)
    dim, start, step = arguments["dim"] % len(index), arguments["start"] or 0, arguments["step"]
    if not isinstance(start, int) or step != 1:
        return None
    start = max(start + shape(_source(node))[dim], 0) if start < 0 else start
    if start and "symbolic_shape" in node.meta:
        return None  # A start counted from the end is another number at other sizes.
    moved = applied("add", (index[dim], Number(start)), node, torch.int64) if start else index[dim]
    return reader.at(_source(node), (*index[:dim], _plain(moved), *index[dim + 1 :]))


def _selected(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
    arguments = given(node)
    dim, place = arguments["dim"] % (len(index) + 1), arguments["index"]
    if not isinstance(place, int) or place < 0:
        return None
    return reader.at(_source(node), (*index[:dim], Number(place), *index[dim:]))


def _transposed(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    arguments, moved = given(node), list(index)
    first, second = (arguments["dim0"], arguments["dim1"]) if "dim0" in arguments else (0, -1)
    moved[first], moved[second] = moved[second], moved[first]
    return reader.at(_source(node), tuple(moved))


def _permuted(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    places: list[Expression] = list(index)
    for place, dim in zip(index, given(node)["dims"], strict=True):
        places[dim] = place
    return reader.at(_source(node), tuple(places))


def _looked_up(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
    # Integer index tensors in adjacent dims: `x[..., i, j, ...]`.
    source, indices = _source(node), list(given(node)["indices"])
    indices += [None] * (len(shape(source)) - len(indices))
    dims = [dim for dim, i in enumerate(indices) if i is not None]
    if any(i is not None and i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    if dims != list(range(dims[0], dims[-1] + 1)):
        return None
    rank = max(len(shape(indices[dim])) for dim in dims)
    common, after = index[dims[0] : dims[0] + rank], index[dims[0] + rank :]
    found = [reader.at(indices[dim], _broadcast(indices[dim], common)) for dim in dims]
    return reader.at(source, (*index[: dims[0]], *map(_plain, found), *after))


def _plain(place: Expression) -> Expression:
    form = linear(place)
    if form is None:
        return place
    factors, constant = form
    if not factors:
        return Number(constant)
    (axis, factor), *others = factors.items()
    return AxisIndex(axis) if factor == 1 and not others and constant == 0 else place


def _triangle(reader: MaskReader, node: fx.Node, index: Places) -> Expression:
    limit = applied("add", (index[-2], Number(given(node)["diagonal"])), node, torch.int64)
    inside = applied("le" if "tril" in op_name(node) else "ge", (index[-1], limit), node, torch.bool)
    return applied("where", (inside, reader.at(_source(node), index), Number(0)), node)


def _arange(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
    arguments = given(node)
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    if not isinstance(start, int) or step != 1 or node.meta["val"].dtype.is_floating_point:
        return None
    return applied("add", (index[0], Number(start)), node) if start else index[0]


def _filled(value: bool | int | float | None) -> Rule:
    """Return the rule that reads an op that makes equal elements: `value`, or the op's fill argument if `value` is None."""

    def rule(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
        arguments = given(node)
        names = ("fill_value", "s", "value")
        filling = value if value is not None else next(arguments[name] for name in names if name in arguments)
        if not isinstance(filling, (bool, int, float)):
            return None
        return Number(bool(filling) if node.meta["val"].dtype == torch.bool else filling)

    return rule


def _elementwise(op: str, *order: str) -> Rule:
    def rule(reader: MaskReader, node: fx.Node, index: Places) -> Expression | None:
        arguments = given(node)
        # Bitwise ops are logical on bools.
        if op in _LOGICAL and any(source.meta["val"].dtype != torch.bool for source in node.all_input_nodes):
            return None
        if arguments.get("alpha", 1) != 1:
            return None
        operands = [reader.argument(arguments[name], index) for name in order]
        return applied(op, tuple(operands), node) if None not in operands else None  # type: ignore[arg-type]

    return rule


_LOGICAL = ("and", "or", "xor", "not")


_BINARY = {
    **{name: name for name in ["add", "sub", "mul", "floor_divide", "remainder", "eq", "ne", "lt", "le", "gt", "ge"]},
    **{name.format(op): op for op in ("and", "or", "xor") for name in ("bitwise_{}", "__{}__", "logical_{}")},
}
_TABLE: tuple[tuple[frozenset[str], Rule], ...] = (
    (aten_ops("detach alias clone contiguous lift_fresh lift_fresh_copy"), _same),
    (aten_ops("to _to_copy type_as"), _cast),
    (aten_ops("unsqueeze squeeze view reshape _unsafe_view flatten unflatten"), _reshaped),
    (aten_ops("expand expand_as broadcast_to"), _expanded),
    (aten_ops("slice"), _sliced),
    (aten_ops("select"), _selected),
    (aten_ops("transpose t"), _transposed),
    (aten_ops("permute"), _permuted),
    (aten_ops("index"), _looked_up),
    (aten_ops("tril triu"), _triangle),
    (aten_ops("arange"), _arange),
    (aten_ops("ones new_ones ones_like"), _filled(1)),
    (aten_ops("zeros new_zeros zeros_like"), _filled(0)),
    (aten_ops("full new_full full_like scalar_tensor fill"), _filled(None)),
    (aten_ops("where"), _elementwise("where", "condition", "self", "other")),
    (aten_ops("masked_fill"), _elementwise("where", "mask", "value", "self")),
    (aten_ops("rsub"), _elementwise("sub", "other", "self")),
    (aten_ops("neg"), _elementwise("neg", "self")),
    (aten_ops("bitwise_not logical_not"), _elementwise("not", "self")),
    *((aten_ops(name), _elementwise(op, "self", "other")) for name, op in _BINARY.items()),
)
_RULES: dict[str, Rule] = {name: rule for names, rule in _TABLE for name in names}
