"""Sharding of token embeddings over the vocabulary, told apart from other look-ups."""

from __future__ import annotations

from torch import fx

from mmcompile.ir.graph import info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.context_parallel.token_axis import argument
from mmcompile.passes.tensor_parallel.graph_facts import LayerFacts
from mmcompile.passes.tensor_parallel.shard_flow import Refusal
from mmcompile.passes.values import aten_ops, op_name, tensors

# Ops that give other ids to some tokens, or look at ids in another shape.
_KEEP_IDS = aten_ops(
    "view reshape flatten unsqueeze squeeze slice select clone to _to_copy contiguous where masked_fill clamp clamp_min "
    "clamp_max maximum minimum alias detach cat pad constant_pad_nd index_put scatter slice_scatter select_scatter copy fill "
    "expand expand_as lift_fresh_copy"
)


def embedding_shard(node: fx.Node, layer: LayerFacts, count: int) -> TensorShard | Refusal:
    """Return the sharding of the table of an `aten.embedding` node, or the reason why it stays whole."""
    table, ids = argument(node, "weight"), argument(node, "indices")
    if not layer.is_parameter(table):
        return Refusal(node, "its table is computed, not a parameter")
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        return Refusal(node, "its gradient is sparse, or scaled by how often an id occurs")
    inputs = _inputs(ids)
    component = layer.whole.graph.component(str(info(node).component))
    # A decoder's tokens may be the labels, shifted.
    labels = {name for loss in layer.whole.losses for name in _inputs(loss.args[1])}
    if not inputs & {*component.sources, *labels}:
        return Refusal(node, "it looks up positions or kinds, not tokens of an input")
    rows = layer.shape(table)[0]
    if rows % count:
        return Refusal(node, f"a vocabulary of {rows} does not divide by {count}", indivisible=True)
    return TensorShard(dim=0, blocks=(rows,), count=count)


def _inputs(ids: object) -> set[str]:
    """Return the names of the integer inputs from which token ids are taken, possibly with some ids replaced."""
    found: set[str] = set()
    waiting, seen = [ids], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and tensors(node) and not tensors(node)[0].is_floating_point():
            found.add(str(node.target))
        if node.op == "call_function" and op_name(node) in _KEEP_IDS:
            waiting += node.all_input_nodes
    return found
