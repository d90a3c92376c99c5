"""`rank_parts`: share of one tensor-parallel rank in each layer's cost.

What one of the ranks that share a component's tensors has of each layer's cost, measured on the sharded graph.

Values between products (residuals, norms) stay whole on every rank, products and what is between a pair of them do not,
and exchanges copy: nothing of that is assumed, but counted by the cost pass on the graph that the ranks run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.base import Fact
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import PERMANENT, SIZED, CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel

Parts = tuple[tuple[str, float], ...]
"""(Field of `LayerCost`, what a rank has of it), for fields that are not simply divided."""
_MEASURED = tuple(name for name in SIZED if name not in PERMANENT)
_GIVEN = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)


def rank_parts(
    graph: ModelGraph, whole: CostTable, components: Iterable[str], degree: int
) -> Mapping[str, tuple[Parts, ...]]:
    """Return component -> shares of each of its layers, for the captured batch.

    Args:
        graph: annotated by gradient-flow; not changed.
        whole: its costs.
        components: those of which some tensor can be shared by `degree` ranks.
    """
    degrees = tuple((name, degree) for name in components)
    if not degrees:
        return {}
    cost = Cost()
    table = Pipeline(passes=(TensorParallel(degrees=degrees), GradientFlow(), cost), given=_GIVEN).run(graph).of(cost)
    return {
        name: tuple(_parts(before, after, degree) for before, after in zip(whole[name], table[name], strict=True))
        for name, _ in degrees
    }


def _parts(whole: LayerCost, rank: LayerCost, degree: int) -> Parts:
    amounts = ((name, getattr(rank, name), getattr(whole, name)) for name in _MEASURED)
    return tuple((name, has / all_) for name, has, all_ in amounts if all_ and has * degree != all_)
