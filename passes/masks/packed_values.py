"""`PackedBatch`: a row of documents as inputs of a graph, and the values that the graph computes from integers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mmcompile.ir.compat import FakeTensor, is_mutating_op, is_random_op
from mmcompile.ir.graph import ModelGraph, reached
from mmcompile.ir.host_shapes import attribute
from mmcompile.passes.context_parallel.token_axis import TokenAxis, TokenFlow


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """All inputs of a graph for one row of packed documents."""

    values: Mapping[str, Any]
    """Input name -> tensor or size, inputs that the host computes included."""
    order: tuple[int, ...]
    """Document numbers in their order in the row."""
    lengths: tuple[int, ...]
    """Number of tokens in document 0, 1, ..."""
    kept: tuple[int, ...]
    """Numbers of the documents that have the same tokens as in the captured batch."""

    def document_of(self) -> torch.Tensor:
        """Return the number of each token's document, integers [T]."""
        return torch.cat([torch.full((self.lengths[number],), number) for number in self.order])


def block(mask: torch.Tensor, batch: PackedBatch, number: int) -> torch.Tensor:
    """Return the rows and columns of a mask, [..., queries, keys], that belong to the tokens of document `number`."""
    rows = (batch.document_of() == number).nonzero()[:, 0]
    return mask.index_select(-1, rows).index_select(-2, rows)


def by_token(
    value: torch.Tensor, axis: TokenAxis, flow: TokenFlow, batch: PackedBatch
) -> dict[tuple[int, int], torch.Tensor]:
    """Return (document number, index of a token in it) -> values of this token, from `value`, whose dim 0 is token dim `axis`."""
    outer, kept = flow.number(axis.outer), flow.kept(axis)
    tokens = value.reshape(outer, kept, axis.inner, *value.shape[1:]).movedim(1, 0)
    rows = [(number, place) for number in batch.order for place in range(batch.lengths[number])]
    return dict(zip(rows[axis.front : axis.front + kept], tokens, strict=True))


def evaluated(graph: ModelGraph, node: fx.Node, inputs: Mapping[str, Any], known: dict[fx.Node, Any]) -> Any:
    """Return a node's value computed from integer inputs and the model's constants; None if it depends on other values.

    A constant without values (of a meta model) gets arbitrary ones. They suffice to check that a document has equal values in
    different rows.
    """
    needed = reached([node], lambda one: () if one in known else one.all_input_nodes)
    for one in graph.module.graph.nodes:
        if one in needed and one not in known:
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
        if not value.is_floating_point():
            return None
        return torch.linspace(0.1, 1.0, value.numel()).reshape(tuple(value.shape)).to(value.dtype)
    if is_random_op(node.target) or is_mutating_op(node.target):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
