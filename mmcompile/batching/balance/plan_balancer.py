"""`plan_balancer`: a balancer for the steps of a plan."""

from __future__ import annotations

from dataclasses import replace

from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer, BottleneckBalancer
from mmcompile.batching.balance.registry import balancer
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.planner.plan.plan import Plan


def plan_balancer(plan: Plan, name: str) -> Balancer:
    """Return the balancer `name` for the steps of a plan.

    Samples are balanced by their cost in the slowest stage of each component. `auto` times its results by simulating all stages.

    Args:
        name: balancer name in `mmcompile.batching.balance.registry`.

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
