"""Effect of each op on a token dim: a table from op name to rule, and the rules.

A rule is called only if some input is sharded. It returns the token dim of the result, shards whole inputs that are
combined with sharded ones (a rotary table that is multiplied), rewrites sizes that count tokens, and refuses ops that
mix tokens. Rules hold for merged rows, [batch * tokens], and for rows repeated once per expert, [batch * tokens *
experts], as for plain tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mmcompile.passes.context_parallel.token_axis import Rule, TokenAxis, TokenFlow, reshaped, spread_size
from mmcompile.passes.dim_rules import PASSING, dims, is_pointwise, passed_dim
from mmcompile.passes.values import argument, aten_ops, has_argument, op_name, set_argument, shape, sizes


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a node's op; None if tokens cannot be followed through it."""
    return _pointwise if is_pointwise(node) else _RULES.get(op_name(node))


def _pointwise(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of a pointwise op's result. Dims of operands are matched from the right, as in broadcasting."""
    spread = flow.spread_inputs(node)[0]
    axis = flow.axes[spread]
    from_right = axis.dim - len(shape(spread))
    tensors = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
    _spread_along(flow, node, tensors, axis, from_right)
    return axis.at(len(shape(node)) + from_right)


def _spread_along(flow: TokenFlow, node: fx.Node, values: Iterable[fx.Node], axis: TokenAxis, from_right: int) -> None:
    """Shard each operand in `values` of `node` that has tokens in the dim `from_right`, counted from the last dim, -1.

    Operands without this dim, or with size 1 in it, are left as they are.
    """
    for value in values:
        dim = len(shape(value)) + from_right
        if value in flow.axes or dim >= 0 and shape(value)[dim] != 1:
            node.replace_input_with(value, flow.to_spread(node, value, axis.at(dim)))


def _like_first(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    return flow.axes[_first(flow, node)]


def _first(flow: TokenFlow, node: fx.Node) -> fx.Node:
    """Return the node's first argument; raise PlanError if another input is sharded, too."""
    value = node.args[0]
    others = [other for other in flow.spread_inputs(node) if other is not value]
    if others or not isinstance(value, fx.Node):
        flow.refuse(node, f"tokens reach it through {others[0].name}, not through its first argument")
    return value


def _passed(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of an op that only moves dims or works on other dims, such as permute."""
    axis = flow.axes[_first(flow, node)]
    found = passed_dim(node, axis.dim)
    if isinstance(found, str):
        flow.refuse(node, f"it {found} the tokens")
    return axis.at(found)


def _along(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of an op along other dims, such as softmax over features. Raises PlanError if it is along tokens."""
    axis = flow.axes[_first(flow, node)]
    if axis.dim in dims(node):
        flow.refuse(node, "it works along the tokens")
    return axis


def _removed_dim(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of an op that removes another dim, such as select or unbind."""
    axis = flow.axes[_first(flow, node)]
    (dim,) = dims(node)
    if dim == axis.dim:
        flow.refuse(node, "it takes single tokens")
    return axis.at(axis.dim - (dim < axis.dim))


def _slice(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of a slice. Tokens cut off at the ends stay on their ranks; `TokenAxis` counts them."""
    axis = flow.axes[_first(flow, node)]
    if dims(node) != (axis.dim,):
        return axis
    rows = flow.rows(axis)
    given: Any = argument(node, "start"), argument(node, "end")
    start, end = (size.meta["val"] if isinstance(size, fx.Node) else size for size in given)
    first, last, _ = slice(start, end).indices(rows)
    # Counted from the other end, what is left out would change with the number of tokens.
    varies = not isinstance(sizes(node)[axis.dim], int) and (first and start < 0 or last < rows and end >= 0)
    cut = first or last < rows
    uneven = argument(node, "step") != 1 or last - first < 2
    if uneven or cut and (varies or axis.outer != 1 or axis.inner != 1):
        flow.refuse(node, f"it takes tokens {first} to {last} of {rows}")
    set_argument(node, "start", 0)
    set_argument(node, "end", sys.maxsize)
    return replace(axis, front=axis.front + first, back=axis.back + rows - last)


def _view(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    axis = reshaped(flow, node, _first(flow, node))
    for name in ("size", "shape"):
        if has_argument(node, name):
            set_argument(node, name, spread_size(flow, node, argument(node, name), axis))
    return axis


def _view_as(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    value, other = node.args
    assert isinstance(value, fx.Node) and isinstance(other, fx.Node)
    if value not in flow.axes:
        flow.refuse(node, f"tokens reach it through {other.name}, not through its first argument")
    axis = reshaped(flow, node, value)
    node.update_arg(1, flow.to_spread(node, other, axis))
    return axis


def _unflatten(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    axis = reshaped(flow, node, _first(flow, node))
    (dim,) = dims(node)
    parts = list(argument(node, "sizes"))
    if dim <= axis.dim < dim + len(parts):
        full = [*([0] * dim), *parts, *([0] * len(shape(node)))]
        set_argument(node, "sizes", spread_size(flow, node, full, axis)[dim : dim + len(parts)])
    return axis


def _expand(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    value = _first(flow, node)
    axis = flow.axes[value].at(flow.axes[value].dim + len(shape(node)) - len(shape(value)))
    wanted = list(argument(node, "size"))
    wanted[axis.dim] = -1
    set_argument(node, "size", wanted)
    return axis


def _repeat(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    value = _first(flow, node)
    axis, added = flow.axes[value], len(shape(node)) - len(shape(value))
    times = shape(node)[axis.dim + added] // shape(value)[axis.dim]
    return replace(axis, dim=axis.dim + added, outer=axis.outer * times)


def _repeat_interleave(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    axis = flow.axes[_first(flow, node)]
    if dims(node) != (axis.dim,):
        return _along(flow, node)
    times = shape(node)[axis.dim] // flow.rows(axis)
    if argument(node, "output_size") is not None:
        set_argument(node, "output_size", None)
    return replace(axis, inner=axis.inner * times)


def _joined(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of cat or stack along another dim. It moves by one if stack adds a dim before it."""
    parts: Any = node.args[0]
    added = int(op_name(node) == "aten.stack")
    axis = flow.axes[flow.spread_inputs(node)[0]]
    node.update_arg(0, [flow.to_spread(node, part, axis) for part in parts])
    dim = argument(node, "dim") % (len(shape(parts[0])) + added)
    if dim == axis.dim and not added:
        flow.refuse(node, "it puts more tokens behind the tokens")
    return axis.at(axis.dim + added * (dim <= axis.dim))


def _linear(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    value = _first(flow, node)
    if flow.axes[value].dim == len(shape(value)) - 1:
        flow.refuse(node, "it sums over the tokens")
    return flow.axes[value]


def _matmul(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of a matrix product: rows of the left factor, columns of the right one, or a batch dim of both."""
    factors: Any = node.args[-2:] if op_name(node) in _WITH_BIAS else node.args[:2]
    left, right = factors
    if min(len(shape(left)), len(shape(right))) < 2:
        flow.refuse(node, "a factor is a vector")
    found = [factor for factor in factors if factor in flow.axes]
    from_right = [flow.axes[factor].dim - len(shape(factor)) for factor in found]
    places = {-2: left, -1: right}
    if not found or from_right[0] >= -2 and (len(found) == 2 or places[from_right[0]] is not found[0]):
        flow.refuse(node, "it sums over tokens or multiplies tokens with tokens")
    axis = flow.axes[found[0]]
    if from_right[0] < -2:
        _spread_along(flow, node, factors, axis, from_right[0])
    if op_name(node) in _WITH_BIAS:
        _spread_along(flow, node, node.all_input_nodes[:1], axis, from_right[0])
    return axis.at(len(shape(node)) + from_right[0])


def _embedding(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    table, ids = argument(node, "weight"), argument(node, "indices")
    if table in flow.axes:
        flow.refuse(node, "it looks tokens up by number")
    return flow.axes[ids]


def _index(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of indexing `x` by one tensor.

    Either the indices are sharded and `x` is not, or `x` is sharded and indexed along another dim.
    """
    value: Any = node.args[0]
    indices: Any = node.args[1]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        flow.refuse(node, "it picks elements by several indices")
    (dim,) = used
    picked = flow.axes.get(indices[dim])
    axis = flow.axes.get(value)
    if picked is not None and axis is None:
        return picked.at(dim + picked.dim)
    assert axis is not None
    if picked is not None or dim == axis.dim:
        flow.refuse(node, "it picks tokens by number")
    return axis.at(axis.dim + (len(shape(indices[dim])) - 1 if dim < axis.dim else 0))


def _index_select(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    value, index = argument(node, "self"), argument(node, "index")
    (dim,) = dims(node)
    axis, picked = flow.axes.get(value), flow.axes.get(index)
    if picked is not None and axis is None:
        return picked.at(dim)
    if picked is not None or axis is None or dim == axis.dim:
        flow.refuse(node, "it picks tokens by number")
    return axis


def _gather(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of gather or scatter along another dim. Index and source must have the same tokens."""
    axis = flow.axes[flow.spread_inputs(node)[0]]
    if dims(node) == (axis.dim,):
        flow.refuse(node, "it picks tokens by number")
    for value in node.all_input_nodes:
        node.replace_input_with(value, flow.to_spread(node, value, axis))
    return axis


def _attention(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of the result of cross-attention. Queries are sharded; keys and values, of media, are not."""
    query, key, value = (argument(node, name) for name in ("query", "key", "value"))
    axis, mask = flow.axes.get(query), argument(node, "attn_mask")
    if key in flow.axes or value in flow.axes or argument(node, "is_causal"):
        flow.refuse(node, "queries see other tokens; run the pass bitfield-attention first")
    if axis is None or axis.dim != len(shape(query)) - 2 or not axis.plain:
        flow.refuse(node, "its queries are whole, or not in the dim before the last")
    if mask is not None:
        _spread_along(flow, node, (mask,), axis, -2)
    return axis


def _bitfield_attention(flow: TokenFlow, node: fx.Node) -> TokenAxis:
    """Return the token dim of self-attention's result, the one of its queries [batch, heads, tokens, dim].

    The pass later replaces the op by one that gathers the keys and values of all ranks.
    """
    axis = TokenAxis(dim=2)
    for value in node.args[:3]:
        if not isinstance(value, fx.Node) or value not in flow.axes or not flow.same(flow.axes[value], axis):
            flow.refuse(node, f"{value} does not have its tokens in dim 2 of [batch, heads, tokens, dim]")
    return axis


def _token_loss(flow: TokenFlow, node: fx.Node) -> None:
    """Return None, as the loss has no token dim: each rank gets the sum over its own tokens, and their number."""
    logits, labels, ignore_index = node.args
    assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node) and isinstance(ignore_index, int)
    axis = flow.axes.get(logits)
    if axis is None:
        flow.refuse(node, "its logits are whole: every rank would count all tokens")
    rank = len(shape(logits))
    if rank > 1 and axis.dim == 1:
        flow.refuse(node, "its classes are in the dim of the tokens")
    dim = axis.dim - 1 if rank > 2 and axis.dim > 1 else axis.dim
    node.update_arg(1, flow.to_spread(node, labels, axis.at(dim), filler=ignore_index))


def _same_value(flow: TokenFlow, node: fx.Node) -> None:
    """Return None, as the result is equal on all ranks: the op (such as new_ones) reads only dtype and device of its input."""


_WITH_BIAS = aten_ops("addmm baddbmm")
_TABLE: tuple[tuple[frozenset[str], Rule], ...] = (
    (aten_ops("native_dropout expand_as broadcast_tensors"), _pointwise),
    (PASSING - aten_ops("roll"), _passed),
    (aten_ops("chunk split split_with_sizes tensor_split narrow glu"), _along),
    (aten_ops("select unbind"), _removed_dim),
    (aten_ops("slice"), _slice),
    (aten_ops("view reshape _unsafe_view flatten squeeze unsqueeze"), _view),
    (aten_ops("view_as reshape_as"), _view_as),
    (aten_ops("unflatten"), _unflatten),
    (aten_ops("expand"), _expand),
    (aten_ops("repeat"), _repeat),
    (aten_ops("repeat_interleave"), _repeat_interleave),
    (aten_ops("cat stack"), _joined),
    (aten_ops("linear"), _linear),
    (aten_ops("matmul mm bmm addmm baddbmm"), _matmul),
    (aten_ops("embedding"), _embedding),
    (aten_ops("one_hot view_as_real view_as_complex"), _like_first),
    (aten_ops("index"), _index),
    (aten_ops("index_select"), _index_select),
    (aten_ops("gather scatter scatter_add"), _gather),
    (aten_ops("scaled_dot_product_attention"), _attention),
    (aten_ops("new_zeros new_ones new_full new_empty"), _same_value),
    (frozenset(("mmcompile.bitfield_attention",)), _bitfield_attention),
    (frozenset(("getitem",)), _like_first),
    (frozenset(("token_loss",)), _token_loss),
)
_RULES: dict[str, Rule] = {name: rule for names, rule in _TABLE for name in names}
"""Op name -> rule, for ops that ATen does not tag as pointwise."""
