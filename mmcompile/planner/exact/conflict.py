"""Explanation why no split meets the demands: a smallest set that conflicts, in words, with remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mmcompile.errors import PlanError
from mmcompile.planner.exact.rules import Cap, Count, Demand, Unsatisfiable
from mmcompile.planner.exact.seed import least_tails, narrowed, seed
from mmcompile.planner.exact.solver_model import Model
from mmcompile.planner.exact.split_problem import ExactProblem, sharing, slowest_ps
from mmcompile.planner.search.partition import PER_SECOND
from mmcompile.units import counted, format_bytes, format_seconds

# Number of stages of a chain, beyond the demanded count, that an explanation considers.
_WIDENED = 8


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Smallest set of demands that no split meets together; without any one of them, the others can be met."""

    demands: tuple[Demand, ...]
    why: str
    """Reason why a single demand cannot be met; "" if the words of the demand are reason enough."""
    remedies: tuple[str, ...]
    """Changes to the request, as text; each of them alone makes the remaining demands possible."""

    @property
    def text(self) -> str:
        """Text of the conflict, one line, and of its remedies, one line each."""
        first, *others = [f"'{demand.words}'" for demand in self.demands]
        verdict = f"conflicts with {' and '.join(others)}" if others else "cannot be met"
        reason = f": {self.why}" if self.why else ""
        return "\n".join((f"no plan: {first} {verdict}{reason}", *(f"  {remedy}" for remedy in self.remedies)))


def conflict(problem: ExactProblem, budget_s: float) -> Conflict:
    """Return a smallest set of demands that no split meets, for a problem that has no split.

    Raises:
        PlanError: `budget_s` seconds were up before the conflict was found.
    """
    # Who shares ranks with whom is said for one number of stages.
    wide = problem if sharing(problem) and narrowed(problem) is not None else _widened(problem)
    try:
        core = Model(wide, time.monotonic() + budget_s).core()
    except TimeoutError:
        words = ", ".join(f"'{demand.words}'" for demand in problem.demands)
        raise PlanError(
            f"no plan meets all of {words}; {budget_s:g} s were up before the conflict was found; allow more seconds"
        ) from None
    assert core is not None, "the DP found no split where there is one"
    demands = sorted((problem.demands[index] for index in core), key=lambda demand: not isinstance(demand.rule, Cap))
    why = _why(wide, demands[0]) if len(demands) == 1 else ""
    return Conflict(demands=tuple(demands), why=why, remedies=tuple(_remedies(wide, demands)))


def _widened(problem: ExactProblem) -> ExactProblem:
    # Stage counts become free, so that demands on counts can be left out one by one.
    lows: dict[int, int] = {}
    for rule in (demand.rule for demand in problem.demands):
        if isinstance(rule, Count):
            lows[rule.chain] = max(rule.low, lows.get(rule.chain, 1))
    chains = (
        replace(chain, low=1, high=min(chain.num_layers, lows[index] + _WIDENED), ranks=())
        if index in lows
        else replace(chain, ranks=())
        for index, chain in enumerate(problem.chains)
    )
    return replace(problem, chains=tuple(chains))


def _why(problem: ExactProblem, demand: Demand) -> str:
    match demand.rule:
        case Unsatisfiable() as rule:
            return rule.why
        case Count() as rule if rule.low > problem.chains[rule.chain].num_layers:
            chain = problem.chains[rule.chain]
            return f"{chain.name} has {counted(chain.num_layers, 'layer')}, and a stage has at least one"
        case Cap() as rule:
            return _too_big(problem, rule)
        case _:
            return ""


def _too_big(problem: ExactProblem, cap: Cap) -> str:
    least = least_tails(problem)
    for index, chain in enumerate(problem.chains):
        needed = chain.tables.needs(problem.in_flight(least[index])).diagonal(1)
        layer = int(np.argmax(needed))
        if cap.chain in (None, index) and needed[layer] > cap.num_bytes:
            label = chain.labels[layer]
            return f"{label.component}.{label.index} ({label.name}) alone needs {format_bytes(needed[layer])}"
    return ""


def _remedies(problem: ExactProblem, demands: list[Demand]) -> Iterator[str]:
    """Yield one line of text for each demand that can be weakened or dropped so that a split of all chains is found."""
    for demand in demands:
        others = replace(problem, demands=tuple(other for other in problem.demands if other is not demand))
        best, _ = seed(others)
        if best is None:
            continue
        works = f"there is one, with a slowest stage of {format_seconds(slowest_ps(others, best) / PER_SECOND)}"
        match demand.rule:
            case Cap() as rule:
                yield f"with {format_bytes(_least_cap(others, demand, rule))} in place of '{demand.words}' there is one"
            case Count() as rule:
                count = counted(best[rule.chain].num_stages, "stage")
                yield f"with {count} of {problem.chains[rule.chain].name} in place of '{demand.words}' {works}"
            case _:
                yield f"without '{demand.words}' {works}"


def _least_cap(others: ExactProblem, demand: Demand, cap: Cap) -> int:
    # At most a thousandth above the least memory cap that can replace `cap`, the rule of `demand`.
    def fits(num_bytes: int) -> bool:
        changed = replace(demand, rule=replace(cap, num_bytes=num_bytes))
        return seed(replace(others, demands=(*others.demands, changed)))[0] is not None

    low, high = cap.num_bytes, 2 * cap.num_bytes
    while not fits(high):
        low, high = high, 2 * high
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
