"""Masks that compare `position_ids` inside documents, where positions differ by as much as token indices.

transformers finds packed documents by their positions and requires causality by position:

    documents = cumsum(diff(p) != 1)
    mask = (p[k] <= p[q]) & (p[k] > p[q] - window) & (documents[q] == documents[k])

Inside a document p grows by one a token, so p[q] - p[k] = q - k, so a comparison of positions is a comparison of token
indices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mmcompile.passes.masks.mask_expression import (
    AxisIndex,
    Elementwise,
    Expression,
    NodeElement,
    Number,
    applied,
    axes_of,
    linear,
    per_token,
)
from mmcompile.passes.masks.mask_reader import MaskReader
from mmcompile.passes.values import given, op_name, shape

_COMPARISONS = ("lt", "le", "gt", "ge")


def with_places(expression: Expression, reader: MaskReader) -> tuple[Expression, Expression | None]:
    """Return a mask whose comparisons of positions are replaced by comparisons of token indices.

    Returns:
        The mask, and document ids per token: the new mask equals the old one only for pairs of one document. The ids
        are None if the mask is returned unchanged.
    """
    for documents, positions in _documents(expression, reader):
        found = _replaced(expression, positions)
        if found != expression:
            return found, documents
    return expression, None


def _documents(expression: Expression, reader: MaskReader) -> Iterator[tuple[Expression, Expression]]:
    """Yield (document ids, position ids), expressions per token, for each comparison of document ids in `expression`.

    Ids count as document ids if a cumsum computes them that increases wherever position ids do not increase by one.
    """
    match expression:
        case Elementwise("eq", (NodeElement(node, _) as left, NodeElement() as right)) if _sides(left, right):
            positions = _counted(node, reader)
            if positions is not None:
                yield per_token(left), positions
        case Elementwise(_, operands):
            for operand in operands:
                yield from _documents(operand, reader)


def _sides(left: Expression, right: Expression) -> bool:
    return per_token(left) == per_token(right) and axes_of(left) & {"q", "k"} != axes_of(right) & {"q", "k"}


def _counted(node: fx.Node, reader: MaskReader) -> Expression | None:
    # The value that the model puts before token 0 does not matter.
    if _name(node) != "aten.cumsum" or not _last(node):
        return None
    unequal = node.all_input_nodes[0]
    while _name(unequal) in ("aten.to", "aten._to_copy"):
        unequal = unequal.all_input_nodes[0]
    if _name(unequal) != "aten.ne" or given(unequal)["other"] != 1:
        return None
    grown = unequal.all_input_nodes[0]
    if _name(grown) != "aten.diff" or given(grown)["n"] != 1 or not _last(grown) or given(grown)["append"] is not None:
        return None
    source = given(grown)["self"]
    if len(shape(source)) != 2 or shape(source) != shape(node):
        return None
    return reader.at(source, (Number(0) if shape(source)[0] == 1 else AxisIndex("b"), AxisIndex("t")))


def _name(node: fx.Node) -> str:
    return op_name(node) if node.op == "call_function" else ""


def _last(node: fx.Node) -> bool:
    return given(node)["dim"] in (-1, len(shape(node)) - 1)


def _replaced(expression: Expression, positions: Expression) -> Expression:
    """Return `expression` with comparisons of position ids that depend only on q - k made comparisons of indices in the row."""
    if not isinstance(expression, Elementwise):
        return expression
    if expression.op in _COMPARISONS:
        left, right = (_placed(side, positions) for side in expression.args)
        found = linear(applied("sub", (left, right), expression.node, torch.int64))
        if found is not None and found[0] in ({"q": 1, "k": -1}, {"q": -1, "k": 1}):
            return applied(expression.op, (left, right), expression.node, expression.dtype)
    parts = tuple(_replaced(part, positions) for part in expression.args)
    return expression if parts == expression.args else applied(expression.op, parts, expression.node, expression.dtype)


def _placed(expression: Expression, positions: Expression) -> Expression:
    sides = axes_of(expression) & {"q", "k"}
    if len(sides) == 1 and per_token(expression) == positions:
        return AxisIndex(next(iter(sides)))
    if isinstance(expression, Elementwise):
        parts = tuple(_placed(part, positions) for part in expression.args)
        return applied(expression.op, parts, expression.node, expression.dtype)
    return expression
