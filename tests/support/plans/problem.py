"""`problem_of`: a planning problem from costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mmcompile.config import ProjectorPlacement
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.ir.graph import ModelGraph
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.plan_record import Fingerprint
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.pricing.workload import Workload
from mmcompile.planner.search.build_problem import with_chains
from mmcompile.planner.search.problem import ChainPrices, Problem
from mmcompile.planner.search.settings import SearchSpace

Costs = CostTable | Mapping[str, tuple[LayerCost, ...]]


def problem_of(
    graph: ModelGraph,
    costs: Costs,
    cluster: Cluster,
    *,
    dtype: str,
    fingerprint: Fingerprint,
    num_microbatches: int | None = None,
    space: SearchSpace | None = None,
    projector: ProjectorPlacement | None = None,
    shards: int = 1,
    stages: Mapping[str, int] | None = None,
    replicas: Mapping[str, int] | None = None,
    tensor_parallel: Mapping[str, int] | None = None,
    tensor_degrees: Mapping[str, tuple[int, ...]] | None = None,
    fsdp: Collection[str] = (),
    entries: Mapping[tuple[str, str], int] | None = None,
    global_batch: int | None = None,
    workload: Workload | None = None,
    kinds: Mapping[str, tuple[str, ...]] | None = None,
    calibration: Calibration | None = None,
) -> Problem:
    """The problem with its chains, the fields of `Pricing` and `Problem` by keywords; `costs` of one load hold for every load."""
    space = space or SearchSpace()
    pricing = Pricing(
        table=costs if isinstance(costs, CostTable) else CostTable(layers=costs),
        cluster=cluster,
        dtype=dtype,
        merging=frozenset(consumer for _, consumer, _ in graph.edges),
        token_sharing=frozenset((graph.loss_component,)),
        kinds=kinds or {},
        calibration=calibration,
        given_cp=shards,
        tensor_degrees=tensor_degrees or {},
    )
    problem = Problem(
        prices=ChainPrices(graph=graph, pricing=pricing, workload=workload),
        fingerprint=fingerprint,
        space=space if num_microbatches is None else replace(space, microbatches=(num_microbatches,)),
        global_batch=global_batch,
        stages=stages or {},
        replicas=replicas or {},
        tensor_parallel=tensor_parallel or {},
        fsdp=fsdp,
        entries=entries or {},
    )
    return with_chains(problem, projector)
