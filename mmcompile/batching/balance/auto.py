"""`auto`: try several balancers, judge each step by its time, keep arrival order unless another is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain, SortedRoundRobin
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer, of_slowest_stages
from mmcompile.batching.balance.bucket_bounds import imbalance, pipelined
from mmcompile.batching.balance.buckets import Joint
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical
from mmcompile.batching.balance.post_balance import PostBalance

StepTime = Callable[[Assignment, SampleCosts], float]
"""Function that returns the time of a step in the unit of the costs: `pipelined`, `bottleneck`, or a simulator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Name of a balancer that `auto` tried, and the time of its step."""

    name: str
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Assignment chosen by `auto`, with its step time, the reason and all trials."""

    name: str
    assignment: Assignment
    step_s: float
    reason: str
    trials: tuple[Trial, ...]
    """Trials in the order tried; arrival order is the first."""

    @property
    def arrival_s(self) -> float:
        """Predicted seconds of the step if its samples are assigned in the order in which they arrived."""
        return self.trials[0].step_s


def _default_candidates() -> tuple[Balancer, ...]:
    """Return the balancers that `auto` tries, cheapest first: among equally fast steps the first is taken."""
    return (PostBalance(), Joint(), Hierarchical(defer=Defer.ALL), SortedRoundRobin(), DistTrain())


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(Balancer):
    """Balancer that takes the fastest result of several balancers, never slower than arrival order under `step_time`.

    Arrival order is kept if its slowest microbatch and replica are close to the lower bound of every assignment, because moving
    samples costs time too. A step that one sample dominates is kept for the same reason.
    """

    name: ClassVar[str] = "auto"

    candidates: tuple[Balancer, ...] = field(default_factory=_default_candidates)
    step_time: StepTime = pipelined
    keep_below: float = 0.05
    """Imbalance, as a fraction, below which arrival order is kept."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Component -> fraction of its cost that is in its slowest stage; 1 for components not given.

    Balancers see this fraction, because a pipeline is as fast as its slowest stage; `step_time` sees whole costs.
    """

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Return the chosen assignment."""
        return self.choose(costs, grid).assignment

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return the chosen assignment, with the name and reason of the choice."""
        choice = self.choose(costs, grid)
        return choice.assignment, f"{choice.name}: {choice.reason}"

    def choose(self, costs: SampleCosts, grid: Grid) -> Choice:
        """Return the chosen assignment with the reason and all trials.

        Raises:
            ConfigError: `shares` names a component that the costs lack, or a candidate raises it.
        """
        best = Arrival().assign(costs, grid)
        fastest = Trial(name=Arrival.name, step_s=self.step_time(best, costs))
        trials = [fastest]
        seen = of_slowest_stages(costs, self.shares)
        over = imbalance(best, seen)
        if over < self.keep_below:
            reason = f"imbalance {max(over, 0.0):.1%} is below {self.keep_below:.0%}: arrival order is kept"
        else:
            for candidate in self.candidates:
                assignment = candidate.assign(seen, grid)
                trials.append(Trial(name=candidate.title, step_s=self.step_time(assignment, costs)))
                if trials[-1].step_s < fastest.step_s:
                    best, fastest = assignment, trials[-1]
            reason = f"imbalance {over:.1%}; {_compared(fastest, trials)}"
        return Choice(name=fastest.name, assignment=best, step_s=fastest.step_s, reason=reason, trials=tuple(trials))


def _compared(fastest: Trial, trials: list[Trial]) -> str:
    if fastest is trials[0]:
        return f"none of {', '.join(trial.name for trial in trials[1:])} is faster: arrival order is kept"
    return f"{fastest.name} takes {1 - fastest.step_s / trials[0].step_s:.1%} less than arrival order"
