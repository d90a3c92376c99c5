"""`Lockstep`: runs all ranks of a graph in one process, with nodes `tp_*` computed by their definition.

A value is a list with one tensor for each rank of its component, and nodes `tp_*` act across the list. A rank reads
from another component the value of its first rank; as over real links, the gradients of all readers are added up on
this rank, and the other ranks get none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd import Function
from torch.utils import _pytree as pytree

from mmcompile.errors import VerifyError
from mmcompile.ir.compat import is_random_op
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.ir.host_shapes import attribute
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.bitfield_attention.ops import bitfield_attention_op
from mmcompile.passes.values import aten_ops, op_name

_CPU = torch.device("cpu")
World = list[Any]
"""A value on every rank of its component; one item if all ranks of all components have the same value."""
_DROPOUTS = aten_ops("dropout dropout_ feature_dropout alpha_dropout feature_alpha_dropout native_dropout")


class Lockstep:
    """Runs nodes of a graph on every rank, with all ranks in this process.

    Args:
        graph: before or after the pass tensor-parallel.
        tensors: parameters and buffers by name, on CPU; those that the graph's own module holds may be left out.
        inputs: values of the graph's inputs by name, sizes and host values included.
        dtype: dtype of all floats, without dropout; None: the graph's own dtypes and dropout.
    """

    def __init__(
        self,
        graph: ModelGraph,
        tensors: Mapping[str, torch.Tensor],
        inputs: Mapping[str, Any],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._graph = graph
        self._tensors = tensors
        self._inputs = inputs
        self._dtype = dtype
        self._specs = graph.specs
        self.degrees = _degrees(graph)
        self._leaves: dict[tuple[str, str | None], list[torch.Tensor]] = {}
        """(parameter, component that reads it) -> leaf tensor of each of the component's ranks, which collects its gradient."""
        self.values: dict[fx.Node, World] = {}
        """Values of the nodes run so far, and values that were given."""

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Compute the calls among `nodes` (in graph order) on every rank, and add their results to `values`; skip other nodes."""
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._call(node)

    def gradients(self) -> dict[str, list[torch.Tensor]]:
        """Return parameter name -> its whole gradient on each rank; the parts of a sharded gradient are joined.

        Raises:
            VerifyError: some ranks have a gradient for a parameter and others have none.
        """
        found: dict[str, list[torch.Tensor]] = {}
        for (name, _), parts in self._leaves.items():
            made = [part.grad for part in parts]
            grads = [grad for grad in made if grad is not None]
            if not grads:
                continue
            if len(grads) < len(made):
                raise VerifyError(f"{len(grads)} of {len(made)} ranks have a gradient of {name}")
            shard = self._graph.shards.get(name)
            each = grads if shard is None else [shard.joined(grads)]
            before = found.get(name)
            # Components that share a parameter each add a gradient, of which every rank has the whole.
            found[name] = each if before is None else [one + other for one in before for other in each]
        return found

    def _call(self, node: fx.Node) -> World:
        component = None if info(node).shared else info(node).component
        count = 1 if component is None else self.degrees[component]
        worlds = {source: self._world(source, component, count) for source in node.all_input_nodes}

        def rank(index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = fx.map_arg((node.args, dict(node.kwargs)), lambda source: worlds[source][index])
            return given if self._dtype is None else self._converted(node, given)

        across = ACROSS.get(op_name(node))
        if across is not None:
            each = [rank(index)[0] for index in range(count)]
            return across(*([arguments[i] for arguments in each] for i in range(len(each[0]) - 2)))
        target = _STAND_INS.get(op_name(node), node.target) if self._dtype is not None else node.target
        assert callable(target)
        return [target(*args, **kwargs) for args, kwargs in map(rank, range(count))]

    def _world(self, source: fx.Node, component: str | None, count: int) -> World:
        if source.op == "get_attr":
            return self._parameter(source, component, count)
        if source.op == "placeholder":
            return [self._held(self._inputs[str(source.target)])] * count
        values = self.values[source]
        own = source.op == "call_function" and info(source).component == component
        return values if own else [values[0]] * count

    def _parameter(self, source: fx.Node, component: str | None, count: int) -> World:
        name = str(source.target)
        spec = self._specs.get(name)
        if spec is None:
            value = self._tensors[name] if name in self._tensors else attribute(self._graph.module, name)
            return [self._held(value)] * count
        key = (spec.name, component)
        if key not in self._leaves:
            whole = self._held(
                next(self._tensors[n] for n in (spec.name, *spec.aliases) if n in self._tensors).detach()
            )
            shard = self._graph.shards.get(spec.name)
            parts = [(whole if shard is None else shard.part(whole, index)).detach() for index in range(count)]
            for part in parts:
                part.requires_grad_(spec.trainable)
            self._leaves[key] = parts
        return self._leaves[key]

    def _held(self, value: Any) -> Any:
        if self._dtype is None or not isinstance(value, torch.Tensor):
            return value
        return value.to(_CPU, self._dtype if value.is_floating_point() else value.dtype)

    def _converted(
        self, node: fx.Node, given: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_map(self._literal, given)
        if op_name(node) in _DROPOUTS:
            args = (args[0], 0.0, *args[2:])
        if op_name(node) == "aten.scaled_dot_product_attention":
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return args, kwargs

    def _literal(self, value: Any) -> Any:
        assert self._dtype is not None
        if isinstance(value, torch.dtype):
            return self._dtype if value.is_floating_point else value
        if isinstance(value, float) and isfinite(value):  # The lowest number of a wider type, in masks.
            largest = torch.finfo(self._dtype).max
            return min(max(value, -largest), largest)
        return _CPU if isinstance(value, torch.device) else value


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers even if dropout is off."""
    off = _DROPOUTS | {"aten.scaled_dot_product_attention"}
    return is_random_op(node.target) and op_name(node) not in off


