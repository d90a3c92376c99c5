"""`documents_meet`: whether tokens of one packed document reach another, and where.

Between the token embeddings and the loss every op must treat tokens alike (`mmcompile.passes.token_rules`), attention excepted:
its mask is computed and must show no pair of two documents. What the model computes from integers for each token (rotary
tables, position ids, shifted labels) is computed twice, the second time with the documents in another order: each document must
take its values along, or they depend on what else is in the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from mmcompile.errors import PlanError
from mmcompile.ir.compat import FakeTensor
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.ir.host import attribute
from mmcompile.ir.nodes import merge_features, token_loss
from mmcompile.passes.mask_claims import HIDDEN
from mmcompile.passes.token_axis import Rule, TokenAxis, TokenFlow, argument, follow, shape
from mmcompile.passes.token_rules import rule_of
from mmcompile.passes.values import aten_ops, op_name

aten = torch.ops.aten
_ATTENTION = aten_ops("scaled_dot_product_attention")
_EMBEDDING = aten_ops("embedding")
_PLACED = aten_ops("index_put masked_scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Every input of a graph for one row of documents."""

    values: Mapping[str, Any]
    """Placeholder -> tensor or size, those that the host computes included."""
    order: tuple[int, ...]
    """Documents in the order in which they stand in the row."""
    lengths: tuple[int, ...]
    """Tokens of document 0, 1, ..."""

    def document_of(self) -> torch.Tensor:
        """The document of every token, [T]."""
        return torch.cat([torch.full((self.lengths[number],), number) for number in self.order])

    def rows_of(self) -> torch.Tensor:
        """Where the tokens of documents 0, 1, ... stand in the row, [T]."""
        starts = dict(zip(self.order, accumulate((self.lengths[n] for n in self.order), initial=0), strict=False))
        return torch.cat([torch.arange(length) + starts[number] for number, length in enumerate(self.lengths)])


def documents_meet(graph: ModelGraph, first: PackedBatch, second: PackedBatch) -> str | None:
    """Why documents in one row are not isolated from each other; None if they are.

    Args:
        graph: captured on `first`, annotated; not changed.
        second: the same documents in another order.
    """
    work = _Work(made=copied(graph), first=first, second=second)
    try:
        work.run()
    except PlanError as error:
        return str(error)
    return None


