"""`Study`: a captured model with its costs and a dataset, which `check`, `simulate` and `explain` use beside the plan file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mmcompile import api
from mmcompile.captured_model import text_config
from mmcompile.data.stats import DatasetStats
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.gradient_flow import GradientFlow, GradientReport
from mmcompile.passes.pipeline import analyse
from mmcompile.passes.tensor_parallel.tensor_axes import tensor_axes
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A captured model with its layers' costs, and the rows that samples of a dataset bring to its components (`workload`)."""

    graph: ModelGraph = field(repr=False)
    gradients: GradientReport = field(repr=False)
    table: CostTable = field(repr=False)
    workload: Workload = field(repr=False)
    dtype: str
    """Dtype of most parameters."""
    max_positions: int | None
    """Longest sequence that the text model has positions for; None if its config sets no limit."""

    def pricing(self, plan: Plan) -> Pricing:
        """Return the costs of the model's layers as the ranks of a plan run them."""
        tp = max(chain.tp for chain in plan.chains)
        axes = tensor_axes(self.graph, tp, self.table) if tp > 1 else {}
        return Pricing(
            table=self.table,
            cluster=plan.cluster,
            dtype=self.dtype,
            token_sharing=frozenset((self.graph.loss_component,)),
            tensor_degrees={name: found.degrees for name, found in axes.items()},
            tensor_shares={name: found.layers for name, found in axes.items()},
        )


def study(model: nn.Module, batch: Mapping[str, Any], stats: DatasetStats | None) -> Study:
    """Capture a model and compute its layers' costs, and the rows that samples of a dataset bring to its components.

    Raises:
        BatchError, CaptureError: from the capture.
        PlanError: the dataset is empty.
    """
    graph = api.capture(model, batch)
    table = analyse(Cost(), graph)
    limit = getattr(text_config(model), "max_position_embeddings", None)
    return Study(
        graph=graph,
        gradients=analyse(GradientFlow(), graph),
        table=table,
        workload=Workload.of(graph, table, completed(model, batch), stats),
        dtype=graph.main_dtype,
        max_positions=limit if isinstance(limit, int) and limit > 0 else None,
    )
