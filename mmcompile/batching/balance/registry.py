"""Balancers by name, with default options or for the steps of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain, SortedRoundRobin
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer, BottleneckBalancer
from mmcompile.batching.balance.buckets import Joint
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical
from mmcompile.batching.balance.node_local import NodeLocal
from mmcompile.batching.balance.post_balance import Algorithm, PostBalance
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.plan import Plan

_ALL: tuple[Balancer, ...] = (
    Arrival(),
    SortedRoundRobin(),
    DistTrain(),
    Joint(),
    Hierarchical(),
    Hierarchical(defer=Defer.ALL),
    PostBalance(),
    *(PostBalance(algorithms=(algorithm,)) for algorithm in Algorithm if algorithm is not Algorithm.SECONDS),
    NodeLocal(),
    Auto(),
)
BALANCERS: Mapping[str, Balancer] = {one.title: one for one in _ALL}
"""Balancer name -> balancer with default options."""


def balancer(name: str) -> Balancer:
    """Return the balancer `name` with default options. Raises ConfigError with the known names."""
    if name not in BALANCERS:
        raise ConfigError(f"no balancer {name!r}; there are {', '.join(BALANCERS)}")
    return BALANCERS[name]


def plan_balancer(plan: Plan, name: str) -> Balancer:
    """Return the balancer `name` for the steps of a plan.

    Samples are balanced by their cost in the slowest stage of each component. `auto` times its results by simulating all stages.

    Args:
        name: balancer name in `BALANCERS`.

    Raises:
        ConfigError: no such balancer.
        PlanError: the plan predicts 0 s for a balance group.
    """
    chosen, shape = balancer(name), StepShape.of(plan)
    if isinstance(chosen, Auto):
        return replace(chosen, step_time=step_time(shape), shares=shape.slowest)
    return BottleneckBalancer(inner=chosen, shares=shape.slowest)


def balancer_of_json(plan: str, name: str) -> Balancer:
    """Return `plan_balancer` of a plan given as JSON text, for use in other processes."""
    return plan_balancer(Plan.from_json(plan), name)
