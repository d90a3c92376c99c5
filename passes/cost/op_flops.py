"""FLOPs of a node and of the gradient of each of its operands, from torch's own formulas.

Composite ops (linear, matmul, conv2d, attention, einsum) are mapped onto the ops that
`torch.utils.flop_counter.flop_registry` has formulas for, so that our totals equal what `FlopCounterMode` counts on a
real forward and backward. As there, a multiply-add is two FLOPs, causal masks are not discounted, and everything but
matrix products and convolutions counts zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from mmcompile.ir.graph import META_KEY
from mmcompile.ir.nodes import token_positions
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_backward_flops, bitfield_attention_flops
from mmcompile.passes.values import aten_ops, op_name, passed, shape, tensors

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFlops:
    """FLOPs of one node, forward and backward."""

    forward: int = 0
    operands: tuple[tuple[fx.Node, int], ...] = ()
    """(operand node, FLOPs of the operand's gradient). An operand that the node reads twice appears twice."""
    joint: int = 0
    """FLOPs of one backward for all operands at once (attention); counted if any operand needs a gradient."""
    joint_operands: tuple[fx.Node, ...] = ()


FlopsRule = Callable[[fx.Node], OpFlops]
"""Function from a node to its work; it reads the node's arguments by `passed`, and shapes of values by `tensors`."""
_NOTHING = OpFlops()


def op_flops(node: fx.Node) -> OpFlops:
    """Return the FLOPs of a `call_function` node, by a user's rule (`OpCosts`) or by the rule of this module.

    An op without a rule counts zero: it is neither a matrix product nor a convolution.
    """
    rule = node.meta[META_KEY].flops_rule if META_KEY in node.meta else None
    rule = rule or _RULES.get(op_name(node))
    return rule(node) if rule else _NOTHING


def _linear(node: fx.Node) -> OpFlops:
    source, weight = _operands(node, "input", "weight")
    size_out, size_in = shape(weight)
    rows = prod(shape(source)) // size_in
    return OpFlops(
        forward=_mm(rows, size_in, size_out),
        operands=((source, _mm(rows, size_out, size_in)), (weight, _mm(size_out, rows, size_in))),
    )


@cache  # torch's formulas unpack any argument, which costs more than the rest of the pass
def _mm(m: int, k: int, n: int) -> int:
    return flop_registry[aten.mm]((m, k), (k, n))


@cache
def _bmm(batch: int, rows: int, inner: int, columns: int) -> int:
    return flop_registry[aten.bmm]((batch, rows, inner), (batch, inner, columns))


@cache
def _attend(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    forward = flop_registry[aten._scaled_dot_product_flash_attention](query, key, value)
    out = (*query[:-1], value[-1])
    return forward, flop_registry[aten._scaled_dot_product_flash_attention_backward](out, query, key, value)


def _product(first: str, second: str) -> FlopsRule:
    """Return the rule of an op that multiplies the arguments `first` and `second`. Each gradient costs as much as the forward."""

    def rule(node: fx.Node) -> OpFlops:
        left, right = _operands(node, first, second)
        left_shape, right_shape = shape(left), shape(right)
        rows, inner = (1, *left_shape)[-2:]
        columns = right_shape[-1] if len(right_shape) > 1 else 1
        batch = prod(torch.broadcast_shapes(left_shape[:-2], right_shape[:-2]))
        flops = _bmm(batch, rows, inner, columns)
        return OpFlops(forward=flops, operands=((left, flops), (right, flops)))

    return rule


def _convolution(dims: int, *, transposed: bool) -> FlopsRule:
    """Return the rule of a convolution with this number of spatial dims.

    Unlike torch's formula, it takes into account that the groups of a convolution do not mix in the weight gradient.
    """

    def rule(node: fx.Node) -> OpFlops:
        source, weight = _operands(node, "input", "weight")
        x, w, out = _batched(shape(source), dims), shape(weight), _batched(shape(node), dims)
        unread = (None, None, None, None)  # bias, stride, padding, dilation

        def backward(mask: tuple[bool, bool, bool]) -> int:
            formula = flop_registry[aten.convolution_backward]
            return formula(out, x, w, *unread, transposed, None, None, mask, out_val=(x, w, None))

        forward = flop_registry[aten.convolution](x, w, *unread, transposed, out_val=out)
        groups = passed(node).get("groups", 1)
        assert isinstance(groups, int)
        input_grad, weight_grad = backward((True, False, False)), backward((False, True, False)) // groups
        return OpFlops(forward=forward, operands=((source, input_grad), (weight, weight_grad)))

    return rule


def _solve_triangular(node: fx.Node) -> OpFlops:
    # torch counts the forward as 0; the gradient of the matrix is one product.
    (matrix,), (*batch, rows, columns) = _operands(node, "self"), shape(node)
    return OpFlops(operands=((matrix, _bmm(prod(batch), rows, columns, rows)),))


def _batched(shape: Shape, dims: int) -> Shape:
    return shape if len(shape) == dims + 2 else (1, *shape)


def _attention(node: fx.Node) -> OpFlops:
    operands = _operands(node, *_ATTENDING[op_name(node)])
    sizes = [shape(operand) for operand in operands]
    batch = prod(torch.broadcast_shapes(*(own[:-3] for own in sizes)))
    query, key, value = ((batch, *own[-3:]) for own in sizes)
    forward, backward = _attend(query, key, value)
    return OpFlops(forward=forward, joint=backward, joint_operands=operands)


def _bitfield_attention(node: fx.Node) -> OpFlops:
    """Return the FLOPs of attention over the pairs that the mask words show; over all pairs if the words' values are unknown."""
    given = passed(node)
    operands = _operands(node, *_ATTENDING[op_name(node)])
    q, k, v = (tensors(operand)[0] for operand in operands)
    out, lse = tensors(node)
    words = _operands(node, "words", "positions", "kv_words", "kv_positions")
    # Positions in natural order (0, 1, 2, ...) are None.
    mask = (None if source.target is token_positions else tensors(source)[0] for source in words)
    call = (*mask, given["scale"], given["window"], given["impl"])
    return OpFlops(
        forward=bitfield_attention_flops(q, k, v, *call),
        joint=bitfield_attention_backward_flops(out, None, q, k, v, out, lse, *call),
        joint_operands=operands,
    )


def _packed_attention(node: fx.Node) -> OpFlops:
    # Block-diagonal: each segment attends to itself only.
    operands = _operands(node, *_ATTENDING[op_name(node)])
    sizes = [shape(operand) for operand in operands]
    forward = backward = 0
    for size in _segments(node, sizes[0][-2]):
        q, k, v = ((*own[:-2], size, own[-1]) for own in sizes)
        flops = _attend(q, k, v)
        forward, backward = forward + flops[0], backward + flops[1]
    return OpFlops(forward=forward, joint=backward, joint_operands=operands)


def _segments(node: fx.Node, num_tokens: int) -> Sequence[int]:
    # [Approximation] Equal lengths are the least work of that many segments; windows of one size are close.
    (cu_seqlens,) = _operands(node, "cu_seqlens")
    known = _constant(cu_seqlens)
    if known is not None:
        return [int(length) for length in known.diff()]
    count = max(1, shape(cu_seqlens)[0] - 1)
    return [num_tokens // count + (index < num_tokens % count) for index in range(count)]


def _constant(node: fx.Node) -> Any:
    """Return the value of a node computed from constants alone; None for other nodes, and for constants without data (meta)."""
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(node.graph.owning_module)
        return value if type(value) is torch.Tensor and value.device.type != "meta" else None
    if node.op != "call_function" or not node.all_input_nodes or any(t.is_floating_point() for t in tensors(node)):
        return None
    known = {source: _constant(source) for source in node.all_input_nodes}
    if any(value is None for value in known.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _einsum(node: fx.Node) -> OpFlops:
    """Return the FLOPs of an einsum, which torch contracts pair by pair from left to right. Elementwise products count 0.

    With more than two operands the backward is counted for all of them together, as two products per pair.
    """
    given = passed(node)
    nodes = [_node(operand) for operand in given["tensors"]]
    terms, output = _einsum_labels(str(given["equation"]), [len(shape(operand)) for operand in nodes])
    size: dict[str, int] = {}
    for term, operand in zip(terms, nodes, strict=True):
        for label, extent in zip(term, shape(operand), strict=True):
            size[label] = max(extent, size.get(label, 1))
    done, total = set(terms[0]), 0
    for index, term in enumerate(terms[1:], start=1):
        kept = set(output).union(*terms[index + 1 :])
        contracted = {label for label in (done & set(term)) - kept if size[label] > 1}
        total += 2 * prod(size[label] for label in ((done | set(term)) & kept) | contracted) if contracted else 0
        done = (done | set(term)) & kept
    if len(nodes) <= 2:
        return OpFlops(forward=total, operands=tuple((operand, total) for operand in nodes))
    return OpFlops(forward=total, joint=2 * total, joint_operands=tuple(nodes))


def _einsum_labels(equation: str, num_dims: Sequence[int]) -> tuple[list[str], str]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = max(dims - len(term) + 3 if "..." in term else 0 for term, dims in zip(terms, num_dims, strict=True))
    names = "".join(chr(0x100 + index) for index in range(hidden))
    written_out = [
        term.replace("...", names[hidden - (dims - len(term) + 3) :]) if "..." in term else term
        for term, dims in zip(terms, num_dims, strict=True)
    ]
    letters = "".join(terms).replace(".", "")
    implicit = names + "".join(sorted(label for label in set(letters) if letters.count(label) == 1))
    return written_out, right.replace("...", names) if arrow else implicit


def _region(node: fx.Node) -> OpFlops:
    # A `torch.no_grad()` region has no backward.
    body = attrgetter(str(_node(node.args[1]).target))(node.graph.owning_module)
    return OpFlops(forward=sum(op_flops(child).forward for child in body.graph.nodes if child.op == "call_function"))


def _operands(node: fx.Node, *names: str) -> tuple[fx.Node, ...]:
    values = passed(node)
    return tuple(_node(values[name]) for name in names)


def _node(value: object) -> fx.Node:
    assert isinstance(value, fx.Node), f"expected a tensor of the graph, got {value!r}"
    return value


def attention_lengths(node: fx.Node) -> tuple[Shape, Shape] | None:
    """Return (sequence lengths of the queries, sequence lengths of the keys) of an attention op; None for other ops."""
    name = op_name(node)
    if name not in ATTENTION:
        return None
    query, key = map(shape, _operands(node, *_ATTENDING[name][:2]))
    if name == "mmcompile.packed_attention":
        lengths = tuple(_segments(node, query[-2]))
        return lengths, lengths
    count = prod(torch.broadcast_shapes(query[:-3], key[:-3]))
    return (query[-2],) * count, (key[-2],) * count


def keys_and_values(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the key and value nodes of an attention op; () for other ops."""
    return _operands(node, *_ATTENDING.get(op_name(node), ())[1:])


_ATTENDING = {
    "aten.scaled_dot_product_attention": ("query", "key", "value"),
    "mmcompile.bitfield_attention": ("q", "k", "v"),
    "mmcompile.packed_attention": ("query", "key", "value"),
}
"""Attention op -> names of its queries, keys and values."""
ATTENTION = frozenset(_ATTENDING)
PRODUCTS = aten_ops("matmul mm bmm mv dot addmm baddbmm addbmm einsum")
"""Names of ops that multiply two matrices, both of which may be activations."""

_RULES: Mapping[str, FlopsRule] = {
    "aten.linear": _linear,
    "aten.matmul": _product("self", "other"),
    "aten.mm": _product("self", "mat2"),
    "aten.bmm": _product("self", "mat2"),
    "aten.mv": _product("self", "vec"),
    "aten.dot": _product("self", "tensor"),
    "aten.addmm": _product("mat1", "mat2"),
    "aten.baddbmm": _product("batch1", "batch2"),
    "aten.addbmm": _product("batch1", "batch2"),
    "aten.einsum": _einsum,
    "aten.linalg_solve_triangular": _solve_triangular,
    "aten.scaled_dot_product_attention": _attention,
    "mmcompile.bitfield_attention": _bitfield_attention,
    "mmcompile.packed_attention": _packed_attention,
    "wrap_with_set_grad_enabled": _region,
    **{f"aten.conv{dims}d": _convolution(dims, transposed=False) for dims in (1, 2, 3)},
    **{f"aten.conv_transpose{dims}d": _convolution(dims, transposed=True) for dims in (1, 2, 3)},
}
