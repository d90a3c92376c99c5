"""One step of a plan: seconds of every microbatch of every replica, with samples in arrival order and after balancing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Assignment, SampleCosts, exchanged
from mmcompile.errors import PlanError
from mmcompile.planner.plan.balance_groups import towers
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Stage

Loads = tuple[tuple[float, ...], ...]
"""Seconds of microbatches, [replicas][microbatches]."""
Ranks = tuple[int, ...]
"""First rank of each replica of a stage, in order of replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One number of a step, in arrival order and balanced."""

    before: float
    after: float

    @property
    def saved(self) -> float:
        """Number in arrival order minus the balanced number, in the same unit."""
        return self.before - self.after


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Tokens that an encoder sends to the language model, and the shares that leave a rank and a node."""

    tokens: int
    other_rank: Comparison
    other_node: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentLoads:
    """Samples and seconds of one component's microbatches, in arrival order and balanced."""

    name: str
    replicas: int
    samples: int
    """Number of samples with work for the component."""
    loads_before: Loads
    loads_after: Loads
    deferred: tuple[tuple[int, ...], ...]
    """Number of samples of each microbatch that the language model computes in a later one, [replicas][microbatches]."""
    deferred_s: Loads
    """Seconds, in each balanced microbatch, of the samples counted in `deferred`, [replicas][microbatches]."""
    traffic: Traffic | None
    """Tokens sent to the language model; None for the language model itself."""

    @property
    def slowest_s(self) -> Comparison:
        """Seconds of the slowest microbatch of any replica, in arrival order and balanced."""
        return Comparison(before=_slowest(self.loads_before), after=_slowest(self.loads_after))

    @property
    def imbalance(self) -> Comparison:
        """Seconds of the slowest microbatch divided by the mean of all, in arrival order and balanced; 1 is even."""
        return Comparison(before=_imbalance(self.loads_before), after=_imbalance(self.loads_after))

    @property
    def straggler_s(self) -> Comparison:
        """Sum over microbatches of (slowest replica - mean of all replicas), s, in arrival order and balanced."""
        return Comparison(before=straggler_s(self.loads_before), after=straggler_s(self.loads_after))


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedBalancer:
    """Result of one balancer on a step."""

    name: str
    simulated_s: float | None
    """Simulated seconds of the step; None if the balancer cannot balance it."""
    straggler_s: float | None
    deferred: int
    """Number of samples that the language model computes in a later microbatch than an encoder does."""
    reason: str
    """Reason why the balancer cannot balance the step; for `auto`, its choice; else ""."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedStep:
    """Samples of a step, their assignment, and the seconds that it saves over arrival order."""

    plan: str
    """File from which the plan was read."""
    data: str
    seed: int
    step: int
    num_microbatches: int
    """Number of microbatches of each replica."""
    asked: str
    """Name of the requested balancer."""
    balancer: str
    """Name of the balancer of the assignment; if `auto` was requested, the one it chose."""
    reason: str
    components: tuple[ComponentLoads, ...]
    simulated_s: Comparison
    assignment: Assignment
    balancers: tuple[TriedBalancer, ...] = ()
    """Results of all balancers, if requested."""

    @property
    def straggler_s(self) -> Comparison:
        """Sum over microbatches and components of (slowest replica - mean of replicas), s, in arrival order and balanced."""
        return Comparison(
            before=sum(component.straggler_s.before for component in self.components),
            after=sum(component.straggler_s.after for component in self.components),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON values: times [s], places as in `Assignment.to_json`."""
        found = {
            "plan": self.plan,
            "data": self.data,
            "seed": self.seed,
            "step": self.step,
            "samples": self.assignment.num_samples,
            "num_microbatches": self.num_microbatches,
            "asked": self.asked,
            "balancer": self.balancer,
            "reason": self.reason,
            "components": [_component_json(component) for component in self.components],
            "simulated_s": _change_json(self.simulated_s),
            "straggler_s": _change_json(self.straggler_s),
            "assignment": self.assignment.to_json(),
        }
        return found | ({"balancers": msgspec.to_builtins(self.balancers)} if self.balancers else {})


