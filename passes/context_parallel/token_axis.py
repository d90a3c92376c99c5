"""`TokenAxis`: the dim of a value that runs over tokens, and `TokenFlow`, which follows it from op to op.

A graph that is to run on a part of the tokens may only hold ops that treat every token alike. `TokenFlow` holds for
every value whether it is *spread* (each rank holds its own tokens) or *whole* (each rank holds the same full value),
asks `mmcompile.passes.context_parallel.token_rules` what an op does to the token dim, and refuses ops that mix tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NoReturn

import sympy
import torch
from torch import fx

from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph, component_of, info
from mmcompile.passes.text import origin
from mmcompile.passes.values import has_tag, op_name, shape, sizes, tensors

Size = int | sympy.Expr

LOCAL_TOKENS = sympy.Symbol("local_tokens", integer=True, positive=True)
"""Symbol for the number of token rows on a rank, free rows (without a token) included; it replaces the size of all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAxis:
    """A dim that runs over tokens, of size outer * tokens * inner.

    `outer` > 1: batch and tokens are merged, as in [B * T, hidden]. `inner` > 1: each token is repeated, once per expert.
    If the model leaves out tokens at the ends of a row (logits without the last), ranks compute rows of these tokens as well.
    Results are the same: no sharded op reads another token, and the loss gets an ignored label for left-out ones.
    """

    dim: int
    outer: Size = 1
    inner: int = 1
    front: int = 0
    """Number of tokens that the model left out at the front of a row."""
    back: int = 0
    """Number of tokens that the model left out at the back of a row."""

    def at(self, dim: int) -> TokenAxis:
        """Return this token axis at dim `dim` of another value."""
        return replace(self, dim=dim)

    @property
    def plain(self) -> bool:
        """True if the dim consists of all tokens of a row, as in [batch, tokens, hidden]."""
        return self.outer == 1 and self.inner == 1 and not self.front and not self.back

    def local_size(self) -> Size:
        """Return the size of the dim on one rank, as an expression of `LOCAL_TOKENS`: outer * local tokens * inner."""
        return self.outer * LOCAL_TOKENS * self.inner


@dataclass(kw_only=True, slots=True)
class TokenFlow:
    """Follows the token dim through a graph that is rewritten, and keeps which values are sharded, and along which dim.

    Recorded values (`node.meta["val"]`) keep full shapes until `localize`.
    """

    graph: ModelGraph
    tokens: int
    """Number of tokens in a row of the captured batch."""
    spread: Callable[[fx.Node, TokenAxis, float], fx.Node]
    """Function that shards a whole value: (value, its token dim, filler for rows without a token) -> node of a rank's rows."""
    axes: dict[fx.Node, TokenAxis] = field(default_factory=dict)
    """Sharded value -> its token dim; for a tuple, the token dim of its items."""
    task: str = "context parallelism cannot spread the tokens of"
    """Beginning of error messages: the task that is refused when tokens cannot be followed."""
    consequence: str = "plan this model without context parallelism"

    def number(self, size: Size) -> int:
        """Return a size as a number, at the captured batch."""
        return number(size, self.graph.hints)

    def rows(self, axis: TokenAxis) -> int:
        """Return the whole size of a token dim in the captured batch, before tokens are sharded."""
        return self.number(axis.outer) * self.kept(axis) * axis.inner

    def kept(self, axis: TokenAxis) -> int:
        """Return how many tokens of a row of the captured batch the dim `axis` covers: all but those left out at its ends."""
        return self.tokens - axis.front - axis.back

    def spread_inputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the inputs of `node` that are sharded."""
        return tuple(source for source in node.all_input_nodes if source in self.axes)

    def to_spread(self, node: fx.Node, value: fx.Node, axis: TokenAxis, filler: float = 0) -> fx.Node:
        """Return `value` sharded along `axis`, for `node` to read. A whole value is sharded, with `filler` where no token is."""
        found = self.axes.get(value)
        if found is None:
            if shape(value)[axis.dim] != self.rows(axis):
                self.refuse(node, f"{value.name} has {shape(value)[axis.dim]} rows, its tokens {self.rows(axis)}")
            spread = self.spread(value, axis, filler)
            self.axes[spread] = axis
            return spread
        if not self.same(found, axis):
            self.refuse(node, f"its inputs do not hold the same tokens in the same dim (see {value.name})")
        return value

    def same(self, one: TokenAxis, other: TokenAxis) -> bool:
        """Return whether two token axes are equal, their batch sizes compared as numbers: two symbols may have one value."""
        return replace(one, outer=self.number(one.outer)) == replace(other, outer=self.number(other.outer))

    def size_argument(self, size: Size) -> int | fx.Node | None:
        """Return a size as an op takes it: a number, or the graph input that holds this size; None if there is none."""
        if isinstance(size, int):
            return size
        placeholders = (node for node in self.graph.module.graph.nodes if node.op == "placeholder")
        return next((node for node in placeholders if node.meta.get("size") == str(size)), None)

    def refuse(self, node: fx.Node, reason: str) -> NoReturn:
        """Raise PlanError naming the node's layer, module and op, with the reason."""
        component = component_of(node)
        layer = self.graph.component(component).layers[info(node).layer]
        raise PlanError(
            f"{self.task} layer {layer.index} of {component} ({layer.name}): "
            f"{node.name} = {op_name(node)} in {origin(node)} is not token-wise: {reason}; {self.consequence}"
        )


