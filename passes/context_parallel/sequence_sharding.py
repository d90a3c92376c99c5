"""`SequenceSharder`: makes the nodes that take a rank's rows of a whole value.

A `shard_tokens` node is placed so that the least is sent between stages. Each stage computes a value that belongs to no layer
(mask, rotary table) for itself, and also its `shard_tokens` node. For a whole value from layer 0 or another component the
node is in layer 0, so that only a rank's rows of the sequence are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph, NodeInfo, describe, info
from mmcompile.ir.host_shapes import attribute
from mmcompile.kernels.bitfield_attention.parallel.token_ops import shard_tokens as shard_tokens
from mmcompile.passes.context_parallel.token_axis import Size, TokenAxis, TokenFlow
from mmcompile.passes.values import sizes

aten = torch.ops.aten


@dataclass(kw_only=True, slots=True)
class SequenceSharder:
    """Makes `shard_tokens` nodes, one for each distinct value, even if the model computes the value several times."""

    graph: ModelGraph
    component: str
    index: fx.Node
    tokens: Size
    flow: TokenFlow = field(init=False)
    _first: dict[fx.Node, fx.Node] = field(init=False)
    """Shared node -> the first node in graph order that computes the same value."""
    _made: dict[tuple[fx.Node, TokenAxis, float], fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._first = _first_equal(self.graph.module.graph)

    def spread(self, value: fx.Node, axis: TokenAxis, filler: float) -> fx.Node:
        """Return a node with the rank's rows of a whole value along `axis`; free rows, which hold no token, have `filler`."""
        value = self._first.get(value, value)
        key = (value, axis, filler)
        if key not in self._made:
            self._made[key] = self._make(value, axis, filler)
        return self._made[key]

    def _make(self, value: fx.Node, axis: TokenAxis, filler: float) -> fx.Node:
        graph, after = self.graph.module.graph, value
        if value.op != "call_function":
            after = [node for node in graph.nodes if node.op == "placeholder"][-1]
        chain = _Chain(
            graph=graph, after=after, note=self._place(value), value=value, full=sizes(value), flow=self.flow
        )
        dim = axis.dim
        if not (axis.outer == 1 and axis.inner == 1):
            kept = (axis.outer, self.tokens - axis.front - axis.back, *((axis.inner,) if axis.inner != 1 else ()))
            chain.add(
                aten.unflatten.int, dim, self._rows(kept), full=(*chain.full[:dim], *kept, *chain.full[dim + 1 :])
            )
            dim += 1
        filled = _of_dtype(filler, value.meta["val"].dtype)
        if axis.front or axis.back:
            amounts = [0, 0] * (len(chain.full) - 1 - dim) + [axis.front, axis.back]
            full = (*chain.full[:dim], self.tokens, *chain.full[dim + 1 :])
            chain.add(aten.pad.default, amounts, "constant", filled, full=full)
        chain.add(torch.ops.mmcompile.shard_tokens.default, self.index, dim, filled, full=chain.full)
        if dim != axis.dim:
            self.flow.axes[chain.value] = TokenAxis(dim=dim)
            last = dim + (axis.inner != 1)
            chain.add(aten.flatten.using_ints, axis.dim, last, full=sizes(value))
        return chain.value

    def _rows(self, kept: tuple[Size, ...]) -> list[Any]:
        """Return the sizes `kept`, (batch, tokens) or (batch, tokens, inner), as arguments of a view, one of them -1."""
        outer, tokens, *inner = kept
        first, second = self.flow.size_argument(outer), self.flow.size_argument(tokens)
        if first is not None:
            return [first, -1, *inner]
        if second is not None:
            return [-1, second, *inner]
        raise PlanError(
            f"context parallelism cannot split rows into batch and tokens: neither {outer} nor {tokens} is an input of the "
            "graph; capture with a fixed batch size"
        )

    def _place(self, value: fx.Node) -> NodeInfo:
        if value.op == "call_function":
            note = info(value)
            if note.shared or note.component == self.component:
                return note.at_same_place()
        if value.op == "get_attr":
            shared = not isinstance(attribute(self.graph.module, str(value.target)), nn.Parameter)
        else:
            integers = not value.meta["val"].is_floating_point() or value.meta.get("from_integers", False)
            shared = value.op == "placeholder" and integers
        return NodeInfo(component=None if shared else self.component, layer=0, module_path="")


@dataclass(kw_only=True, slots=True)
class _Chain:
    """Builder of consecutive nodes, each of which takes the result of the one before as first argument."""

    graph: fx.Graph
    after: fx.Node
    note: NodeInfo
    value: fx.Node
    """Node added last; before the first, the node that it is to read."""
    full: tuple[Size, ...]
    """Shape of the last node's value before tokens are sharded."""
    flow: TokenFlow

    def add(self, target: Any, *arguments: Any, full: tuple[Size, ...]) -> None:
        """Append a call of `target` on the last value. The shape of its result would be `full` if tokens were not sharded."""
        with self.graph.inserting_after(self.after):
            made = self.graph.call_function(target, (self.value, *arguments))
        dtype = self.value.meta["val"].dtype
        value = torch.empty([self.flow.number(size) for size in full], dtype=dtype, device="meta")
        self.value = self.after = describe(made, self.note, value, full)
        self.full = full


def _of_dtype(filler: float, dtype: torch.dtype) -> float:
    return filler if dtype.is_floating_point else bool(filler) if dtype == torch.bool else int(filler)


def _first_equal(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return shared node -> first shared node that computes the same value, as each layer may reshape the rotary table."""
    first: dict[fx.Node, fx.Node] = {}
    by_key: dict[object, fx.Node] = {}

    def key(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return tuple(key(item) for item in value)
        if isinstance(value, fx.Node):
            return first.get(value, value)
        return (type(value), repr(value))

    for node in graph.nodes:
        if node.op == "call_function" and info(node).shared:
            computed = (node.target, key(node.args), key(sorted(node.kwargs.items())))
            first[node] = by_key.setdefault(computed, node)
    return first
