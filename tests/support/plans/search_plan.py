"""`search`: a plan from costs, without links."""

from __future__ import annotations

from typing import Any

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ModelGraph
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.search.infeasible import explain
from mmcompile.planner.search.outcome import plan_of
from mmcompile.planner.strategies.search import AUTO, searched
from support.plans.problem import Costs, problem_of


def search(
    graph: ModelGraph,
    costs: Costs,
    cluster: Cluster,
    *,
    strategy: str = AUTO,
    **asked: Any,
) -> Plan:
    """Find the fastest plan, as `mmcompile.planning.make_plan` does. Raises PlanError and ConfigError as it does.

    Args:
        asked: keywords of `problem_of`.
    """
    problem = problem_of(graph, costs, cluster, **asked)
    engine, best = searched(problem, strategy)
    if best is None:
        raise PlanError(explain(problem, budget_s=0))
    return plan_of(engine, best, strategy=strategy)
