"""Growth of a node's work with the load of its component, and the load of a component in the capture.

The load is the number of rows (tokens) that a component processes, and the sum of its squared sequence lengths. A capture shows
one load. For others, a node's work is fixed, or grows with the rows, or with the pairs of rows that attend to each other. Size
symbols in the graph show which; without symbols, the node's op, operands and shapes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from math import prod

import networkx as nx
import sympy
from torch import fx

from mmcompile.costmodel.load import Load
from mmcompile.ir.graph import Component, ComponentKind, ModelGraph, info
from mmcompile.ir.sizes import Shape
from mmcompile.passes.cost.op_flops import PRODUCTS, attention_lengths, op_flops
from mmcompile.passes.cost.op_memory import is_view
from mmcompile.passes.values import aten_ops, concrete_shape, op_name, shape, tensors

# The last dim of their result is a width of the model, whatever its size.
_WIDE = aten_ops("linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding layer_norm")
# Their result has the rows of what they join.
_JOINS = aten_ops("cat stack")


class Growth(IntEnum):
    """Quantity that an amount is proportional to: a component's tokens, their squares (pairs of tokens), or neither (fixed)."""

    FIXED = 0
    TOKENS = 1
    SQUARES = 2


Lengths = tuple[int, ...]
"""Lengths of the sequences whose tokens attend to each other within a component: images, audio clips, samples."""


def load_of(lengths: Lengths) -> Load:
    """Return the load of sequences: the sum of their lengths, and the sum of the squared lengths."""
    return Load(tokens=float(sum(lengths)), squares=float(_pairs(lengths)))


def captured_sequences(graph: ModelGraph, components: Mapping[str, list[fx.Node]]) -> dict[str, Lengths]:
    """Return the lengths of the sequences of every component in the captured batch.

    They are read from the self-attention with the most pairs (so an encoder with windowed and full attention
    has images, not windows). A component without attention, such as a projector, has the sequences of its producer;
    without a producer, those of its output [sequences, rows, features].

    Args:
        graph: the captured graph.
        components: name -> its `call_function` nodes, those made of parameters alone left out.
    """
    found: dict[str, Lengths] = {}
    producers = {consumer: producer for producer, consumer, _ in reversed(graph.edges)}
    position = {component.name: index for index, component in enumerate(graph.components)}
    for generation in nx.topological_generations(graph.dag()):
        for name in sorted(generation, key=position.__getitem__):
            component = graph.component(name)
            seen = components[name] if component.kind != ComponentKind.PROJECTOR else ()
            own = max(filter(None, map(_self_lengths, seen)), key=_pairs, default=None)
            found[name] = own or found.get(producers.get(name, "")) or _handed_on(graph, component, components[name])
    return found


def _pairs(lengths: Lengths) -> int:
    return sum(length * length for length in lengths)


def _self_lengths(node: fx.Node) -> Lengths | None:
    lengths = attention_lengths(node)
    if lengths is not None:
        queries, keys = lengths
        return queries if queries == keys else None
    if op_name(node) in ("aten.softmax", "aten._softmax"):
        scores = shape(node)
        if len(scores) >= 3 and scores[-1] == scores[-2]:
            return (scores[-1],) * (scores[0] if len(scores) > 3 else 1)
    return None


def _handed_on(graph: ModelGraph, component: Component, nodes: list[fx.Node]) -> Lengths:
    """Return the sequence lengths of a component without attention, from its first output: shape [3, 49, 64] -> (49, 49, 49)."""
    names = [tensor for producer, _, made in graph.edges if producer == component.name for tensor in made]
    flowing = [node for node in nodes if node.name in names] or [node for node in nodes if "val" in node.meta]
    shapes = [own for node in flowing for own in map(concrete_shape, tensors(node)[:1]) if len(own) > 1]
    return (shapes[0][-2],) * prod(shapes[0][:-2]) if shapes else (1,)


