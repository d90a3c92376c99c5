"""How large a batch must be for a model's shares of devices to hold over a dataset."""

from __future__ import annotations

import numpy as np

from mmcompile.costmodel.load import Polynomial
from mmcompile.data.stability import DEFAULT_CAP, Stability, stable_batch
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.pricing.workload import Workload

_FLOPS = ("forward_flops", "input_grad_flops", "weight_grad_flops")


def stable_allocation(
    graph: ModelGraph,
    table: CostTable,
    workload: Workload,
    devices: int,
    *,
    alpha: float = 0.05,
    p_error: float = 0.05,
    cap: int = DEFAULT_CAP,
    seed: int = 0,
) -> Stability:
    """The smallest batch whose random draws all share the devices alike (Entrain, Algorithm 2).

    Work of a sample is the FLOPs of its forward and backward, without padding; a projector's counts with what feeds it.

    Args:
        graph: the captured model.
        table: its costs.
        workload: its dataset.
        devices: of one replica.
        alpha: one minus the confidence.
        p_error: share of batches that may give another allocation.
        cap: largest batch that is tried.
        seed: of the draws.

    Raises:
        PlanError: no dataset.
        ConfigError: fewer devices than components.
    """
    if workload.stats is None:
        raise PlanError("no dataset to draw batches from; give dataset statistics")
    groups: dict[str, np.ndarray] = {}
    owner = _owners(graph)
    for name, (rows, squares) in workload.per_sample().items():
        flops = sum(
            (table.polynomial(name, index, field) for index in range(len(table[name])) for field in _FLOPS),
            Polynomial(),
        )
        work = np.where(rows > 0, flops.fixed, 0.0) + flops.per_token * rows + flops.per_square * squares
        groups[owner[name]] = groups.get(owner[name], np.zeros_like(rows)) + work
    return stable_batch(
        np.stack(list(groups.values()), axis=1),
        tuple(groups),
        devices,
        alpha=alpha,
        p_error=p_error,
        cap=cap,
        seed=seed,
    )


def _owners(graph: ModelGraph) -> dict[str, str]:
    """Component -> itself, or for a projector the component that feeds it."""
    feeds = {consumer: producer for producer, consumer, _ in reversed(graph.edges)}
    owner: dict[str, str] = {}
    for component in graph.components:
        name = component.name
        while graph.component(name).kind == ComponentKind.PROJECTOR and name in feeds:
            name = feeds[name]
        owner[component.name] = name
    return owner
