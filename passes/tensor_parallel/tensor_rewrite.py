"""`ShardRewriter`: rewrites a graph so that every rank of a group computes its part of the sharded values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import META_KEY, NodeInfo, info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.tensor_parallel.boundary_ops import tp_copy as tp_copy
from mmcompile.kernels.tensor_parallel.vocabulary import tp_embedding as tp_embedding
from mmcompile.passes.context_parallel.token_axis import argument, set_argument, sizes
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts, projection
from mmcompile.passes.tensor_parallel.regions import ComponentSharding
from mmcompile.passes.tensor_parallel.shard_flow import ShardFlow, Shards
from mmcompile.passes.values import aliased, aten_ops, op_name, tensors

aten = torch.ops.aten
_META = torch.device("meta")
# Copies of elements and views of them: the gradients of their results add up as those of what they are made from.
_REARRANGES = aten_ops(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand transpose permute contiguous clone repeat_interleave"
)


@dataclass(kw_only=True, slots=True)
class ShardRewriter:
    """Rewrites a graph so that ranks run the regions found; afterwards `shards` has the sharding of each sharded parameter."""

    facts: GraphFacts
    group: str
    shards: dict[str, TensorShard] = field(default_factory=dict)
    """First name of a parameter -> its sharding over the ranks."""
    _copies: dict[tuple[fx.Node, str | None, int], fx.Node] = field(default_factory=dict)
    _summed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node that computes a rank's summand -> node of the sum over ranks, which other nodes read instead."""

    def apply(self, sharding: ComponentSharding) -> None:
        """Rewrite the regions and embeddings of one component."""
        for (_, parameter), shard in sharding.weights().items():
            self.shards[self.facts.parameters[str(parameter.target)]] = shard
            _set_local(parameter, shard)
        for node, shard in sharding.embeddings.items():
            self._embedding(node, shard)
        for region in sharding.regions:
            self._region(region)

    def _region(self, region: ShardFlow) -> None:
        self._partial_inputs(region)
        for (node, value), _ in list(region.copies.items()):
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
        """Replace whole values of which a rank reads only a part by nodes that make the part."""
        for (node, value), shard in region.parts.items():
            made = self._part(region, node, value, shard.dim, shard.blocks, torch.ops.mmcompile.tp_slice.default)
            _describe(made, value, shard.local_sizes(sizes(value)))
            node.replace_input_with(self._summed.get(value, value), made)
        for (node, value), heads in region.heads.items():
            dim = len(sizes(value)) - 3
            made = self._part(region, node, value, dim, heads, torch.ops.mmcompile.tp_heads.default)
            full = list(sizes(value))
            full[dim] = len(heads) // region.count
            _describe(made, value, full)
            node.replace_input_with(self._summed.get(value, value), made)

    def _part(
        self, region: ShardFlow, node: fx.Node, value: fx.Node, dim: int, layout: Sequence[int], target: Any
    ) -> fx.Node:
        carries = (node, value) in region.copies
        source = value = self._summed.get(value, value)
        if carries:
            reader, copied = smallest(node, value, region)
            made = self._copy(reader, copied, region.count)
            if reader is node:
                source = made
            else:
                reader.replace_input_with(copied, made)
        return self._call(node, target, (source, dim, list(layout), self.group, region.count), like=node)

    def _copy(self, node: fx.Node, value: fx.Node, count: int) -> fx.Node:
        """Return the `tp_copy` node of a value, one for all readers in a layer."""
        key = (value, info(node).component, info(node).layer)
        if key not in self._copies:
            own = self.facts.layers[str(info(node).component), info(node).layer]
            first = next(other for other in own if value < other)  # Other readers may come before this one.
            made = self._call(first, torch.ops.mmcompile.tp_copy.default, (value, self.group, count), like=node)
            _describe(made, value, sizes(value))
            self._copies[key] = made
        return self._copies[key]

    def _sum(self, node: fx.Node, count: int) -> None:
        """Insert the sum over ranks behind a projection; the projection's bias is added after the sum."""
        found = projection(node)
        assert found is not None
        users = list(node.users)
        if op_name(node) == "aten.addmm":
            node.target, node.args = aten.mm.default, (found.source, found.weight)
        elif found.bias is not None:
            node.args, node.kwargs = (found.source, found.weight), {}
        result = self._after(node, torch.ops.mmcompile.tp_sum.default, (node, self.group, count))
        _describe(result, node, sizes(node))
        if found.bias is not None:
            total = self._after(result, aten.add.Tensor, (result, found.bias))
            _describe(total, node, sizes(node))
            result = total
        self._replace(node, users, result)

    def _embedding(self, node: fx.Node, shard: TensorShard) -> None:
        table, ids = argument(node, "weight"), argument(node, "indices")
        padding = argument(node, "padding_idx")
        rows = shard.size
        users = list(node.users)
        node.target = torch.ops.mmcompile.tp_embedding.default
        node.args = (table, ids, padding % rows if padding != -1 else -1, self.group, shard.count)
        node.kwargs = {}
        result = self._after(node, torch.ops.mmcompile.tp_sum.default, (node, self.group, shard.count))
        _describe(result, node, sizes(node))
        self._replace(node, users, result)

    def _replace(self, node: fx.Node, users: Iterable[fx.Node], result: fx.Node) -> None:
        for user in users:
            user.replace_input_with(node, result)
        self._summed[node] = result

    def _loss(self, node: fx.Node, count: int) -> None:
        logits, labels, ignore_index = node.args
        loss, num_tokens = tensors(node)
        assert isinstance(labels, fx.Node)
        node.target = torch.ops.mmcompile.tp_token_loss.default
        node.args = (logits, labels, ignore_index, self.group, count)
        of_tokens = torch.empty(tensors(labels)[0].shape, dtype=loss.dtype, device="meta")
        node.meta["val"] = (loss, num_tokens, of_tokens)

    def _call(self, before: fx.Node, target: Any, arguments: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
        with before.graph.inserting_before(before):
            return _annotated(before.graph.call_function(target, arguments), like)

    def _after(self, node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
        with node.graph.inserting_after(node):
            return _annotated(node.graph.call_function(target, arguments), node)


def _annotated(made: fx.Node, like: fx.Node) -> fx.Node:
    note = info(like)
    made.meta[META_KEY] = NodeInfo(
        component=note.component,
        layer=note.layer,
        module_path=note.module_path,
        carries_gradient=note.carries_gradient,
    )
    made.meta["module_path"] = note.module_path
    return made


def _describe(made: fx.Node, like: fx.Node, full: Iterable[Any]) -> None:
    """Record the value of a new node: the dtype of `like`, and the sizes `full`, whose symbols have the numbers of `like`."""
    full = tuple(full)
    known = [int(size) for size in tensors(like)[0].shape]
    shape = [size if isinstance(size, int) else now for size, now in zip(full, known, strict=True)]
    made.meta["val"] = torch.empty(shape, dtype=tensors(like)[0].dtype, device="meta")
    made.meta["symbolic_shape"] = full


def smallest(node: fx.Node, value: fx.Node, region: ShardFlow) -> tuple[fx.Node, fx.Node]:
    """Return (reader, value) at which the gradient of `value` is smallest, so that the sum over ranks sends the least.

    For keys and values that is before their heads are repeated.
    """
    reader, best = node, (node, value)
    while True:
        if tensors(value)[0].numel() < tensors(best[1])[0].numel():
            best = (reader, value)
        single = len(value.users) == 1 and value in region.facts.members
        if not single or op_name(value) not in _REARRANGES:
            return best
        reader, value = value, value.all_input_nodes[0]
        if not region.facts.carries(value):
            return best


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on the meta device with the shape and strides of a recorded value."""
    if value.device == _META:
        return value
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=_META)


def _set_local(parameter: fx.Node, shard: TensorShard) -> None:
    value = tensors(parameter)[0]
    if value.shape[shard.dim] == shard.size:
        parameter.meta["val"] = torch.empty(shard.local_shape(value.shape), dtype=value.dtype, device="meta")


def _localize(node: fx.Node, shards: Shards) -> None:
    """Replace the recorded value of a node by a part, of the sizes on one rank; a view of an input stays a view."""
    each = shards if isinstance(shards, tuple) else (shards,)
    before = tensors(node)
    wanted = [
        tuple(value.shape) if shard is None else shard.local_shape(value.shape)
        for value, shard in zip(before, each, strict=True)
    ]
    if aliased(node):
        node.meta["val"] = _run(node)
    else:
        made = tuple(_part_like(value, shape) for value, shape in zip(before, wanted, strict=True))
        node.meta["val"] = made if isinstance(shards, tuple) else made[0]
    got = [tuple(value.shape) for value in tensors(node)]
    if got != wanted:
        raise VerifyError(f"{node.format_node()} makes {got} of parts, and its results sharded are {wanted}")
    full = node.meta.get("symbolic_shape")
    if isinstance(shards, TensorShard) and full is not None:
        node.meta["symbolic_shape"] = shards.local_sizes(full)


def _run(node: fx.Node) -> Any:
    """Return the result of a view op, computed on recorded values without data."""
    given = pytree.tree_map_only(torch.device, lambda _: _META, (node.args, dict(node.kwargs)))
    args, kwargs = fx.map_arg(given, lambda source: pytree.tree_map_only(torch.Tensor, _on_meta, source.meta["val"]))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _part_like(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return an empty tensor of `shape` whose dims have the same order in memory as in `value`."""
    order = sorted(range(value.ndim), key=lambda dim: (-value.stride(dim), dim))
    laid_out = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device=_META)
    return laid_out.permute([order.index(dim) for dim in range(value.ndim)])
