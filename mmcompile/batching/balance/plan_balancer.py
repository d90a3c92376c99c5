"""`plan_balancer`: a balancer for the steps of a plan."""

from __future__ import annotations

from dataclasses import replace

from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer, BottleneckBalancer
from mmcompile.batching.balance.registry import balancer
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.planner.plan.plan import Plan


def plan_balancer(plan: Plan, name: str) -> Balancer:
    """The balancer of a name, for steps that run through the stages of a plan: `auto` simulates them, all mind the slowest.

    Args:
        name: of `mmcompile.batching.balance.registry`.

    Raises:
        ConfigError: no such balancer.
        PlanError: the plan has a tower that is predicted to take no time.
    """
    chosen, shape = balancer(name), StepShape.of(plan)
    if isinstance(chosen, Auto):
        return replace(chosen, step_time=step_time(shape), shares=shape.slowest)
    return BottleneckBalancer(inner=chosen, shares=shape.slowest)


def balancer_of_json(plan: str, name: str) -> Balancer:
    """`plan_balancer` of a plan as JSON, for other processes."""
    return plan_balancer(Plan.from_json(plan), name)
