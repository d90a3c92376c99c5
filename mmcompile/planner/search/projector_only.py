"""The same problem with less training: only the projectors."""

from __future__ import annotations

from dataclasses import replace

from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.planner.search.problem import Problem


def trains_more(problem: Problem) -> bool:
    """Return whether more than the projectors is trained; False if there are none, or costs cannot be computed anew."""
    names = _projectors(problem)
    trained = {spec.name for spec in problem.graph.parameters if spec.trainable}
    return bool(names) and not trained <= names and problem.pricing.given_cp == 1


def projector_only(problem: Problem) -> Problem:
    """Return the problem with everything but its projectors frozen; the graph's annotations are restored.

    Args:
        problem: problem that trains more.
    """
    graph = problem.graph
    names = _projectors(problem)
    specs = (replace(spec, trainable=spec.name in names) for spec in graph.parameters)
    frozen = replace(graph, parameters=tuple(specs))
    cost = Cost()
    passes = Pipeline(passes=(GradientFlow(), cost), verify=False)
    try:
        table = passes.run(frozen).of(cost)
    finally:
        passes.run(graph)
    pricing = replace(problem.pricing, table=table)
    return replace(problem, prices=replace(problem.prices, graph=frozen, pricing=pricing))


def _projectors(problem: Problem) -> set[str]:
    """Return the names of the parameters of projectors."""
    named = {
        name
        for component in problem.graph.components
        if component.kind is ComponentKind.PROJECTOR
        for layer in component.layers
        for name in layer.parameters
    }
    return {spec.name for spec in problem.graph.parameters if not named.isdisjoint((spec.name, *spec.aliases))}
