"""Effect of each op on a sharded dim: a table from op name to rule, and the rules that are not about views.

A rule is called only if some input is sharded. It returns the sharding of the result, requires that inputs combined
with the sharded one are sharded alike, and refuses ops that work across the parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.dim_rules import PASSING, dims, is_pointwise
from mmcompile.passes.tensor_parallel import view_rules as views
from mmcompile.passes.tensor_parallel.attention_rules import attention, bitfield_attention, packed_attention
from mmcompile.passes.tensor_parallel.graph_facts import projection
from mmcompile.passes.tensor_parallel.shard_flow import Refusal, Rule, ShardFlow
from mmcompile.passes.tensor_parallel.view_rules import first
from mmcompile.passes.values import argument, aten_ops, op_name, shape


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a node's op; None if a sharded dim cannot be followed through it."""
    return _pointwise if is_pointwise(node) else _RULES.get(op_name(node))


def _pointwise(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a pointwise op's result. Dims of operands are matched from the right, as in broadcasting."""
    sharded = flow.sharded_inputs(node)[0]
    shard = flow.shard_of(sharded)
    from_right = shard.dim - len(shape(sharded))
    operands = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), torch.Tensor)]
    flow.meet_along(node, operands, from_right, shard.blocks)
    return flow.shard(len(shape(node)) + from_right, shard.blocks)


