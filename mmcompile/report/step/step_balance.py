"""Balancing of one step: samples drawn from a dataset are assigned to the replicas and microbatches of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Grid, SampleCosts
from mmcompile.batching.balance.auto import Auto, Choice, StepTime, Trial
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.registry import BALANCERS, plan_balancer
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.batching.sample_costs import costs_of_shapes
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.step.balanced_step import BalancedStep, Comparison, TriedBalancer, components_of, straggler_s


def balanced_step(
    plan: Plan,
    stats: DatasetStats,
    *,
    source: str,
    samples: int | None = None,
    seed: int = 0,
    step: int = 0,
    balance: str = Auto.name,
    every: bool = False,
) -> BalancedStep:
    """Draw the samples of a step, balance them, and return the assignment and what it saves. The result is deterministic.

    Args:
        source: file from which the plan was read, for reports.
        samples: number of samples; the plan's by default.
        seed: seed of all steps.
        balance: a name of `BALANCERS`.
        every: also try all other balancers.

    Raises:
        ConfigError: there is no such balancer, it cannot balance this step, or the dataset lacks a modality that the plan has an
            encoder for.
        PlanError: the plan has no costs of samples.
    """
    shapes = drawn(stats, samples or step_samples(plan), seed=seed, step=step)
    costs, grid = costs_of_shapes(plan, shapes), step_grid(plan)
    _check_modalities(plan, stats, costs)
    clock = step_time(StepShape.of(plan))
    choice = balanced(costs, grid, plan_balancer(plan, balance), clock)
    return BalancedStep(
        plan=source,
        data=stats.name,
        seed=seed,
        step=step,
        num_microbatches=grid.num_microbatches,
        asked=balance,
        balancer=choice.name,
        reason=choice.reason,
        components=components_of(plan, costs, choice.assignment),
        simulated_s=Comparison(before=choice.arrival_s, after=choice.step_s),
        assignment=choice.assignment,
        balancers=tuple(tried({name: plan_balancer(plan, name) for name in BALANCERS}, costs, grid, clock))
        if every
        else (),
    )


def drawn(stats: DatasetStats, count: int, *, seed: int, step: int) -> tuple[SampleShape, ...]:
    """Draw the samples of a step, each once before any is drawn twice, deterministically. Raises ConfigError without samples."""
    if not stats.samples:
        raise ConfigError(f"{stats.name} has no samples; give statistics of the data that is trained on")
    generator = np.random.default_rng((seed, step))
    rounds = -(-count // len(stats.samples))
    order = np.concatenate([generator.permutation(len(stats.samples)) for _ in range(rounds)])
    return tuple(stats.samples[index] for index in order[:count])


def step_samples(plan: Plan) -> int:
    """Return the number of samples of a step; without a batch size in the plan, one per microbatch and replica."""
    return plan.global_batch or plan.num_microbatches * plan.chains[-1].dp


def step_grid(plan: Plan) -> Grid:
    """Return replicas and microbatches of a plan's balance groups. Raises PlanError if chains of a group differ in replicas."""
    replicas = tuple(chains[0].dp for chains in towers(plan).values())
    return Grid(num_replicas=replicas, num_microbatches=plan.num_microbatches)


def balanced(costs: SampleCosts, grid: Grid, one: Balancer, step_time: StepTime) -> Choice:
    """Return a balancer's assignment of samples to replicas and microbatches. Raises ConfigError if it cannot balance them."""
    if isinstance(one, Auto):
        return one.choose(costs, grid)
    arrival = Trial(name=Arrival.name, step_s=step_time(Arrival().assign(costs, grid), costs))
    assignment = one.assign(costs, grid)
    step_s = step_time(assignment, costs)
    reason = _compared(step_s, arrival.step_s)
    return Choice(name=one.title, assignment=assignment, step_s=step_s, reason=reason, trials=(arrival,))


def tried(
    balancers: Mapping[str, Balancer], costs: SampleCosts, grid: Grid, step_time: StepTime
) -> Iterator[TriedBalancer]:
    """Yield the result of each balancer on the same step."""
    for name, one in balancers.items():
        try:
            choice = balanced(costs, grid, one, step_time)
            rows = range(len(choice.assignment.components))
            late = np.any([choice.assignment.deferred(row) for row in rows], axis=0)
            yield TriedBalancer(
                name=name,
                simulated_s=choice.step_s,
                straggler_s=sum(map(straggler_s, choice.assignment.loads(costs).values())),
                deferred=int(late.sum()),
                reason=choice.reason if isinstance(one, Auto) else "",
            )
        except ConfigError as error:
            yield TriedBalancer(name=name, simulated_s=None, straggler_s=None, deferred=0, reason=str(error))


def _check_modalities(plan: Plan, stats: DatasetStats, costs: SampleCosts) -> None:
    """Raise ConfigError if no sample of the whole dataset has work for a component; `costs` are those of the step's samples."""
    if costs.takes_part.any(axis=1).all():
        return
    whole = costs_of_shapes(plan, stats.samples)
    empty = [name for name, row in zip(costs.components, whole.takes_part, strict=True) if not row.any()]
    if empty:
        raise ConfigError(
            f"no sample of {stats.name} has anything for {', '.join(empty)}, which the plan has devices for; give statistics of "
            "the data that the plan is for"
        )


def _compared(step_s: float, arrival_s: float) -> str:
    change = step_s / arrival_s - 1 if arrival_s else 0.0
    if abs(change) < 5e-4:
        return "takes as long as arrival order"
    return f"takes {abs(change):.1%} {'less' if change < 0 else 'more'} than arrival order"
