"""Rules for ops that rearrange or select elements of a sharded value: views, and parts of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any

from torch import fx

from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.dim_rules import dims, passed_dim
from mmcompile.passes.tensor_parallel.shard_flow import Refusal, ShardFlow, Shards
from mmcompile.passes.values import argument, has_argument, op_name, shape, tensors

_MANY_BLOCKS = 1024


def first(flow: ShardFlow, node: fx.Node) -> fx.Node:
    """Return the first argument, which must be the only sharded input."""
    value = node.args[0]
    others = [other for other in flow.sharded_inputs(node) if other is not value]
    if others or not isinstance(value, fx.Node):
        raise Refusal(node, f"the sharded {others[0].name} is not its first argument")
    return value


def passed(flow: ShardFlow, node: fx.Node) -> Shards:
    """Return the sharding of an op that treats the sharded dim as any other."""
    shard = flow.shard_of(first(flow, node))
    found = passed_dim(node, shard.dim)
    if isinstance(found, str):
        raise Refusal(node, f"{'it' if found == 'pads' else op_name(node)} {found} the sharded dim")
    return _each_result(node, flow.shard(found, shard.blocks))


def _each_result(node: fx.Node, shard: TensorShard) -> Shards:
    return (shard,) * len(tensors(node)) if isinstance(node.meta["val"], (tuple, list)) else shard


def view(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a view, reshape, flatten, unflatten, squeeze or unsqueeze: the same elements in the same order."""
    value = first(flow, node)
    found = reshaped(flow, node, value)
    for name in ("size", "shape"):
        if has_argument(node, name):
            flow.local(node, name, _local_sizes(flow, node, argument(node, name), found.dim))
    if has_argument(node, "sizes"):
        sizes = list(argument(node, "sizes"))
        (start,) = dims(node)
        if start <= found.dim < start + len(sizes):
            flow.local(node, "sizes", _local_sizes(flow, node, sizes, found.dim - start))
    return found


