"""Exact split of chains into stages under a user's demands, with a certificate: by Z3, seeded by the DP, in bounded time.

The DP (`mmcompile.planner.exact.seed`) gives a split and a lower bound at once. Z3 is then asked whether a split exists whose
slowest stage is faster than the best one known, until it proves that none exists (the certificate) or the time is up: then the
answer has the best split, the best bound and the gap between them. What cannot be met is answered with a smallest set of demands
that conflict, in words.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.exact.conflict import Conflict, conflict
from mmcompile.planner.exact.rules import Devices
from mmcompile.planner.exact.seed import narrowed, seed
from mmcompile.planner.exact.solver_model import Model
from mmcompile.planner.exact.split_problem import ExactProblem, Splits, broken, sharing, slowest_ps, stage_times
from mmcompile.planner.search.partition import INFINITE, PER_SECOND
from mmcompile.units import format_seconds

BUDGET_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Result of the exact splitter: the best split found, and a lower bound of every split."""

    splits: Splits
    """One split for each chain."""
    slowest_s: float
    """Seconds of the slowest stage, its sends included."""
    bound_s: float
    """Lower bound in s of the slowest stage, over all splits that meet the demands."""
    proved: bool
    """True if Z3 proved that no split has a faster slowest stage."""
    seconds: float
    """Seconds that the solver took."""

    @property
    def gap(self) -> float:
        """Relative difference between the slowest stage of the split and its lower bound."""
        return self.slowest_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def text(self) -> str:
        """Text on how far the slowest stage is proved to be the fastest possible, with its seconds and the remaining gap."""
        slowest = format_seconds(self.slowest_s)
        if self.proved:
            return (
                f"no split is better: none has a slowest stage under {slowest} (proved by Z3 in {self.seconds:.1f} s)"
            )
        if self.gap == 0:
            return f"no split has a slowest stage under {slowest} (by interval DP; Z3 had no time to confirm it)"
        return (
            f"the slowest stage takes {slowest} and none can be under {format_seconds(self.bound_s)}: "
            f"a gap of {self.gap:.1%} is open after {self.seconds:.1f} s"
        )


def solve(
    problem: ExactProblem, *, budget_s: float = BUDGET_S, start: Splits | None = None, seeded: bool = True
) -> Exact | Conflict:
    """Return the split whose slowest stage is as fast as possible; at that time, each chain's own slowest stage is minimised too.

    Args:
        budget_s: seconds, after which the best split and bound known are returned.
        start: known split to improve, besides that of the DP.
        seeded: False to start Z3 without the DP's split and bound.

    Returns:
        The split with its certificate, or the conflict if no split exists.

    Raises:
        PlanError: the time was up before a split was found or proved impossible.
    """
    began = time.monotonic()
    tight = narrowed(problem)
    if tight is None:
        return conflict(problem, budget_s)
    # The slowest single layer is a lower bound of every split.
    bound_ps = max(int(chain.tables.times.diagonal(1).max()) for chain in tight.chains)
    run = _Minimisation(problem=tight, deadline=time.monotonic() + budget_s, bound_ps=bound_ps)
    if seeded:
        run.best, bound_ps = seed(tight)
        if bound_ps == INFINITE:
            return conflict(problem, budget_s)
        run.bound_ps = max(run.bound_ps, bound_ps)
    if start is not None and not broken(problem, start) and slowest_ps(tight, start) < run.best_ps:
        run.best = start
    try:
        run.search()
    except TimeoutError:
        if run.best is None:
            raise PlanError(
                f"{budget_s:g} s were up before a split that meets every demand was found, or excluded; allow more seconds"
            ) from None
    if run.best is None:
        return conflict(problem, budget_s)
    return Exact(
        splits=run.best,
        slowest_s=run.best_ps / PER_SECOND,
        bound_s=min(run.bound_ps, run.best_ps) / PER_SECOND,
        proved=run.proved,
        seconds=time.monotonic() - began,
    )


@dataclass(kw_only=True)
class _Minimisation:
    """Search with the solver Z3 for the split whose slowest stage is fastest; it holds the best split and bound so far."""

    problem: ExactProblem
    deadline: float
    bound_ps: int
    best: Splits | None = None
    proved: bool = False
    values: list[int] = field(default_factory=list)
    """Possible times of a stage in ps, ascending; empty where stages share ranks, as then the slowest may be any sum."""

    @property
    def best_ps(self) -> int:
        return INFINITE if self.best is None else slowest_ps(self.problem, self.best)

    def search(self) -> None:
        """Minimise the slowest stage of all chains, then each chain's slowest stage.

        Raises:
            TimeoutError: the time is up before the slowest stage of all chains is proved minimal.
        """
        self.values = _values(self.problem)
        model = Model(self.problem, self.deadline)
        chains = range(len(self.problem.chains))
        if self.best is None:
            # Beyond every stage; INFINITE marks pairs that are no stage.
            self.best = model.within([INFINITE - 1] * len(chains))
        if self.best is None:
            return
        self._minimise(model, set(chains), [INFINITE] * len(chains))
        self.proved = True
        if any(isinstance(demand.rule, Devices) for demand in self.problem.demands):
            # More devices for what is fast enough already would be wasted.
            return
        with suppress(TimeoutError):
            limits = [self.best_ps] * len(chains)
            for chain in sorted(chains, key=lambda chain: -self._time(self.best, {chain})):
                self._minimise(model, {chain}, limits)
                limits[chain] = self._time(self.best, {chain})

    def _minimise(self, model: Model, chains: set[int], limits: Sequence[int]) -> None:
        """Minimise the slowest stage of the given chains, with no stage slower than the limit in ps of its chain.

        Z3 is first asked for any better split, as the current one is often optimal. Bisection follows.
        """
        everything = len(chains) == len(limits)
        bound_ps = self.bound_ps if everything else 0

        def within(limit_ps: int) -> Splits | None:
            return model.within([min(own, limit_ps) if chain in chains else own for chain, own in enumerate(limits)])

        better = within(self._time(self.best, chains) - 1)
        while better is not None:
            self.best, better = better, None
            best_ps = self._time(self.best, chains)
            while better is None and (limit_ps := self._middle(bound_ps, best_ps)) is not None:
                better = within(limit_ps)
                if better is None:
                    # The next possible time above the limit that no split meets.
                    bound_ps = self.values[bisect_left(self.values, limit_ps + 1)] if self.values else limit_ps + 1
                    self.bound_ps = bound_ps if everything else self.bound_ps
            better = better or within(best_ps - 1)
        if everything:
            self.bound_ps = self._time(self.best, chains)

    def _time(self, splits: Splits | None, chains: set[int]) -> int:
        """Return the ps of the slowest stage of given chains; if these are all, stages that share ranks count with their sum."""
        if splits is None:
            return INFINITE
        if len(chains) == len(self.problem.chains):
            return slowest_ps(self.problem, splits)
        times = stage_times(self.problem, splits)
        return max(max(times[chain]) for chain in chains)

    def _middle(self, bound_ps: int, best_ps: int) -> int | None:
        if not self.values:
            return (bound_ps + best_ps) // 2 if bound_ps < best_ps - 1 else None
        low, high = bisect_left(self.values, bound_ps), bisect_left(self.values, best_ps)
        return self.values[(low + high - 1) // 2] if low < high - 1 else None


def _values(problem: ExactProblem) -> list[int]:
    if sharing(problem):
        return []
    tables = [chain.tables.times for chain in problem.chains]
    found = np.unique(np.concatenate([table[table != INFINITE] for table in tables]))
    return found.tolist()