Rule = Callable[[TokenFlow, fx.Node], TokenAxis | None]
"""Function (flow, node) -> token dim of the op's result; None if no token dim is left. It may rewrite the op's arguments."""


def follow(flow: TokenFlow, nodes: Iterable[fx.Node], rule_of: Callable[[fx.Node], Rule | None]) -> None:
    """Find the token dim of every node, in graph order.

    Raises:
        PlanError: an op mixes tokens, or has no rule.
    """
    for node in nodes:
        if not flow.spread_inputs(node):
            continue
        rule = rule_of(node)
        if rule is None:
            flow.refuse(node, "no rule says what it does to tokens")
        _refuse_token_counts(flow, node)
        axis = rule(flow, node)
        if axis is not None:
            flow.axes[node] = axis


def number(size: Size, hints: Mapping[str, int]) -> int:
    """Return a size as a number, given the value of each size symbol."""
    return (
        size
        if isinstance(size, int)
        else int(size.subs([(symbol, hints[str(symbol)]) for symbol in size.free_symbols]))
    )


def reshaped(flow: TokenFlow, node: fx.Node, value: fx.Node) -> TokenAxis:
    """Return the token dim of `node`, a view of the elements of `value` in the same order.

    Token t of outer index o and inner index i stands at row (o * tokens + t) * inner + i of the token dim. Let n be the outer
    size times the sizes of the dims before this dim. The token dim of the result is the first dim at which the product of all
    sizes up to it exceeds n.
    """
    axis, old, new = flow.axes[value], shape(value), shape(node)
    if prod(old) != prod(new):
        flow.refuse(node, f"it makes {list(new)} of {list(old)}")
    before = prod(old[: axis.dim]) * flow.number(axis.outer)
    dim, left = 0, 1
    while left * new[dim] <= before:
        left *= new[dim]
        dim += 1
    outer, rest = divmod(before, left)
    inner, uneven = divmod(new[dim], outer * flow.kept(axis))
    if rest or uneven:
        flow.refuse(node, f"it splits {list(old)} into {list(new)} across tokens")
    symbolic: sympy.Expr = sympy.Mul(axis.outer, *sizes(value)[: axis.dim]) / sympy.Mul(*sizes(node)[:dim])
    return replace(axis, dim=dim, outer=outer if symbolic.is_number else symbolic, inner=inner)


def spread_size(flow: TokenFlow, node: fx.Node, wanted: list[Any], axis: TokenAxis) -> list[Any]:
    """Return `wanted`, a view's sizes, with -1 at the token dim; a -1 at another dim becomes that dim's size."""
    found = list(wanted)
    for dim, size in enumerate(wanted):
        if isinstance(size, int) and size == -1 and dim != axis.dim:
            found[dim] = flow.size_argument(sizes(node)[dim])
            if found[dim] is None:
                flow.refuse(node, f"it needs {sizes(node)[dim]}, the size of dim {dim}, which is no input of the graph")
    found[axis.dim] = -1
    return found


def localize(flow: TokenFlow, local_tokens: int) -> None:
    """Record the shapes that sharded values have on one rank after `follow`, with `local_tokens` rows for `LOCAL_TOKENS`."""
    for node, axis in flow.axes.items():
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            node.meta["val"] = tuple(_local(item, axis, flow, local_tokens) for item in tensors(node))
            continue
        full = list(sizes(node))
        full[axis.dim] = axis.local_size()
        node.meta["val"] = _local(value, axis, flow, local_tokens)
        node.meta["symbolic_shape"] = tuple(full)


def _local(value: torch.Tensor, axis: TokenAxis, flow: TokenFlow, local_tokens: int) -> torch.Tensor:
    local = [int(size) for size in value.shape]
    local[axis.dim] = flow.number(axis.outer) * local_tokens * axis.inner
    return torch.empty(local, dtype=value.dtype, device="meta")


def _refuse_token_counts(flow: TokenFlow, node: fx.Node) -> None:
    """Raise PlanError for a pointwise op that computes with the number of tokens: on a rank this number would differ."""
    scalars: Mapping[str, Any] = {**dict(enumerate(node.args)), **node.kwargs}  # type: ignore[dict-item]
    for value in scalars.values():
        counts_tokens = isinstance(value, fx.Node) and "size" in value.meta and value.meta["val"] == flow.tokens
        if counts_tokens and has_tag(node, torch.Tag.pointwise):
            flow.refuse(node, "it computes with the number of tokens")
