"""`rank_parts`: share of one tensor-parallel rank in each layer's cost.

The share is measured on the sharded graph, which the ranks run.

Values outside sharded regions (residuals, norms) stay whole on every rank, regions are divided, and exchanges add
copies. The cost pass counts all of this; no share is assumed.
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
"""Pairs (field of `LayerCost`, one rank's fraction of it); a field that is not listed is the whole divided by the degree."""
_MEASURED = tuple(name for name in SIZED if name not in PERMANENT)
_GIVEN = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)


def rank_parts(
    graph: ModelGraph, whole: CostTable, components: Iterable[str], degree: int
) -> Mapping[str, tuple[Parts, ...]]:
    """Return component -> one rank's shares in the cost of each of its layers, for the captured batch.

    Args:
        graph: annotated by gradient-flow; it is not changed.
        whole: costs of `graph`.
        components: components in which some tensor can be sharded over `degree` ranks.
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
