"""`documents_meet`: proof that the tokens of packed documents do not affect each other, or the place where they do.

Between the token embeddings and the loss every op must treat tokens alike
(`mmcompile.passes.context_parallel.token_rules`), attention excepted: its mask is computed and must show no pair of two
documents. Values that the model computes from integers for each token (masks, rotary tables, position ids, shifted
labels) are computed again with the documents in another order, and with other tokens in one of them: the values of a
document must stay the same, else they depend on the other documents in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from mmcompile.errors import PlanError
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import ModelGraph, info, reached
from mmcompile.ir.nodes import merge_features, token_loss
from mmcompile.passes.context_parallel.token_axis import Rule, TokenAxis, TokenFlow, follow
from mmcompile.passes.context_parallel.token_rules import rule_of
from mmcompile.passes.masks.packed_values import PackedBatch, block, by_token, evaluated
from mmcompile.passes.masks.predicates import HIDDEN
from mmcompile.passes.values import argument, aten_ops, has_tag, op_name, shape

aten = torch.ops.aten
_PLACED = aten_ops("index_put masked_scatter")
_SAME_ROWS = aten_ops("to _to_copy clone contiguous alias detach")
_CONSEQUENCE = "train this model without packing"


def documents_meet(graph: ModelGraph, batch: PackedBatch, others: Sequence[PackedBatch]) -> str | None:
    """Return the reason why documents in one row are not isolated from each other; None if they are isolated.

    Args:
        graph: captured on `batch`, and annotated; it is not changed.
        others: rows with the same documents in another order, or with other tokens in some of the documents.
    """
    try:
        _IsolationProof(made=copied(graph), batches=(batch, *others)).run()
    except PlanError as error:
        return str(error)
    return None


@dataclass(kw_only=True, slots=True)
class _IsolationProof:
    made: ModelGraph
    batches: tuple[PackedBatch, ...]
    """Packed batches with the same documents; the captured batch is first."""
    flow: TokenFlow = field(init=False)
    met: list[tuple[fx.Node, fx.Node, TokenAxis]] = field(default_factory=list)
    """(value, its alias in `flow`, token dim) for values that meet token states in an op but are not made of token embeddings."""
    picked: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """Node with rows selected from tokens -> nodes of the row indices."""
    blocks: set[fx.Node] = field(default_factory=set)
    """Nodes of attention masks that were checked: they hide every pair of tokens of two documents."""
    known: list[dict[fx.Node, Any]] = field(init=False)
    """One mapping for each batch: node -> its value, for nodes computed so far."""

    def __post_init__(self) -> None:
        self.known = [{} for _ in self.batches]

    def run(self) -> None:
        # Follow the token dim from the embeddings to the loss.
        nodes = self.made.calls
        self.flow = TokenFlow(
            graph=self.made,
            tokens=sum(self.batches[0].lengths),
            spread=self._spread,
            task="documents meet in",
            consequence=_CONSEQUENCE,
        )
        for node in nodes:  # tokens are followed from where the language model looks up their embeddings
            if op_name(node) == "aten.embedding" and info(node).component == self.made.loss_component:
                ids = argument(node, "indices")
                if ids not in self.flow.axes and shape(ids)[-1] == self.flow.tokens:
                    node.replace_input_with(ids, self.flow.to_spread(node, ids, TokenAxis(dim=len(shape(ids)) - 1)))
        follow(self.flow, nodes, self._rule_of)
        for node in nodes:
            if node.target is token_loss and node.args[0] not in self.flow.axes:
                self.flow.refuse(node, "no token embedding reaches its logits through ops that treat tokens alike")
        for value, _, axis in self.met:
            self._check_taken_along(value, axis)

    def _spread(self, value: fx.Node, axis: TokenAxis, filler: float) -> fx.Node:
        """Return an alias of `value`, such as a mask, to be followed as one value per token; record both in `met`."""
        for known, made, place in self.met:
            if known is value and place == axis:
                return made
        inputs = [node for node in value.graph.nodes if node.op == "placeholder"]
        with value.graph.inserting_after(value if value.op == "call_function" else inputs[-1]):
            made = value.graph.call_function(aten.alias.default, (value,))
        made.meta = dict(value.meta)
        self.met.append((value, made, axis))
        return made

    def _rule_of(self, node: fx.Node) -> Rule | None:
        if op_name(node) == "aten.scaled_dot_product_attention":
            return self._attention
        if node.target is merge_features or op_name(node) in _PLACED:
            return self._merge
        if op_name(node) == "aten.index" and sum(index is not None for index in argument(node, "indices")) > 1:
            return self._pick
        return rule_of(node)

    def _merge(self, flow: TokenFlow, node: fx.Node) -> TokenAxis:
        """Return the token dim after media features replace placeholder tokens, or are added to their states (deepstack)."""
        embeddings, where, features = node.args[:3]
        if embeddings not in flow.axes or features in flow.axes:
            flow.refuse(node, "what is put into the tokens comes from tokens")
        places = _places(where)
        for place in places:
            of_tokens = place in flow.axes and flow.same(flow.axes[place], flow.axes[embeddings])  # type: ignore[index]
            if not of_tokens and (place in flow.axes or self._values(place) is None):
                flow.refuse(node, f"where {place.name} puts it depends on activations")
        if not self._rows_stay(features, places):  # type: ignore[arg-type]
            flow.refuse(node, "tokens are picked, and come back in other places")
        return flow.axes[embeddings]  # type: ignore[index]

    def _pick(self, flow: TokenFlow, node: fx.Node) -> None:
        """Record a node that selects tokens by index. Values made of them may only be put back at the same indices (`_merge`)."""
        places = _places(argument(node, "indices"))
        if any(place in flow.axes or self._values(place) is None for place in places):
            flow.refuse(node, "which tokens it picks depends on activations")
        self.picked[node] = places

    def _rows_stay(self, node: fx.Node, places: Sequence[fx.Node]) -> bool:
        """Return whether rows of `node` are put back (at `places`) at the indices where they were selected; True if none were."""
        if node in self.picked:
            pairs = list(zip(self.picked[node], places, strict=False))
            return len(pairs) == len(places) and all(self._equal(mine, its) for mine, its in pairs)
        if self.picked.keys().isdisjoint(reached(node.all_input_nodes)):
            return True
        alike = has_tag(node, torch.Tag.pointwise) or op_name(node) in _SAME_ROWS
        return alike and all(self._rows_stay(source, places) for source in node.all_input_nodes)

    def _equal(self, one: fx.Node, other: fx.Node) -> bool:
        """Return whether two nodes have equal values in every batch. False if either is computed from more than integers."""
        ours, theirs = self._values(one), self._values(other)
        return ours is not None and theirs is not None and all(map(torch.equal, ours, theirs))

    def _attention(self, flow: TokenFlow, node: fx.Node) -> TokenAxis:
        """Check that the mask of a self-attention node shows no pair of two documents. Return the token dim of its result."""
        axis, mask = TokenAxis(dim=2), argument(node, "attn_mask")
        for name in ("query", "key", "value"):
            value = argument(node, name)
            if value not in flow.axes or not flow.same(flow.axes[value], axis):
                flow.refuse(node, f"its {name} is not [batch, heads, tokens, dim] of the row (cross-attention)")
        if mask is None:
            flow.refuse(
                node, "it has no mask that tells documents apart: the model does not look at position_ids for it"
            )
        if mask in flow.axes:
            flow.refuse(node, "its mask is made of activations")
        if mask not in self.blocks:
            self._check_blocks(flow, node, mask)
            self.blocks.add(mask)
        return axis

    def _check_blocks(self, flow: TokenFlow, node: fx.Node, mask: fx.Node) -> None:
        """Raise PlanError if a mask shows a pair of two documents, or if its part for one document depends on the others."""
        values = self._values(mask)
        if values is None:
            flow.refuse(node, f"its mask {mask.name} is made of activations")
        for value, batch in zip(values, self.batches, strict=True):
            _check_mask(flow, node, value, batch)
        first = partial(block, values[0], self.batches[0])
        for value, batch in zip(values[1:], self.batches[1:], strict=True):
            if not all(torch.equal(first(number), block(value, batch, number)) for number in batch.kept):
                flow.refuse(
                    node, f"which pairs of a document its mask {mask.name} shows depends on the rest of the row"
                )

    def _check_taken_along(self, value: fx.Node, axis: TokenAxis) -> None:
        """Raise PlanError if the entries of `value` for a document change with its place or with other documents of the row."""
        values = self._values(value)
        where = info(value).module_path if value.op == "call_function" else ""
        name = f"{value.name} ({where or 'in the model itself'})"
        if values is None:
            raise PlanError(f"documents meet: {name} meets tokens and is made of activations; {_CONSEQUENCE}")
        first, *others = (
            by_token(found.movedim(axis.dim, 0), axis, self.flow, batch)
            for found, batch in zip(values, self.batches, strict=True)
        )
        for other, batch in zip(others, self.batches[1:], strict=True):
            shared = [key for key in first.keys() & other.keys() if key[0] in batch.kept]
            if not all(torch.allclose(first[key].double(), other[key].double()) for key in shared):
                raise PlanError(
                    f"documents meet: the values that {name} gives a document depend on the rest of the row, as absolute "
                    f"positions do that ignore position_ids; {_CONSEQUENCE}"
                )

    def _values(self, node: fx.Node) -> list[torch.Tensor] | None:
        found = [
            evaluated(self.made, node, batch.values, known)
            for batch, known in zip(self.batches, self.known, strict=True)
        ]
        return None if any(value is None for value in found) else found


def _places(where: object) -> tuple[fx.Node, ...]:
    parts = where if isinstance(where, (list, tuple)) else (where,)
    return tuple(part for part in parts if isinstance(part, fx.Node))


def _check_mask(flow: TokenFlow, node: fx.Node, mask: torch.Tensor, batch: PackedBatch) -> None:
    if mask.dim() < 2 or mask.shape[-1] != flow.tokens or mask.shape[-2] != flow.tokens:
        flow.refuse(
            node, f"its mask is {list(mask.shape)}, not [..., tokens, tokens]: it hides the same keys from all tokens"
        )
    visible = mask if mask.dtype == torch.bool else mask > HIDDEN
    document = batch.document_of()
    others = visible & (document[:, None] != document[None, :])
    if others.any():
        query, key = others.nonzero()[0, -2:].tolist()
        flow.refuse(node, f"its mask shows token {key} to token {query} of another document")
