"""`ShardRewriter`: rewrites a graph so that every rank of a group computes its part of the sharded values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ModelGraph, component_of, describe, info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.tensor_parallel.boundary_ops import tp_exit as tp_exit
from mmcompile.kernels.tensor_parallel.vocabulary import tp_embedding as tp_embedding
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts, projection, uncast
from mmcompile.passes.tensor_parallel.regions import ComponentSharding
from mmcompile.passes.tensor_parallel.shard_flow import ShardFlow, Shards
from mmcompile.passes.values import aliased, argument, aten_ops, computed, op_name, set_argument, shape, sizes, tensors

aten, ops = torch.ops.aten, torch.ops.mmcompile
# Copies of elements and views of them: the gradients of their results add up as those of what they are made from.
_REARRANGES = aten_ops(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand transpose permute contiguous clone repeat_interleave"
)


@dataclass(kw_only=True, slots=True)
class ShardRewriter:
    """Rewrites a graph so that each rank computes its part of the values that `ComponentSharding` shards."""

    facts: GraphFacts
    group: str
    shards: dict[str, TensorShard] = field(default_factory=dict)
    """First name of a parameter -> its sharding over the ranks."""
    _copies: dict[tuple[fx.Node, str | None, int], fx.Node] = field(default_factory=dict)
    _summed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node that computes a rank's summand -> node of the sum over ranks, which other nodes read instead."""

    def apply(self, sharding: ComponentSharding) -> None:
        """Rewrite all nodes of one component that `sharding` shards over ranks, token embeddings included."""
        for (_, parameter), shard in sharding.weights().items():
            self.shards[self.facts.name_of(parameter)] = shard
            _set_local(parameter, shard)
            _set_local(uncast(parameter), shard)
        for node, shard in sharding.embeddings.items():
            self._embedding(node, shard)
        for region in sharding.regions:
            self._region(region)

    def _region(self, region: ShardFlow) -> None:
        self._partial_inputs(region)
        for node, value in region.copies:
            if (node, value) not in region.parts and (node, value) not in region.heads:
                whole = self._summed.get(value, value)
                node.replace_input_with(whole, self._copy(node, whole, region.count))
        for node, changes in region.arguments.items():
            for name, value in changes.items():
                set_argument(node, name, value)
        for node in region.facts.nodes:
            if node in region.sums:
                self._sum(node, region.count)
            elif node in region.losses:
                self._loss(node, region.count)
            elif node in region.shards:
                _localize(node, region.shards[node])

    def _partial_inputs(self, region: ShardFlow) -> None:
        """Insert a node that cuts out a rank's part of a value, for each node of the region that needs only this part."""
        for (node, value), shard in region.parts.items():
            full = shard.local_sizes(sizes(value))
            self._part(region, node, value, (shard.dim, shard.blocks), full, ops.tp_slice.default)
        for (node, value), heads in region.heads.items():
            *outer, _, tokens, width = sizes(value)
            full = (*outer, len(heads) // region.count, tokens, width)
            self._part(region, node, value, (len(outer), heads), full, ops.tp_heads.default)

    def _part(
        self,
        region: ShardFlow,
        node: fx.Node,
        value: fx.Node,
        layout: tuple[int, Sequence[int]],
        full: Sequence[Any],
        target: Any,
    ) -> None:
        """Make `node` read a rank's part of its input `value`, through a new node that calls `target`.

        Args:
            layout: (sharded dim, sizes of its blocks), or (dim of heads, heads that each rank reads, rank 0 first).
            full: sizes of the part.
        """
        carries = (node, value) in region.copies
        source = value = self._summed.get(value, value)
        if carries:
            reader, copied = smallest(node, value, region)
            made = self._copy(reader, copied, region.count)
            if reader is node:
                source = made
            else:
                reader.replace_input_with(copied, made)
        dim, parts = layout
        arguments = (source, dim, list(parts), self.group, region.count)
        node.replace_input_with(value, _inserted(node, target, arguments, like=node, shaped=value, full=full))

    def _copy(self, node: fx.Node, value: fx.Node, count: int) -> fx.Node:
        """Return the `tp_copy` node through which a layer reads the value `value`, which all `count` ranks have alike.

        The node's backward sums the ranks' gradients. All readers in the layer of `node` share it.
        """
        key = (value, component_of(node), info(node).layer)
        if key not in self._copies:
            # Other readers may come before this one.
            first = next(other for other in self.facts.layers[key[1:]] if value < other)
            arguments = (value, self.group, count)
            self._copies[key] = _inserted(first, ops.tp_copy.default, arguments, like=node, shaped=value)
        return self._copies[key]

    def _sum(self, node: fx.Node, count: int) -> None:
        """Insert a sum over `count` ranks of the results of the linear layer `node`. Its bias is added after the sum, once."""
        found = projection(node)
        assert found is not None
        users = list(node.users)
        if op_name(node) == "aten.addmm":
            node.target, node.args = aten.mm.default, (found.source, found.weight)
        elif found.bias is not None:
            node.args, node.kwargs = (found.source, found.weight), {}
        result = _inserted(node.next, ops.tp_sum.default, (node, self.group, count), like=node, shaped=node)
        if found.bias is not None:
            result = _inserted(result.next, aten.add.Tensor, (result, found.bias), like=node, shaped=node)
        self._replace(node, users, result)

    def _embedding(self, node: fx.Node, shard: TensorShard) -> None:
        table, ids, padding = (argument(node, name) for name in ("weight", "indices", "padding_idx"))
        users = list(node.users)
        node.target = ops.tp_embedding.default
        node.args = (table, ids, padding % shard.size if padding != -1 else -1, self.group, shard.count)
        node.kwargs = {}
        result = _inserted(node.next, ops.tp_sum.default, (node, self.group, shard.count), like=node, shaped=node)
        self._replace(node, users, result)

    def _replace(self, node: fx.Node, users: Iterable[fx.Node], result: fx.Node) -> None:
        for user in users:
            user.replace_input_with(node, result)
        self._summed[node] = result

    def _loss(self, node: fx.Node, count: int) -> None:
        logits, labels, ignore_index = node.args
        loss, num_tokens = tensors(node)
        assert isinstance(labels, fx.Node)
        node.target = ops.tp_token_loss.default
        node.args = (logits, labels, ignore_index, self.group, count)
        of_tokens = torch.empty(tensors(labels)[0].shape, dtype=loss.dtype, device="meta")
        node.meta["val"] = (loss, num_tokens, of_tokens)


def _inserted(
    before: fx.Node,
    target: Any,
    arguments: tuple[Any, ...],
    *,
    like: fx.Node,
    shaped: fx.Node,
    full: Sequence[Any] | None = None,
) -> fx.Node:
    """Insert a call, and return it.

    Args:
        before: node in front of which the call is inserted.
        like: node whose layer, module and gradient flag the call gets.
        shaped: node whose value has the same dtype and, if `full` is None, the same sizes.
        full: sizes of the result; a symbol among them stands for the size that `shaped` has in the captured batch.
    """
    full = sizes(shaped) if full is None else full
    known = [size if isinstance(size, int) else now for size, now in zip(full, shape(shaped), strict=True)]
    value = torch.empty(known, dtype=tensors(shaped)[0].dtype, device="meta")
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, arguments)
    return describe(made, info(like).at_same_place(carries_gradient=info(like).carries_gradient), value, full)