def view_as(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a `view_as` result; the tensor whose sizes it takes must be sharded alike."""
    value, other = node.args
    if not isinstance(value, fx.Node) or value not in flow.shards or not isinstance(other, fx.Node):
        raise Refusal(node, "its first argument is whole and the other is sharded")
    found = reshaped(flow, node, value)
    flow.meet(node, other, found)
    return found


def _local_sizes(flow: ShardFlow, node: fx.Node, wanted: Sequence[Any], dim: int) -> list[Any]:
    """Return a view's size arguments `wanted` with dim `dim` as on one rank; -1 stays, as torch infers the local size."""
    found = list(wanted)
    size = found[dim]
    if isinstance(size, fx.Node):
        if any(isinstance(other, int) and other == -1 for other in found):
            raise Refusal(
                node, f"its sizes {[str(item) for item in wanted]} hold a varying one where it is sharded, and a -1"
            )
        found[dim] = -1
    elif size != -1:
        found[dim] = size // flow.count
    return found


def reshaped(flow: ShardFlow, node: fx.Node, value: fx.Node) -> TensorShard:
    """Return the sharding of `node`, a view of the elements of `value` in the same order.

    A block of the sharded dim is a run of consecutive elements. Example: [6, 5] with blocks of 4 and 2 in dim 0 has runs of 20
    and 10 elements, so a view [30] has blocks of 20 and 10. The dim of the result that divides into the same runs is sharded;
    Refusal is raised if there is none.
    """
    shard, old, new = flow.shard_of(value), shape(value), shape(node)
    if prod(old) != prod(new):
        raise Refusal(node, f"it makes {list(new)} of {list(old)}")
    begin, end, start, stop = _group(old, new, shard.dim)
    outer, inner = prod(old[begin : shard.dim]), prod(old[shard.dim + 1 : end])
    if outer * len(shard.blocks) > _MANY_BLOCKS:
        raise Refusal(node, f"it merges {outer} rows with the sharded dim")
    runs = tuple(block * inner for block in shard.blocks) * outer
    uneven: tuple[int, ...] = ()
    for dim in range(start, stop):
        blocks = _blocks(runs, repeats=prod(new[start:dim]), inner=prod(new[dim + 1 : stop]))
        if blocks and sum(blocks) == new[dim]:
            if all(block % flow.count == 0 for block in blocks):
                return flow.shard(dim, blocks)
            uneven = uneven or tuple(block for block in blocks if block % flow.count)
    if not uneven:
        raise Refusal(node, f"it makes {list(new)} of {list(old)}, across the parts of dim {shard.dim}")
    reason = f"{flow.facts.counted(uneven[0])} do not divide by {flow.count}"
    if len(runs) == 1:  # Perhaps the outer index says which of several projections it is, not which head.
        flow.refine(node, value, [old[shard.dim] // uneven[0]] * uneven[0], reason, indivisible=True)
    raise Refusal(node, reason, indivisible=True)


def _group(old: Sequence[int], new: Sequence[int], dim: int) -> tuple[int, int, int, int]:
    """Return (old start, old end, new start, new end) of the fewest dims around `dim` that a view turns into each other.

    For (2, 6, 5) viewed as (2, 2, 3, 5) and dim 1: (1, 2, 1, 3), as 6 = 2 * 3.
    """
    before, after = (list(accumulate(own, mul, initial=1)) for own in (old, new))
    begin = max(i for i in range(dim + 1) if before[i] in after)
    end = min(i for i in range(dim + 1, len(old) + 1) if before[i] in after)
    return begin, end, after.index(before[begin]), len(after) - 1 - after[::-1].index(before[end])


def _blocks(runs: tuple[int, ...], *, repeats: int, inner: int) -> tuple[int, ...]:
    """Return the block sizes of one dim of a view whose elements, in memory order, form runs of these lengths; () if none fit.

    `repeats` and `inner` are the products of the sizes before and after the dim. Example for dim 1 of a view [2, 6, 5]: runs
    (20, 10, 20, 10) -> (4, 2), as 20 = 4 * 5 and 10 = 2 * 5, once per index of dim 0; runs (20, 10) -> ().
    """
    period, rest = divmod(len(runs), repeats)
    one = runs[:period]
    if rest or one * repeats != runs or any(run % inner for run in one):
        return ()
    return tuple(run // inner for run in one)


def split(flow: ShardFlow, node: fx.Node) -> Shards:
    """Return the sharding of each piece of chunk or split; a piece along the sharded dim must not cut a block (`TensorShard`)."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    pieces = tensors(node)
    if dims(node) != (shard.dim,):
        return (shard,) * len(pieces)
    sizes = [int(piece.shape[shard.dim]) for piece in pieces]
    ends = list(accumulate(sizes))
    found = tuple(
        flow.shard(shard.dim, _piece(flow, node, value, end - size, end)) for size, end in zip(sizes, ends, strict=True)
    )
    if has_argument(node, "split_size"):
        flow.local(node, "split_size", sizes[0] // flow.count)
    elif has_argument(node, "split_sizes"):
        flow.local(node, "split_sizes", [size // flow.count for size in sizes])
    elif len(set(sizes)) > 1:
        raise Refusal(node, f"it splits the sharded dim into uneven pieces {sizes}")
    return found


def _piece(flow: ShardFlow, node: fx.Node, value: fx.Node, start: int, end: int) -> tuple[int, ...]:
    """Return the sizes of those blocks of the sharded dim that span `start` to `end`. Raises Refusal if these cut a block."""
    blocks = flow.shard_of(value).blocks
    borders = list(accumulate(blocks, initial=0))
    if start in borders and end in borders:
        return blocks[borders.index(start) : borders.index(end)]
    finer = sorted({*borders, start, end})
    sizes = [b - a for a, b in pairwise(finer)]
    reason = f"it takes {start} to {end} of the sharded dim, whose blocks are {list(blocks)}"
    flow.refine(node, value, sizes, reason, indivisible=any(size % flow.count for size in sizes))
    raise Refusal(node, reason)


def slice_(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a slice along another dim; refuse a slice that cuts the sharded dim."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    if dims(node) != (shard.dim,):
        return shard
    given: Any = argument(node, "start"), argument(node, "end")
    start, end = (size.meta["val"] if isinstance(size, fx.Node) else size for size in given)
    start, end, step = slice(start, end, argument(node, "step")).indices(shard.size)
    return _narrowed(flow, node, value, start, end, step)


def narrow(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of `narrow` along another dim; refuse one that cuts the sharded dim."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    if dims(node) != (shard.dim,):
        return shard
    start, length = argument(node, "start"), argument(node, "length")
    if not isinstance(start, int) or not isinstance(length, int):
        raise Refusal(node, "it takes a varying part of the sharded dim")
    found = _narrowed(flow, node, value, start, start + length, 1)
    flow.local(node, "length", length // flow.count)
    return found


def _narrowed(flow: ShardFlow, node: fx.Node, value: fx.Node, start: int, end: int, step: int) -> TensorShard:
    if step != 1:
        raise Refusal(node, f"it takes every {step}th of the sharded dim")
    shard = flow.shard_of(value)
    blocks = _piece(flow, node, value, start, end)
    flow.local(node, "start", start // flow.count)
    if has_argument(node, "end"):
        flow.local(node, "end", end // flow.count)
    return flow.shard(shard.dim, blocks)


def removed_dim(flow: ShardFlow, node: fx.Node) -> Shards:
    """Return the sharding after select or unbind removes a dim; refuse to remove the sharded dim."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    (dim,) = dims(node)
    if dim == shard.dim:
        reason = "it takes single entries of the sharded dim"
        # Entries may stand for projections that were fused into one: then each of them is a block.
        flow.refine(node, value, [1] * shard.size, reason)
        raise Refusal(node, reason)
    return _each_result(node, flow.shard(shard.dim - (dim < shard.dim), shard.blocks))


def glu(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a `glu` result: the first half of a dim times the sigmoid of the other half."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    if dims(node) != (shard.dim,):
        return shard
    half = shard.size // 2
    parts = [_piece(flow, node, value, *border) for border in ((0, half), (half, 2 * half))]
    if parts[0] != parts[1]:
        raise Refusal(node, f"the halves it multiplies are sharded in blocks {list(parts[0])} and {list(parts[1])}")
    return flow.shard(shard.dim, parts[0])


def expand(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of an `expand` result; on a rank the sharded dim has its local size."""
    value = first(flow, node)
    shard = flow.shard_of(value)
    dim = shard.dim + len(shape(node)) - len(shape(value))
    sizes = list(argument(node, "size"))
    sizes[dim] = -1
    flow.local(node, "size", sizes)
    return flow.shard(dim, shard.blocks)


def repeat(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a `repeat` result: the blocks of the sharded dim occur several times."""
    value = first(flow, node)
    shard, old, new = flow.shard_of(value), shape(value), shape(node)
    dim = shard.dim + len(new) - len(old)
    return flow.shard(dim, shard.blocks * (new[dim] // old[shard.dim]))


def repeat_interleave(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding of a `repeat_interleave` result: the blocks grow, as each element in them is repeated."""
    value = first(flow, node)
    shard, old, new = flow.shard_of(value), shape(value), shape(node)
    if not isinstance(argument(node, "repeats"), int):
        raise Refusal(node, "how often it repeats is a tensor")
    if dims(node) != (shard.dim,):
        if argument(node, "dim") is None:
            raise Refusal(node, "it flattens")
        return shard
    times = new[shard.dim] // old[shard.dim]
    if argument(node, "output_size") is not None:
        flow.local(node, "output_size", new[shard.dim] // flow.count)
    return flow.shard(shard.dim, [block * times for block in shard.blocks])
