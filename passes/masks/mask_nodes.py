"""Graph nodes that compute a `MaskFormula`: a node with one int64 word a token, and small nodes [batch, tokens] that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from mmcompile.ir.graph import NodeInfo, describe
from mmcompile.ir.host_shapes import drop_unread
from mmcompile.ir.nodes import attention_words, token_positions
from mmcompile.ir.sizes import SIZE_PREFIX, Shape
from mmcompile.passes.masks.mask_expression import (
    AxisIndex,
    Elementwise,
    Expression,
    NodeElement,
    Number,
    Places,
    number_dtype,
)
from mmcompile.passes.masks.mask_formula import MaskFormula, Test
from mmcompile.passes.masks.mask_reader import MaskReader
from mmcompile.passes.masks.predicates import UnrecognisedMask
from mmcompile.passes.values import on_meta, shape, sizes

aten = torch.ops.aten
_TOKENS = (AxisIndex("b"), AxisIndex("t"))

_WITH_NUMBER: Mapping[str, Any] = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "floor_divide": aten.floor_divide.default,
    "remainder": aten.remainder.Scalar,
    "eq": aten.eq.Scalar,
    "ne": aten.ne.Scalar,
    "lt": aten.lt.Scalar,
    "le": aten.le.Scalar,
    "gt": aten.gt.Scalar,
    "ge": aten.ge.Scalar,
}
_WITH_TENSOR: Mapping[str, Any] = {
    **{name: getattr(aten, name).Tensor for name in _WITH_NUMBER if name != "floor_divide"},
    "floor_divide": aten.floor_divide.default,
    **{name: getattr(aten, f"logical_{name}").default for name in ("and", "or", "xor", "not")},
    "neg": aten.neg.default,
}
_WHERE = {
    (False, False): aten.where.self,
    (True, False): aten.where.ScalarSelf,
    (False, True): aten.where.ScalarOther,
    (True, True): aten.where.Scalar,
}
_MIRRORED = {"add": "add", "mul": "mul", "eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Sizes of an attention call: batch rows, queries and keys, as numbers in the captured batch and as symbols of the graph."""

    sizes: tuple[int, ...]
    symbolic: Shape


def extent_of(query: fx.Node) -> Extent:
    """Return the extent of attention from its queries node [batch, heads, tokens, dim]."""
    return Extent(sizes=shape(query)[:3:2], symbolic=sizes(query)[:3:2])


