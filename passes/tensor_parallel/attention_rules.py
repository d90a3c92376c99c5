"""Rules for attention: heads are sharded, and every rank's query heads need the key/value heads they read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.tensor_parallel.shard_flow import Refusal, ShardFlow
from mmcompile.passes.values import argument, has_argument, shape


def attention(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding by heads of scaled_dot_product_attention, [..., heads, tokens, dim]; its mask may have heads, too."""
    query, key, value = (argument(node, name) for name in ("query", "key", "value"))
    found = _by_heads(flow, node, query, (key, value), grouped=bool(argument(node, "enable_gqa")))
    mask = argument(node, "attn_mask")
    if isinstance(mask, fx.Node):
        flow.meet_along(node, (mask,), found.dim - len(shape(query)), found.blocks)
    return found


def packed_attention(flow: ShardFlow, node: fx.Node) -> TensorShard:
    """Return the sharding by heads of packed attention, [1, heads, tokens, dim]."""
    query, key, value = (argument(node, name) for name in ("query", "key", "value"))
    return _by_heads(flow, node, query, (key, value), grouped=True)


def bitfield_attention(flow: ShardFlow, node: fx.Node) -> tuple[TensorShard, TensorShard]:
    """Return the shardings by heads of bitfield attention's two results: output, and log-sum-exp [batch, heads, tokens]."""
    query, key, value = (argument(node, name) for name in ("q", "k", "v"))
    found = _by_heads(flow, node, query, (key, value), grouped=True)
    if has_argument(node, "head_stride"):
        num_heads = shape(key)[1]
        each = num_heads // flow.count if key in flow.shards else len(flow.heads.get((node, key), ())) // flow.count
        flow.local(node, "head_stride", min(argument(node, "head_stride"), each))
    return found, found


def _by_heads(
    flow: ShardFlow, node: fx.Node, query: fx.Node, others: Sequence[fx.Node], *, grouped: bool
) -> TensorShard:
    """Return the sharding of an attention op's result by heads. Queries, keys and values must be sharded by the same heads.

    Args:
        others: keys and values.
        grouped: True if several query heads may read one head of keys and values.
    """
    sharded = next(value for value in (query, *others) if value in flow.shards)
    from_right = flow.shard_of(sharded).dim - len(shape(sharded))
    if from_right > -3:
        raise Refusal(node, "tokens or the width of heads are sharded, not heads")
    dim = len(shape(query)) + from_right
    num_queries = shape(query)[dim]
    if query not in flow.shards:
        share = num_queries // shape(sharded)[dim]
        flow.meet(node, query, flow.shard(dim, [block * share for block in flow.shard_of(sharded).blocks]))
        # Queries that stay whole would be computed by every rank for all heads.
        raise Refusal(node, f"its queries {query.name} are whole")
    blocks = flow.shard_of(query).blocks
    for value in others:
        num_heads = shape(value)[dim]
        share, rest = divmod(num_queries, num_heads)
        if rest or share > 1 and not (grouped and from_right == -3 and len(blocks) == 1):
            raise Refusal(node, f"{num_queries} query heads read {num_heads} heads of {value.name}")
        if share == 1:
            flow.meet(node, value, flow.shard(dim, blocks))
        elif num_heads % flow.count == 0:
            flow.meet(node, value, flow.shard(dim, [num_heads]))
        elif value in flow.shards:
            raise Refusal(value, f"{num_heads} heads do not divide by {flow.count}", indivisible=True)
        else:
            flow.heads[node, value] = heads_read(num_queries, num_heads, flow.count)
    return flow.shard(dim, blocks)


def heads_read(num_queries: int, num_heads: int, count: int) -> tuple[int, ...]:
    """Return the key/value heads that each rank's query heads read, rank 0 first, equally many for every rank.

    Query head h reads head h * num_heads // num_queries. If on every rank all query heads read the same head, one head per rank
    is listed; else one head per query head.
    """
    each = num_queries // count
    read = [head * num_heads // num_queries for head in range(num_queries)]
    per_rank = [read[rank * each : (rank + 1) * each] for rank in range(count)]
    if all(len(set(heads)) == 1 for heads in per_rank):
        return tuple(heads[0] for heads in per_rank)
    return tuple(read)
