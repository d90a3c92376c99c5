"""`DeferredWeights`: products whose weight gradient may be computed after the backward, as W of schedule zb-h1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mmcompile.ir.graph import ModelGraph, info
from mmcompile.passes.base import Analysis, Fact
from mmcompile.passes.gradient_flow import trainable_names
from mmcompile.passes.values import argument, op_name


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredWeight:
    """A product y = x w^T + b whose weight w is a trainable parameter."""

    x: fx.Node = field(repr=False)
    weight: fx.Node = field(repr=False)
    """The `get_attr` node of the weight w."""
    bias: fx.Node | None = field(repr=False)
    """The `get_attr` node of the bias b, if it trains; else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeferredWeights(Analysis[Mapping[fx.Node, DeferredWeight]]):
    """Pass that finds `linear` nodes whose weight is a trainable parameter.

    The gradients of all other trainable parameters (norms, embeddings, convolutions, weights that are computed from
    others) stay in the first part of the backward: they are small, or deferring them saves no time. A frozen weight has
    no gradient to defer.
    """

    name: ClassVar[str] = "deferred-weights"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)

    def run(self, graph: ModelGraph) -> Mapping[fx.Node, DeferredWeight]:
        """Return the products whose weight gradient can be deferred."""
        trainable = trainable_names(graph)

        def trains(node: fx.Node | None) -> bool:
            return node is not None and node.op == "get_attr" and str(node.target) in trainable

        found: dict[fx.Node, DeferredWeight] = {}
        for node in graph.calls:
            if op_name(node) == "aten.linear" and info(node).carries_gradient:
                x, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
                if trains(weight) and x.op != "get_attr":
                    found[node] = DeferredWeight(x=x, weight=weight, bias=bias if trains(bias) else None)
        return found