def _degrees(graph: ModelGraph) -> dict[str, int]:
    found = {component.name: 1 for component in graph.components}
    for node in graph.calls:
        if op_name(node) in ACROSS:
            found[component_of(node)] = int(node.args[-1])  # type: ignore[arg-type]
    return found


Tensors = tuple[torch.Tensor, ...]
"""One tensor for each rank, rank 0 first."""


class _Across(Function):
    """Autograd function on the tensors of all ranks at once; its forward and backward are given as arguments."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[[Tensors], Tensors], forward: Any, *values: torch.Tensor) -> Tensors:
        ctx.gradients = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, *ctx.gradients(grads)


def _across(forward: Callable[[Tensors], Tensors], backward: Callable[[Tensors], Tensors]) -> Callable[[World], World]:
    return lambda values: list(_Across.apply(backward, forward, *values))  # type: ignore[arg-type]


def _own(values: Tensors) -> Tensors:
    return tuple(value.clone() for value in values)


def _summed(values: Tensors) -> Tensors:
    total = sum(values[1:], start=values[0])
    return tuple(total.clone() for _ in values)


def _of_first(values: Tensors) -> Tensors:
    return values[0], *map(torch.zeros_like, values[1:])


def _slice(values: World, dims: Sequence[int], blocks: Sequence[Sequence[int]]) -> World:
    shard = TensorShard(dim=dims[0], blocks=tuple(blocks[0]), count=len(values))
    return [shard.part(value, index) for index, value in enumerate(values)]


def _heads(values: World, dims: Sequence[int], heads: Sequence[Sequence[int]]) -> World:
    each = len(heads[0]) // len(values)
    return [
        torch.stack([value.select(dims[0], head) for head in heads[0][index * each : (index + 1) * each]], dims[0])
        for index, value in enumerate(values)
    ]


def _embedding(tables: World, ids: World, paddings: Sequence[int]) -> World:
    """Return rows [..., dim] of `ids` on each rank, whose table has a part of the vocabulary. Ids of other parts give zeros.

    The row of the padding id gets no gradient.
    """
    made = []
    for index, table in enumerate(tables):
        own = ids[index] - index * len(table)
        outside = (own < 0) | (own >= len(table))
        rows = F.embedding(own.masked_fill(outside, 0), table)
        rows = torch.where((ids[index] == paddings[index])[..., None], rows.detach(), rows)
        made.append(rows.masked_fill(outside[..., None], 0))
    return made


def _loss(logits: World, labels: World, ignored: Sequence[int]) -> World:
    """Return (sum of the cross-entropy, number of tokens, log-sum-exp) on each rank, over the classes of all ranks.

    A rank's loss has a gradient only for its own logits.
    """
    made = []
    for index, label in enumerate(labels):
        all_classes = [part if rank == index else part.detach() for rank, part in enumerate(logits)]
        whole = torch.cat(all_classes, 1)
        wide = whole if whole.dtype == torch.float64 else whole.float()
        loss = F.cross_entropy(wide, label, ignore_index=ignored[index], reduction="sum")
        made.append((loss, (label != ignored[index]).sum(), wide.logsumexp(1)))
    return made


ACROSS: Mapping[str, Callable[..., World]] = {
    "mmcompile.tp_copy": _across(_own, _summed),
    "mmcompile.tp_exit": _across(_own, _summed),
    "mmcompile.tp_sum": _across(_summed, _own),
    "mmcompile.tp_enter": _across(_own, _of_first),
    "mmcompile.tp_slice": _slice,
    "mmcompile.tp_heads": _heads,
    "mmcompile.tp_embedding": _embedding,
    "mmcompile.tp_token_loss": _loss,
}
"""Op name -> function from the op's arguments on every rank, without group and count, to its results on every rank."""


def _own_tokens(q: Any, k: Any, v: Any, *given: Any) -> Any:
    """Compute one rank's context-parallel attention without other ranks: its own keys and values stand in for theirs."""
    words, positions, kv_words, kv_positions, scale, window, _, _, num_ranks = given
    keys, values = (torch.cat([x] * num_ranks, dim=2) for x in (k, v))
    return bitfield_attention_op(q, keys, values, words, positions, kv_words, kv_positions, scale, window, "auto")


_STAND_INS: Mapping[str, Callable[..., Any]] = {"mmcompile.context_parallel_attention": _own_tokens}
"""Name of an op that needs other ranks' tokens -> function that computes it in this process instead."""
