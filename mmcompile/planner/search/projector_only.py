"""The same problem with less to train: only the projectors."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from mmcompile.costmodel.compute import layer_times
from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.planner.pricing.chains import ChainLayer, ChainSet
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.search.problem import Problem

_ValueT = TypeVar("_ValueT", Problem, Pricing)


def trains_more(problem: Problem) -> bool:
    """Whether there are projectors, and more than them is trained; False where costs cannot be made anew."""
    names = _projectors(problem)
    trained = {spec.name for spec in problem.graph.parameters if spec.trainable}
    return bool(names) and not trained <= names and problem.pricing.given_cp == 1


def projector_only(problem: Problem) -> Problem:
    """The problem with everything but its projectors frozen; their graph is annotated for it, and then again as it was.

    Args:
        problem: that trains more.
    """
    graph = problem.graph
    names = _projectors(problem)
    specs = (replace(spec, trainable=spec.name in names) for spec in graph.parameters)
    frozen = replace(graph, parameters=tuple(specs))
    try:
        GradientFlow().run(frozen)
        table = Cost().run(frozen)
    finally:
        GradientFlow().run(graph)
        Cost().run(graph)
    pricing = fresh(problem.pricing, table=table)
    sets = tuple(_priced_anew(chains, pricing) for chains in problem.sets)
    return fresh(problem, graph=frozen, pricing=pricing, sets=sets)


def fresh(value: _ValueT, **changes: Any) -> _ValueT:
    """A dataclass with some fields changed and nothing remembered of what it computed: private fields start anew."""
    kept = {field.name: getattr(value, field.name) for field in fields(value) if not field.name.startswith("_")}
    return type(value)(**{**kept, **changes})


def _projectors(problem: Problem) -> set[str]:
    """Names of the parameters of projectors."""
    named = {
        name
        for component in problem.graph.components
        if component.kind is ComponentKind.PROJECTOR
        for layer in component.layers
        for name in layer.parameters
    }
    return {spec.name for spec in problem.graph.parameters if not named.isdisjoint((spec.name, *spec.aliases))}


def _priced_anew(chains: ChainSet, pricing: Pricing) -> ChainSet:
    def priced(layer: ChainLayer) -> ChainLayer:
        cost = pricing.table[layer.component][layer.index]
        return replace(layer, cost=cost, times=layer_times(cost, pricing.cluster.device, pricing.dtype))

    specs = (replace(chain, layers=tuple(map(priced, chain.layers))) for chain in chains.chains)
    return replace(chains, chains=tuple(specs))