def components_of(plan: Plan, costs: SampleCosts, choice: Assignment) -> tuple[ComponentLoads, ...]:
    """Return samples, loads and traffic of each component of a step; `choice` is the balanced assignment."""
    grid = choice.grid
    arrival = Arrival().assign(costs, grid)
    before, after = arrival.loads(costs), choice.loads(costs)
    last = len(costs.components) - 1
    found: list[ComponentLoads] = []
    for row, name in enumerate(costs.components):
        late = choice.deferred(row).astype(np.float64)
        found.append(
            ComponentLoads(
                name=name,
                replicas=grid.num_replicas[row],
                samples=int(costs.takes_part[row].sum()),
                loads_before=_rows(before[name]),
                loads_after=_rows(after[name]),
                deferred=tuple(map(tuple, choice.sums(row, late).astype(int).tolist())),
                deferred_s=_rows(choice.sums(row, late * costs.costs[row])),
                traffic=_traffic(plan, costs, row, (arrival, choice)) if row != last else None,
            )
        )
    return tuple(found)


def _traffic(plan: Plan, costs: SampleCosts, row: int, steps: tuple[Assignment, Assignment]) -> Traffic:
    last = len(costs.components) - 1
    tokens = costs.takes_part[row].astype(np.int64) if costs.lengths is None else costs.lengths[row]
    source, target = (np.array(ranks) for ranks in _ends(plan, costs.components[row], costs.components[last]))
    per_node = plan.cluster.devices_per_node
    other_rank = np.not_equal.outer(source, target)
    other_node = np.not_equal.outer(source // per_node, target // per_node)
    before, after = (exchanged(step, row, step, last, tokens) for step in steps)
    return Traffic(
        tokens=int(before.sum()),
        other_rank=Comparison(before=int(before[other_rank].sum()), after=int(after[other_rank].sum())),
        other_node=Comparison(before=int(before[other_node].sum()), after=int(after[other_node].sum())),
    )


def _ends(plan: Plan, encoder: str, language_model: str) -> tuple[Ranks, Ranks]:
    """Return the first rank of every replica, for the stage that sends an encoder's features and the one that receives them."""
    chains = towers(plan)
    sources, targets = (
        {stage.name: chain.dp for chain in chains[name] for stage in chain.stages} for name in (encoder, language_model)
    )
    for link in plan.links:
        if link.source in sources and link.target in targets:
            return (
                _first_ranks(plan.stage(link.source), sources[link.source]),
                _first_ranks(plan.stage(link.target), targets[link.target]),
            )
    raise PlanError(f"the plan has no link from {encoder} to {language_model}; make it anew with `mmcompile plan`")


def _first_ranks(stage: Stage, replicas: int) -> Ranks:
    return stage.ranks[:: len(stage.ranks) // replicas]


def _rows(loads: np.ndarray) -> Loads:
    return tuple(map(tuple, loads.tolist()))


def _slowest(loads: Loads) -> float:
    return max(map(max, loads))


def _imbalance(loads: Loads) -> float:
    mean = float(np.mean(loads))
    return _slowest(loads) / mean if mean else 1.0


def straggler_s(loads: ArrayLike) -> float:
    """Return the sum over microbatches of (slowest replica - mean of replicas), s; `loads` are [replicas, microbatches]."""
    array = np.asarray(loads)
    return float((array.max(axis=0) - array.mean(axis=0)).sum())


def _change_json(change: Comparison) -> dict[str, float]:
    return {"before": change.before, "after": change.after, "saved": change.saved}


def _component_json(component: ComponentLoads) -> dict[str, Any]:
    return msgspec.to_builtins(component) | {
        "slowest_s": _change_json(component.slowest_s),
        "imbalance": {"before": component.imbalance.before, "after": component.imbalance.after},
        "straggler_s": _change_json(component.straggler_s),
    }
