"""`PackedBatch`: a row of documents as inputs of a graph, and the values that the graph computes from integers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mmcompile.ir.compat import FakeTensor, is_mutating_op
from mmcompile.ir.graph import ModelGraph
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

    def rows_of(self, number: int) -> torch.Tensor:
        """Return the positions in the row of the tokens of document `number`."""
        return (self.document_of() == number).nonzero()[:, 0]


def block(mask: torch.Tensor, batch: PackedBatch, number: int) -> torch.Tensor:
    """Return the rows and columns of a mask, [..., queries, keys], that belong to the tokens of document `number`."""
    rows = batch.rows_of(number)
    return mask.index_select(-1, rows).index_select(-2, rows)


def by_token(
    value: torch.Tensor, axis: TokenAxis, flow: TokenFlow, batch: PackedBatch
) -> dict[tuple[int, int], torch.Tensor]:
    """Return (document number, index of a token in it) -> the values of this token; `value` has the row's tokens in dim 0."""
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


def evaluated(graph: ModelGraph, node: fx.Node, inputs: Mapping[str, Any], known: dict[fx.Node, Any]) -> Any:
    """Return a node's value computed from integer inputs and the model's constants; None if it depends on other values.

    A constant without values (of a meta model) gets arbitrary ones: only equality of a document's values in different
    rows is checked, and not the values.
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
        return (
            torch.linspace(0.1, 1.0, value.numel()).reshape(size).to(value.dtype) if value.is_floating_point() else None
        )
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if random or is_mutating_op(node.target):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