def smallest(node: fx.Node, value: fx.Node, region: ShardFlow) -> tuple[fx.Node, fx.Node]:
    """Return the pair (reader, value) with the fewest elements, from (`node`, `value`) back through views.

    There the all-reduce of the gradient sends least: for keys and values, before their heads are repeated.
    """
    reader, best = node, (node, value)
    while True:
        if tensors(value)[0].numel() < tensors(best[1])[0].numel():
            best = (reader, value)
        single = len(value.users) == 1 and value in region.facts.members
        if not single or op_name(value) not in _REARRANGES:
            return best
        reader, value = value, value.all_input_nodes[0]
        if not region.facts.whole.carries(value):
            return best


def _set_local(parameter: fx.Node, shard: TensorShard) -> None:
    value = tensors(parameter)[0]
    if value.shape[shard.dim] == shard.size:
        parameter.meta["val"] = torch.empty(shard.local_shape(value.shape), dtype=value.dtype, device="meta")


def _localize(node: fx.Node, shards: Shards) -> None:
    """Replace a node's recorded fake result by one of the size that a rank computes."""
    each = shards if isinstance(shards, tuple) else (shards,)
    before = tensors(node)
    wanted = [
        tuple(value.shape) if shard is None else shard.local_shape(value.shape)
        for value, shard in zip(before, each, strict=True)
    ]
    if aliased(node):
        node.meta["val"] = computed(node)
    else:
        made = tuple(_part_like(value, shape) for value, shape in zip(before, wanted, strict=True))
        node.meta["val"] = made if isinstance(shards, tuple) else made[0]
    got = [tuple(value.shape) for value in tensors(node)]
    if got != wanted:
        raise VerifyError(f"{node.format_node()} makes {got} of parts, and its results sharded are {wanted}")
    full = node.meta.get("symbolic_shape")
    if isinstance(shards, TensorShard) and full is not None:
        node.meta["symbolic_shape"] = shards.local_sizes(full)