@dataclass(kw_only=True, slots=True)
class _Work:
    made: ModelGraph
    first: PackedBatch
    second: PackedBatch
    flow: TokenFlow = field(init=False)
    met: list[tuple[fx.Node, fx.Node, TokenAxis]] = field(default_factory=list)
    """Whole values that meet tokens: (value, its form in the flow, where its tokens are)."""
    known: tuple[dict[fx.Node, Any], dict[fx.Node, Any]] = field(default_factory=lambda: ({}, {}))

    def run(self) -> None:
        """Raises PlanError where documents meet."""
        nodes = [node for node in self.made.module.graph.nodes if node.op == "call_function"]
        self.flow = TokenFlow(
            graph=self.made,
            tokens=sum(self.first.lengths),
            spread=self._spread,
            task="documents meet in",
            consequence="train this model without packing",
        )
        self._start(nodes)
        follow(self.flow, nodes, self._rule_of)
        for node in nodes:
            if node.target is token_loss and node.args[0] not in self.flow.axes:
                self.flow.refuse(node, "no token embedding reaches its logits through ops that treat tokens alike")
        for value, _, axis in self.met:
            self._check_taken_along(value, axis)

    def _start(self, nodes: Sequence[fx.Node]) -> None:
        """Look-ups of the row's tokens in a table of the language model."""
        for node in nodes:
            if op_name(node) in _EMBEDDING and info(node).component == self.made.loss_component:
                ids = argument(node, "indices")
                if ids not in self.flow.axes and shape(ids)[-1] == self.flow.tokens:
                    node.replace_input_with(ids, self.flow.to_spread(node, ids, TokenAxis(dim=len(shape(ids)) - 1)))

    def _spread(self, value: fx.Node, axis: TokenAxis, filler: float) -> fx.Node:
        """A name of its own for a whole value where it meets tokens."""
        for known, made, place in self.met:
            if known is value and place == axis:
                return made
        after = value if value.op == "call_function" else _last_input(value.graph)
        with value.graph.inserting_after(after):
            made = value.graph.call_function(aten.alias.default, (value,))
        made.meta = dict(value.meta)
        self.met.append((value, made, axis))
        return made

    def _rule_of(self, node: fx.Node) -> Rule | None:
        if op_name(node) in _ATTENTION:
            return self._attention
        if node.target is merge_features or op_name(node) in _PLACED:
            return self._merge
        return rule_of(node)

    def _merge(self, flow: TokenFlow, node: fx.Node) -> TokenAxis:
        """Features of media are put where their placeholders are."""
        embeddings, where, features = node.args[:3]
        places = [i for i in (where if isinstance(where, (list, tuple)) else (where,)) if isinstance(i, fx.Node)]
        if embeddings not in flow.axes or any(x in flow.axes for x in (*places, features)):
            flow.refuse(node, "what is put into the tokens comes from tokens")
        for place in places:
            if self._values(place) is None:
                flow.refuse(node, f"where {place.name} puts it depends on activations")
        return flow.axes[embeddings]  # type: ignore[index]

    def _attention(self, flow: TokenFlow, node: fx.Node) -> TokenAxis:
        """Self-attention under a mask that shows no pair of two documents."""
        axis, mask = TokenAxis(dim=2), argument(node, "attn_mask")
        for name in ("query", "key", "value"):
            value = argument(node, name)
            if value not in flow.axes or not flow.same(flow.axes[value], axis):
                flow.refuse(node, f"its {name} is not [batch, heads, tokens, dim] of the row (cross-attention)")
        if mask is None:
            flow.refuse(node, "it has no mask that tells documents apart: the model does not look at position_ids for it")
        if mask in flow.axes:
            flow.refuse(node, "its mask is made of activations")
        values = self._values(mask)
        if values is None:
            flow.refuse(node, f"its mask {mask.name} is made of activations")
        for value, batch in zip(values, (self.first, self.second), strict=True):
            _check_mask(flow, node, value, batch)
        one, other = (
            value.index_select(-1, rows).index_select(-2, rows)
            for value, rows in zip(values, (self.first.rows_of(), self.second.rows_of()), strict=True)
        )
        if not torch.equal(one, other):
            flow.refuse(node, f"its mask {mask.name} shows a document other pairs of its own if it stands elsewhere")
        return axis

    def _check_taken_along(self, value: fx.Node, axis: TokenAxis) -> None:
        """The values of a document's tokens are the same wherever it stands."""
        values = self._values(value)
        where = info(value).module_path if value.op == "call_function" else ""
        name = f"{value.name} ({where or 'in the model itself'})"
        if values is None:
            raise PlanError(f"documents meet: {name} meets tokens and is made of activations")
        rows = [
            _ordered(found.movedim(axis.dim, 0), axis, self.flow, batch)
            for found, batch in zip(values, (self.first, self.second), strict=True)
        ]
        shared = rows[0].keys() & rows[1].keys()
        if not all(torch.allclose(rows[0][key].double(), rows[1][key].double()) for key in shared):
            raise PlanError(
                f"documents meet: {name} gives a document other values if it stands elsewhere in the row, "
                "as absolute positions do that ignore position_ids"
            )

    def _values(self, node: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The value in both batches; None if activations are needed for it."""
        found = [
            _evaluated(self.made, node, batch.values, known)
            for batch, known in zip((self.first, self.second), self.known, strict=True)
        ]
        return None if found[0] is None or found[1] is None else (found[0], found[1])


def _check_mask(flow: TokenFlow, node: fx.Node, mask: torch.Tensor, batch: PackedBatch) -> None:
    if mask.dim() < 2 or mask.shape[-1] != flow.tokens or mask.shape[-2] != flow.tokens:
        flow.refuse(node, f"its mask is {list(mask.shape)}, not [..., tokens, tokens]: it hides the same keys from all tokens")
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    document = batch.document_of()
    others = visible & (document[:, None] != document[None, :])
    if others.any():
        query, key = others.nonzero()[0, -2:].tolist()
        flow.refuse(node, f"its mask shows token {key} to token {query} of another document")


def _ordered(value: torch.Tensor, axis: TokenAxis, flow: TokenFlow, batch: PackedBatch) -> dict[tuple[int, int], torch.Tensor]:
    """Values by (document, token of it); `value` has its tokens in dim 0."""
    outer, kept = flow.number(axis.outer), flow.kept(axis)
    tokens = value.reshape(outer, kept, axis.inner, *value.shape[1:]).movedim(1, 0)
    found: dict[tuple[int, int], torch.Tensor] = {}
    row = 0
    for number in batch.order:
        for place in range(batch.lengths[number]):
            if 0 <= row - axis.front < kept:
                found[number, place] = tokens[row - axis.front]
            row += 1
    return found


def _evaluated(graph: ModelGraph, node: fx.Node, inputs: Mapping[str, Any], known: dict[fx.Node, Any]) -> Any:
    """A value computed from integer inputs and the model's constants; None if it needs more.

    A constant without values (of a model that is only a configuration) gets arbitrary ones: what is asked is whether a document
    takes its values along, and not which they are.
    """
    needed: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in known or one in needed:
            continue
        needed.add(one)
        waiting += one.all_input_nodes
    for one in graph.module.graph.nodes:
        if one in needed:
            value = _value(graph, one, inputs, known)
            if value is None:
                return None
            known[one] = value
    return known[node]


def _value(graph: ModelGraph, node: fx.Node, inputs: Mapping[str, Any], known: Mapping[fx.Node, Any]) -> Any:
    if node.op == "placeholder":
        value = inputs[str(node.target)]
        return None if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    if node.op == "get_attr":
        value = attribute(graph.module, str(node.target))
        if isinstance(value, torch.nn.Parameter):
            return None
        if not isinstance(value, FakeTensor):
            return value
        size = tuple(value.shape)
        return torch.linspace(0.1, 1.0, value.numel()).reshape(size).to(value.dtype) if value.is_floating_point() else None
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if random or _is_mutating(node):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_mutating(node: fx.Node) -> bool:
    """Whether a node changes a buffer in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _last_input(graph: fx.Graph) -> fx.Node:
    return [node for node in graph.nodes if node.op == "placeholder"][-1]

