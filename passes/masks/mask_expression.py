"""Expressions for one element of a mask as a function of its batch row b, head h, query q and key k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

Axis = Literal["b", "h", "q", "k", "t"]
"""Axis of a mask: batch row, head, query, key; t stands for a token as either query or key."""


@dataclass(frozen=True, slots=True)
class AxisIndex:
    """The index along one axis, as a value in an expression."""

    axis: Axis


@dataclass(frozen=True, slots=True)
class Number:
    """A constant in an expression."""

    value: int | float | bool


@dataclass(frozen=True, slots=True)
class NodeElement:
    """One element of a graph node that is not analysed further, by its indices."""

    node: fx.Node
    index: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An elementwise operation on expressions.

    One of `add sub mul floor_divide remainder neg eq ne lt le gt ge and or not xor where to`.
    """

    op: str
    args: tuple[Expression, ...]
    dtype: torch.dtype
    """Dtype of the operation's result."""
    node: fx.Node = field(compare=False)
    """Graph node of the operation; ignored when expressions are compared."""
    axes: frozenset[Axis] = field(compare=False)
    size: int = field(compare=False)


Expression = AxisIndex | Number | NodeElement | Elementwise
Places = tuple[Expression, ...]


def axes_of(expression: Expression) -> frozenset[Axis]:
    """Return the axes that an expression depends on."""
    match expression:
        case AxisIndex(axis):
            return frozenset((axis,))
        case NodeElement(_, index):
            return frozenset().union(*map(axes_of, index))
        case Elementwise():
            return expression.axes
        case _:
            return frozenset()


def dtype_of(expression: Expression) -> torch.dtype:
    """Return the dtype of an expression's value: bool, an integer type or a float type."""
    match expression:
        case NodeElement(node, _):
            value = node.meta["val"]
            return value.dtype if isinstance(value, torch.Tensor) else torch.int64
        case Elementwise():
            return expression.dtype
        case Number(value):
            return number_dtype(value)
        case _:
            return torch.int64


def number_dtype(value: int | float | bool) -> torch.dtype:
    """Return the dtype that torch gives a tensor made from a Python number."""
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64


def applied(op: str, args: tuple[Expression, ...], node: fx.Node, dtype: torch.dtype | None = None) -> Elementwise:
    """Return the expression of operation `op` on the expressions `args`, as graph node `node` computes it."""
    return Elementwise(
        op,
        args,
        node.meta["val"].dtype if dtype is None else dtype,
        node,
        frozenset().union(*map(axes_of, args)),
        1 + sum(arg.size if isinstance(arg, Elementwise) else 1 for arg in args),
    )


def per_token(expression: Expression) -> Expression:
    """Return the expression with the query or key axis replaced by the token axis t."""
    match expression:
        case AxisIndex("q" | "k"):
            return AxisIndex("t")
        case NodeElement(node, index):
            return NodeElement(node, tuple(map(per_token, index)))
        case Elementwise():
            return applied(expression.op, tuple(map(per_token, expression.args)), expression.node, expression.dtype)
        case _:
            return expression


Form = tuple[Mapping[Axis, int], int]
"""An affine function of axis indices: (axis -> coefficient, constant). For example ({"q": 1, "k": -1}, 2) is q - k + 2."""


def linear(expression: Expression) -> Form | None:
    """Return an expression as an affine function of axis indices (`Form`); None if it is not one."""
    match expression:
        case AxisIndex(axis):
            return {axis: 1}, 0
        case Number(value) if isinstance(value, int) and not isinstance(value, bool):
            return {}, value
        case Elementwise("to", (source,)) if not expression.dtype.is_floating_point and expression.dtype != torch.bool:
            return linear(source)
        case Elementwise("add" | "sub" as op, (left, right)):
            return _sum(linear(left), linear(right), 1 if op == "add" else -1)
        case Elementwise("neg", (source,)):
            return _sum(({}, 0), linear(source), -1)
        case Elementwise("mul", (left, right)):
            for factor, other in ((left, right), (right, left)):
                if isinstance(factor, Number) and isinstance(factor.value, int):
                    return _sum(({}, 0), linear(other), factor.value)
    return None


def _sum(left: Form | None, right: Form | None, factor: int) -> Form | None:
    if left is None or right is None:
        return None
    found: dict[Axis, int] = {
        axis: left[0].get(axis, 0) + factor * right[0].get(axis, 0) for axis in dict.fromkeys((*left[0], *right[0]))
    }
    return {axis: count for axis, count in found.items() if count}, left[1] + factor * right[1]