class NodeMaker:
    """Makes the graph nodes that compute one mask formula's words, in front of a given node of the graph."""

    def __init__(self, before: fx.Node, extent: Extent, reader: MaskReader, module_path: str) -> None:
        self._graph = before.graph
        self._before = before
        self._extent = extent
        self._note = NodeInfo(component=None, layer=0, module_path=module_path)
        self._own: list[fx.Node] = []
        self._made: dict[Expression, fx.Node] = {}
        self._found = {expression: node for expression, node, places in reader.per_token() if places == _TOKENS}

    def words(self, formula: MaskFormula) -> fx.Node:
        """Return the words node of a formula.

        Raises UnrecognisedMask, and leaves the graph unchanged, if no node of shape [B, T] computes one of its expressions.
        """
        try:
            arguments = (
                self._valid(formula.valid),
                None if formula.documents is None else self._tensor(formula.documents),
                self._islands(formula),
                formula.causal,
                formula.window if formula.window_bounds_islands else None,
                *map(self._size, (0, 1)),
            )
        except UnrecognisedMask:
            drop_unread(self._graph, reversed(self._own))
            raise
        value = torch.empty(self._extent.sizes, dtype=torch.int64, device="meta")
        return self._node(attention_words, arguments, value)

    def positions(self, words: fx.Node) -> fx.Node:
        """Return the positions node of the tokens that the words node describes."""
        return self._node(token_positions, (words,), torch.empty(self._extent.sizes, dtype=torch.int32, device="meta"))

    def _valid(self, tests: tuple[Test, ...]) -> fx.Node | None:
        if not tests:
            return None
        (first, positive), *others = tests
        node = self._tensor(first) if positive else self._call(aten.logical_not.default, self._tensor(first))
        for test in others:
            other = self._valid((test,))
            node = self._call(aten.logical_and.default, node, other)
        return node

    def _islands(self, formula: MaskFormula) -> fx.Node | None:
        if formula.islands is None:
            return None
        ids = self._tensor(formula.islands)
        match formula.island_tests:
            case ((Elementwise("ge", (source, Number(0))), True),) if source == formula.islands:
                return ids  # Below 0 is no island, as `attention_words` has it.
        counted = self._call(aten.sub.Tensor, ids, self._call(aten.min.default, ids))
        inside = self._valid(formula.island_tests)
        if inside is None:
            return counted
        if inside.meta["val"].dtype != torch.bool:
            inside = self._call(aten.ne.Scalar, inside, 0)
        return self._call(aten.where.ScalarOther, inside, counted, -1)

    def _size(self, axis: int) -> int | fx.Node:
        symbolic = self._extent.symbolic[axis]
        if isinstance(symbolic, int):
            return symbolic
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        known = [node for node in placeholders if "size" in node.meta]
        for node in known:
            if node.meta["size"] == str(symbolic):
                return node
        number = 1 + max((int(str(node.target).removeprefix(SIZE_PREFIX)) for node in known), default=-1)
        with self._graph.inserting_after(placeholders[-1]):
            node = self._graph.placeholder(f"{SIZE_PREFIX}{number}")
        node.meta = {"val": self._extent.sizes[axis], "size": str(symbolic)}
        return node

    def _tensor(self, expression: Expression) -> fx.Node:
        if expression not in self._made:
            known = self._found.get(expression)
            made = self._compute(expression) if known is None else self._loaded(known, _TOKENS)
            self._made[expression] = made
        return self._made[expression]

    def _compute(self, expression: Expression) -> fx.Node:
        match expression:
            case Number(value):
                return self._call(aten.full.default, [], value, dtype=number_dtype(value))
            case AxisIndex("t"):
                return self._call(aten.arange.default, self._size(1))
            case NodeElement(node, places):
                return self._loaded(node, places)
            case Elementwise("to", (source,)):
                return self._call(aten.to.dtype, self._tensor(source), expression.dtype)
            case Elementwise("where", (condition, yes, no)):
                target = _WHERE[isinstance(yes, Number), isinstance(no, Number)]
                return self._call(target, self._tensor(condition), self._operand(yes), self._operand(no))
            case Elementwise(op, (Number(value), other)) if op in _MIRRORED:
                return self._call(_WITH_NUMBER[_MIRRORED[op]], self._tensor(other), value)
            case Elementwise("sub", (Number(value), other)):
                return self._call(aten.rsub.Scalar, self._tensor(other), value)
            case Elementwise(op, (left, Number(value))) if op in _WITH_NUMBER:
                return self._call(_WITH_NUMBER[op], self._tensor(left), value)
            case Elementwise(op, operands):
                return self._call(_WITH_TENSOR[op], *map(self._tensor, operands))
        raise UnrecognisedMask(f"a value per token depends on {expression}")

    def _operand(self, expression: Expression) -> fx.Node | int | float | bool:
        return expression.value if isinstance(expression, Number) else self._tensor(expression)

    def _loaded(self, node: fx.Node, places: Places) -> fx.Node:
        if not isinstance(node.meta["val"], torch.Tensor):
            return self._call(aten.full.default, [], node, dtype=torch.int64)
        kept = [place for place in places if not isinstance(place, Number)]
        if kept not in ([*_TOKENS], [_TOKENS[0]], [_TOKENS[1]], []):
            raise UnrecognisedMask(f"{node.name} is not read token by token")
        found = node
        for dim in reversed(range(len(places))):
            place = places[dim]
            if isinstance(place, Number):
                found = self._call(aten.select.int, found, dim, place.value)
        for dim, place in enumerate(kept):
            found = self._first(found, dim, _TOKENS.index(place), sizes(node)[places.index(place)])
        return self._call(aten.unsqueeze.default, found, -1) if kept == [_TOKENS[0]] else found

    def _first(self, node: fx.Node, dim: int, axis: int, size: int | sympy.Expr) -> fx.Node:
        # An input may hold more rows or tokens than the mask reads.
        if str(size) == str(self._extent.symbolic[axis]):
            return node
        return self._call(aten.slice.Tensor, node, dim, 0, self._size(axis))

    def _call(self, target: Any, *arguments: Any, **options: Any) -> fx.Node:
        values = fx.map_arg(arguments, lambda node: on_meta(node.meta["val"]))
        devices = {"device": torch.device("meta")} if target in (aten.full.default, aten.arange.default) else {}
        return self._node(target, arguments, target(*values, **options, **devices), options)

    def _node(
        self, target: Any, arguments: tuple[Any, ...], value: torch.Tensor, options: Mapping[str, Any] | None = None
    ) -> fx.Node:
        with self._graph.inserting_before(self._before):
            # Not by its function's name, which is that of the input it becomes when a host computes it.
            name = "words" if target is attention_words else None
            node = self._graph.create_node("call_function", target, arguments, dict(options or {}), name)
        self._own.append(node)
        if all(isinstance(size, int) for size in self._extent.symbolic):
            return describe(node, self._note, value)
        # [B, T], [B, 1], [T] or [], with size symbols for B and T.
        whole = self._extent.symbolic[2 - value.ndim :]
        symbolic = (1 if size == 1 else symbol for size, symbol in zip(value.shape, whole, strict=True))
        return describe(node, self._note, value, symbolic)