def _complex(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of the result of view_as_complex (pairs in the last dim become one number) or of view_as_real."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    if op_name(node) == "aten.view_as_complex" and shard.dim == len(shape(value)) - 1:
        raise Refusal(node, "it joins pairs of the sharded dim")
    return shard


def _cat(flow: ShardFlow, node: fx.Node) -> TensorShard:
    parts: Any = node.args[0]
    shard = flow.shard_of(flow.sharded_inputs(node)[0])
    dim = argument(node, "dim") % len(shape(parts[0]))
    if dim != shard.dim:
        for part in parts:
            flow.meet(node, part, shard)
        return shard
    for part in parts:
        if part not in flow.shards:
            flow.grow(part)
            raise Refusal(node, f"it puts {part.name}, which is whole, behind a sharded value")
    if any(flow.shard_of(part).dim != dim for part in parts):
        raise Refusal(node, "its parts are sharded in different dims")
    return flow.shard(dim, [block for part in parts for block in flow.shard_of(part).blocks])


def _stack(flow: ShardFlow, node: fx.Node) -> TensorShard:
    parts: Any = node.args[0]
    shard = flow.shard_of(flow.sharded_inputs(node)[0])
    for part in parts:
        flow.meet(node, part, shard)
    dim = argument(node, "dim") % (len(shape(parts[0])) + 1)
    return flow.shard(shard.dim + (dim <= shard.dim), shard.blocks)


def _linear(flow: ShardFlow, node: fx.Node) -> TensorShard | None:
    """Return the sharding of a linear layer's result; None if input features are sharded: results are then summed over ranks.

    If another dim of the input is sharded (such as heads), the result is sharded in the same dim.
    """
    value, weight = node.args[0], node.args[1]
    if not isinstance(value, fx.Node) or value not in flow.shards or not isinstance(weight, fx.Node):
        raise Refusal(node, "its weight is computed from what is sharded")
    shard = flow.shard_of(value)
    if shard.dim < len(shape(value)) - 1:
        return shard
    found = projection(node)
    if found is None:
        raise Refusal(node, f"its weight {weight.name} is computed, not a parameter")
    flow.row(node, found.weight, flow.shard(1, shard.blocks))
    return None


def _matmul(flow: ShardFlow, node: fx.Node) -> TensorShard | None:
    """Return the sharding of a matrix product: rows, columns or a batch dim. None if the contracted dim is sharded (a sum)."""
    found = projection(node)
    if found is not None and found.source in flow.shards:
        shard = flow.shard_of(found.source)
        if shard.dim < len(shape(found.source)) - 1:
            return shard
        flow.row(node, found.weight, flow.shard(0, shard.blocks))
        return None
    if op_name(node) in aten_ops("addmm baddbmm"):
        raise Refusal(node, "it adds to a product of sharded values")
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if min(len(shape(left)), len(shape(right))) < 2:
        raise Refusal(node, "a factor is a vector")
    sharded = left if left in flow.shards else right
    shard = flow.shard_of(sharded)
    from_right = shard.dim - len(shape(sharded))
    if from_right >= -2:
        other = right if sharded is left else left
        if from_right != (-2 if sharded is left else -1) or other in flow.shards:
            raise Refusal(node, "it sums over the sharded dim, which is no dim of a weight")
    else:
        flow.meet_along(node, (left, right), from_right, shard.blocks)
    return flow.shard(len(shape(node)) + from_right, shard.blocks)


def _index(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of the result of indexing by integers along consecutive dims, none of which is sharded."""
    value = first(flow, node)
    indices: Any = node.args[1]
    shard = flow.shard_of(value)
    used = [dim for dim, index in enumerate(indices) if index is not None]
    given = [indices[dim] for dim in used]
    if shard.dim in used or any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given):
        raise Refusal(node, "it picks entries of the sharded dim, or by a mask")
    if used != list(range(used[0], used[-1] + 1)):
        raise Refusal(node, "it picks entries of dims that do not follow each other")
    added = max(len(shape(index)) for index in given) - len(used)
    return flow.shard(shard.dim + (added if used[0] < shard.dim else 0), shard.blocks)


def _index_select(flow: ShardFlow, node: fx.Node) -> TensorShard:
    value = first(flow, node)
    if dims(node) == (flow.shard_of(value).dim,):
        raise Refusal(node, "it picks entries of the sharded dim by number")
    return flow.shard_of(value)


def _getitem(flow: ShardFlow, node: fx.Node) -> TensorShard | None:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    shards = flow.shards[source]
    assert isinstance(shards, tuple)
    return shards[index]


def _same_value(flow: ShardFlow, node: fx.Node) -> None:
    """Return None, as the result is equal on all ranks: the op (such as new_ones) reads only dtype and device of its input."""


def _token_loss(flow: ShardFlow, node: fx.Node) -> None:
    # The logits hold a part of the vocabulary.
    logits = first(flow, node)
    shard = flow.shard_of(logits)
    if shard.dim != 1:
        raise Refusal(node, "its logits are not sharded in their classes")
    if len(shard.blocks) > 1:
        raise Refusal(node, f"its classes are sharded in several blocks {list(shard.blocks)}")
    flow.losses.add(node)


_TABLE: tuple[tuple[frozenset[str], Rule], ...] = (
    (aten_ops("where"), _pointwise),
    (PASSING, views.passed),
    (aten_ops("chunk split split_with_sizes"), views.split),
    (aten_ops("slice"), views.slice_),
    (aten_ops("narrow"), views.narrow),
    (aten_ops("select unbind"), views.removed_dim),
    (aten_ops("glu"), views.glu),
    (aten_ops("view reshape _unsafe_view flatten unflatten squeeze unsqueeze"), views.view),
    (aten_ops("view_as reshape_as"), views.view_as),
    (aten_ops("expand"), views.expand),
    (aten_ops("repeat"), views.repeat),
    (aten_ops("repeat_interleave"), views.repeat_interleave),
    (aten_ops("cat"), _cat),
    (aten_ops("stack"), _stack),
    (aten_ops("linear"), _linear),
    (aten_ops("matmul mm bmm addmm baddbmm"), _matmul),
    (aten_ops("index"), _index),
    (aten_ops("index_select"), _index_select),
    (aten_ops("view_as_complex view_as_real"), _complex),
    (aten_ops("new_zeros new_ones new_full new_empty"), _same_value),
    (aten_ops("scaled_dot_product_attention"), attention),
    (frozenset(("mmcompile.bitfield_attention", "mmcompile.context_parallel_attention")), bitfield_attention),
    (frozenset(("mmcompile.packed_attention",)), packed_attention),
    (frozenset(("getitem",)), _getitem),
    (frozenset(("token_loss",)), _token_loss),
)
_RULES: dict[str, Rule] = {name: rule for names, rule in _TABLE for name in names}
"""Op name -> rule, for ops that ATen does not tag as pointwise."""
