"""Rules of the pass tensor-parallel against what they are defined by: parts of a result are results of parts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx

from mmcompile.ir.graph import CaptureMode, LossInfo, ModelGraph
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.tensor_parallel.attention_rules import heads_read
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts, LayerFacts
from mmcompile.passes.tensor_parallel.shard_flow import Refusal, ShardFlow
from mmcompile.passes.tensor_parallel.view_rules import reshaped


@pytest.mark.parametrize(
    ("queries", "heads", "count"), [(8, 2, 4), (8, 1, 4), (12, 6, 4), (12, 3, 2), (4, 2, 4), (16, 4, 8), (6, 2, 3)]
)
def test_every_rank_gets_the_heads_its_queries_read(queries: int, heads: int, count: int) -> None:
    """Attention of a rank's query heads to the heads listed, repeated evenly, is its part of attention to all."""
    q, k = torch.randn(1, queries, 5, 4), torch.randn(1, heads, 5, 4)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    listed = heads_read(queries, heads, count)
    own, each = queries // count, len(listed) // count
    for rank in range(count):
        keys = k[:, list(listed[rank * each : (rank + 1) * each])]
        found = torch.nn.functional.scaled_dot_product_attention(
            q[:, rank * own : (rank + 1) * own], keys, keys, enable_gqa=True
        )
        torch.testing.assert_close(found, whole[:, rank * own : (rank + 1) * own])


SHAPES = [
    ((2, 6, 24), (2, 6, 3, 4, 2)),
    ((2, 6, 24), (12, 24)),
    ((2, 6, 24), (2, 6, 4, 6)),
    ((2, 4, 6, 2), (8, 6, 2)),
    ((8, 6, 2), (2, 4, 6, 2)),
    ((2, 6, 4, 2), (2, 6, 8)),
    ((6, 4, 2), (1, 6, 4, 1, 2)),
    ((2, 3, 8), (6, 8)),
    ((4, 4), (16,)),
    ((24,), (2, 3, 4)),
]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_views(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Wherever the rule says which dim of a view is sharded, parts agree; where it refuses, no way of cutting would do."""
    for dim, count in itertools.product(range(len(old)), (2, 4)):
        for blocks in _blocks(old[dim], count):
            found = _by_rule(old, new, dim, blocks, count)
            agreeing = _agreeing(old, new, TensorShard(dim=dim, blocks=blocks, count=count))
            assert (found in agreeing) if found is not None else not agreeing, (dim, count, blocks, found, agreeing)


def _blocks(size: int, count: int) -> list[tuple[int, ...]]:
    """One block, and two or three equal ones, where they divide."""
    made = [(size // number,) * number for number in (1, 2, 3) if size % number == 0]
    return [blocks for blocks in made if blocks[0] % count == 0]


def _agreeing(old: tuple[int, ...], new: tuple[int, ...], shard: TensorShard) -> list[TensorShard]:
    """All ways to cut the view into equal blocks of a dim whose parts are views of the parts."""
    x = torch.arange(torch.Size(old).numel()).view(old)
    found = []
    for dim, number in itertools.product(range(len(new)), range(1, 25)):
        block, rest = divmod(new[dim], number)
        if rest or not block or block % shard.count:
            continue
        wanted = TensorShard(dim=dim, blocks=(block,) * number, count=shard.count)
        shape = wanted.local_shape(new)
        if all(torch.equal(shard.part(x, i).reshape(shape), wanted.part(x.view(new), i)) for i in range(shard.count)):
            found.append(wanted)
    return found


def _by_rule(
    old: tuple[int, ...], new: tuple[int, ...], dim: int, blocks: tuple[int, ...], count: int
) -> TensorShard | None:
    """What the rule makes of a view; None for a refusal."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.view.default, (value, list(new)))
    value.meta["val"], node.meta["val"] = torch.empty(old), torch.empty(new)
    layer = LayerFacts(whole=GraphFacts(graph=_no_model()), nodes=())
    flow = ShardFlow(count=count, facts=layer, columns={}, excluded=frozenset())
    flow.shards[value], flow.origins[value] = TensorShard(dim=dim, blocks=blocks, count=count), frozenset()
    try:
        return reshaped(flow, node, value)
    except Refusal:
        return None


def _no_model() -> ModelGraph:
    return ModelGraph(
        name="View",
        module=fx.GraphModule({}, fx.Graph()),
        components=(),
        edges=(),
        inputs=(),
        parameters=(),
        buffers=(),
        loss=LossInfo(per_token=False),
        mode=CaptureMode.PLAIN,
    )