class Growths:
    """Finds how sizes and work of a component's nodes grow: not at all, with tokens, or with squared sequence lengths.

    Args:
        lengths: lengths of the component's sequences.
        fixed: nodes made of parameters, buffers and constants only.
    """

    def __init__(self, lengths: Lengths, fixed: set[fx.Node]) -> None:
        self._count = len(lengths)
        self._rows = {size for size in (max(lengths), sum(lengths)) if size > 1}
        self._fixed = fixed
        self._known: dict[fx.Node, Growth] = {}

    def size(self, node: fx.Node) -> Growth:
        """Return how the size of a node's tensors grows: not at all, with tokens, or with squared sequence lengths."""
        pending = [node]
        while pending:  # not recursive: graphs are deep
            current = pending[-1]
            asked = current.all_input_nodes if current.op == "call_function" and current not in self._fixed else ()
            unknown = [source for source in asked if source not in self._known]
            if current not in self._known and unknown:
                pending += unknown
                continue
            pending.pop()
            if current not in self._known:
                self._known[current] = self._size(current)
        return self._known[node]

    def work(self, node: fx.Node) -> Growth:
        """Return how a node's FLOPs grow: not at all, with tokens, or with squared sequence lengths."""
        if node in self._fixed:
            return self.size(node)
        lengths = attention_lengths(node)
        if lengths is not None:
            queries, keys = lengths
            return Growth.SQUARES if queries == keys and len(queries) == self._count else Growth.TOKENS
        operands = [operand for operand, _ in op_flops(node).operands]
        if op_name(node) in PRODUCTS and not any(operand in self._fixed for operand in operands):
            return max(Growth.TOKENS, self.size(node), *(self.size(operand) for operand in operands))
        return Growth.TOKENS

    def _size(self, node: fx.Node) -> Growth:
        if node in self._fixed:
            return self._size_of_fixed(node)
        if "symbolic_shape" in node.meta and (symbolic := _by_symbols(node.meta["symbolic_shape"])) is not None:
            return symbolic
        if not self._may_be_pairs(node):
            return Growth.TOKENS
        if node.op != "call_function":  # a mask, or features whose width happens to be their number
            return Growth.TOKENS if any(tensor.is_floating_point() for tensor in tensors(node)) else Growth.SQUARES
        name, inputs = op_name(node), [source for source in node.all_input_nodes if source not in self._fixed]
        if any(self._known.get(source) == Growth.SQUARES for source in inputs):
            return Growth.SQUARES
        if name in PRODUCTS:
            return Growth.SQUARES if len(inputs) > 1 else Growth.TOKENS
        if name in _WIDE or name in _JOINS or any(self._may_be_pairs(source) for source in inputs):
            return Growth.TOKENS
        if is_view(node) and name != "aten.expand":
            return Growth.TOKENS
        # Rows against columns, as masks are made.
        return Growth.SQUARES if info(node).shared or len(inputs) > 1 else Growth.TOKENS

    def _size_of_fixed(self, node: fx.Node) -> Growth:
        """Return how a node made of constants grows: SQUARES if two dims have a sequence's length (a mask), TOKENS if one."""
        if node.op == "get_attr" or not info(node).shared or node.meta.get("val") is None:
            return Growth.FIXED
        if self._may_be_pairs(node):
            return Growth.SQUARES
        has_rows = any(self._rows.intersection(concrete_shape(tensor)) for tensor in tensors(node))
        return Growth.TOKENS if has_rows else Growth.FIXED

    def _may_be_pairs(self, node: fx.Node) -> bool:
        if node.meta.get("val") is None:
            return False
        return any(own.count(rows) >= 2 for own in map(concrete_shape, tensors(node)) for rows in self._rows)


@cache
def _by_symbols(sizes: Shape) -> Growth | None:
    count = sympy.sympify(prod(sizes))
    symbols = sorted(count.free_symbols, key=str)
    if not symbols:
        return None
    # A round size: symbols also stand in quotients (patches in windows of four).
    base = count.subs([(symbol, 2**12) for symbol in symbols])
    doubled = [count.subs([(other, 2 ** (13 if other == symbol else 12)) for other in symbols]) for symbol in symbols]
    ratios = [value / base for value in doubled] if base > 0 else [0]
    return Growth.SQUARES if max(ratios) > 3 else Growth.TOKENS