def _part_like(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    order = sorted(range(value.ndim), key=lambda dim: (-value.stride(dim), dim))
    laid_out = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device="meta")
    return laid_out.permute([order.index(dim) for dim in range(value.ndim)])


def add_borders(graph: ModelGraph, degrees: Mapping[str, int], group: str) -> ModelGraph:
    """Insert nodes that keep gradients whole between components, where one has a tensor-parallel degree above 1.

    Every rank of the consumer has the whole gradient. `tp_enter` zeroes it on all ranks but one, so that their sum is the
    gradient. One rank of the producer receives the sum, and `tp_exit` sends it to all ranks of the producer.
    """
    exits: dict[fx.Node, fx.Node] = {}
    enters: dict[tuple[fx.Node, str, int], fx.Node] = {}
    for value, node in list(_crossing(graph)):
        if not info(value).carries_gradient or not info(node).carries_gradient:
            continue
        producer, consumer, made = component_of(value), component_of(node), value
        if degrees[producer] > 1:
            if value not in exits:
                arguments = (value, group, degrees[producer])
                exits[value] = _inserted(value.next, ops.tp_exit.default, arguments, like=value, shaped=value)
            made = exits[value]
        if degrees[consumer] > 1:
            key = (value, consumer, info(node).layer)
            if key not in enters:
                arguments = (made, group, degrees[consumer])
                enters[key] = _inserted(node, ops.tp_enter.default, arguments, like=node, shaped=made)
            made = enters[key]
        node.replace_input_with(value, made)
    # The edges of the component DAG, with the names of the values now sent.
    flowing: dict[tuple[str, str], dict[str, None]] = {edge[:2]: {} for edge in graph.edges}
    for value, node in _crossing(graph):
        flowing[component_of(value), component_of(node)][value.name] = None
    return replace(graph, edges=tuple((*pair, tuple(names)) for pair, names in flowing.items()))


def _crossing(graph: ModelGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (value, node of another component that reads it), in graph order of the readers, for values not shared by stages."""
    for node in graph.calls:
        for value in node.all_input_nodes if not info(node).shared else ():
            own = value.op == "call_function" and not info(value).shared
            if own and component_of(value) != component_of(node):
                yield value, node
