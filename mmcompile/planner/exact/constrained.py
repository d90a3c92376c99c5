"""Cuts under a user's constraints, for the candidates of the search.

Candidates come fastest first. Each keeps its degrees, setting and stage counts, and is cut by the DP under the constraints;
the simulator judges the results, until the next candidate is slower than the best so far even without constraints. Then Z3
proves the cuts of the best, or improves them. Where no candidate's stage counts can meet the constraints, stages are given out
anew over the devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.exact.conflict import Conflict
from mmcompile.planner.exact.demands import demands
from mmcompile.planner.exact.seed import narrowed, seed
from mmcompile.planner.exact.solver import BUDGET_S, Exact, solve
from mmcompile.planner.exact.split_problem import ExactChain, ExactProblem, Splits, broken
from mmcompile.planner.plan.constraints import Constraint
from mmcompile.planner.schedule.schedule import in_flight
from mmcompile.planner.search.branch_and_bound import TOLERANCE, BranchAndBound
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.partition import Split, StageTables
from mmcompile.planner.search.splitter import Splitter
from mmcompile.units import format_seconds

# Most candidates of the search that are cut again under the constraints.
_MAX_TRIED = 24
# Most candidates whose stage counts are chosen again when no candidate's counts can meet the constraints.
_MAX_ANEW = 4


Result = tuple[Candidate, tuple[str, ...]]
"""Fastest candidate that meets constraints, and lines for `Plan.notes`: demands, their cost in time, certificate of the cuts."""


def constrained(engine: BranchAndBound, constraints: Sequence[Constraint], *, budget_s: float = BUDGET_S) -> Result:
    """Find the fastest candidate that meets the constraints of a user, and notes on it.

    Args:
        engine: search that has finished. Afterwards its `judged` holds only candidates that meet the constraints.
        budget_s: seconds that Z3 may take each time it looks for a split or a conflict.

    Raises:
        PlanError: no candidate meets the constraints; the message names a smallest conflicting set and remedies.
        ConfigError: a constraint names a chain, layer or rank that does not exist, or has no effect.
    """
    found = sorted(engine.judged, key=lambda judged: judged.iteration_s)
    assert found, "constraints are for candidates that were found"
    engine.judged = []
    for judged in _readable(found, constraints):
        # Of those that are equally fast the simplest is wanted: look at all of them.
        if judged.iteration_s > engine.fastest_s * (1 + TOLERANCE / 2):
            break
        candidate = _cut_by_dp(judged, constraints)
        if candidate is not None:
            engine.judge([candidate], judged.strategy)
    best = engine.best()
    if best is None:
        return _anew(engine, found, constraints, budget_s)
    exact = solve(exact_problem(best, constraints), budget_s=budget_s, start=splits_of(best))
    assert isinstance(exact, Exact), "a candidate meets the demands"
    engine.judge([_recut(best, exact.splits)], best.strategy)
    best = min(best, engine.judged[-1], key=lambda judged: judged.iteration_s)
    return best, (*_notes(constraints, found[0], best), f"cuts, with these stage counts: {exact.text}")


def exact_problem(
    candidate: Candidate, constraints: Sequence[Constraint] = (), *, devices: int | None = None
) -> ExactProblem:
    """Return the problem of splitting a candidate's chains into stages, its degrees, microbatches and schedule unchanged.

    Args:
        devices: number of devices for all stages together, with free stage counts; None keeps the candidate's counts and ranks.

    Raises:
        ConfigError: a constraint names a chain, layer or rank that does not exist, or has no effect.
    """
    setting = candidate.setting
    chains = [_chain(candidate, index, devices) for index in range(len(candidate.degrees))]
    return ExactProblem(
        chains=tuple(chains),
        in_flight=lambda depth: in_flight(setting.schedule, depth, setting.num_microbatches),
        demands=demands(
            constraints,
            chains,
            memory_bytes=candidate.problem.memory_bytes(candidate.num_ranks if devices is None else devices),
            counts=candidate.counts if devices is None else None,
            devices=devices,
        ),
    )


def splits_of(candidate: Candidate) -> Splits:
    """Return the cuts of a candidate's chains as splits."""
    return tuple(
        Split(boundaries=(0, *(stage.last for stage in candidate.stages if stage.chain == index)))
        for index in range(len(candidate.degrees))
    )


def _chain(candidate: Candidate, index: int, devices: int | None) -> ExactChain:
    problem, setting = candidate.problem, candidate.setting
    spec, degrees, count = candidate.chains.chains[index], candidate.degrees[index], candidate.counts[index]
    priced = problem.prices.priced(spec, degrees, setting)
    layers = Splitter(problem=problem).layers(priced, degrees)
    most = count if devices is None else max(1, min(len(spec.layers), devices // degrees.ranks))
    return ExactChain(
        name=spec.name,
        labels=spec.layers,
        tables=StageTables(layers=tuple(layers)),
        tp=degrees.tp,
        devices=degrees.ranks,
        low=1 if devices is not None else count,
        high=most,
        feeds=tuple(edge for edge in candidate.chains.edges if edge.source == index != edge.target),
        ranks=tuple(stage.ranks for stage in candidate.stages if stage.chain == index) if devices is None else (),
    )


def _readable(found: Sequence[Candidate], constraints: Sequence[Constraint]) -> Iterator[Candidate]:
    """Yield candidates in which all names in the constraints exist: the names of chains depend on the projector placement."""
    refusal: ConfigError | None = None
    readable = 0
    for judged in found:
        if readable == _MAX_TRIED:
            return
        try:
            exact_problem(judged, constraints)
        except ConfigError as error:
            refusal = refusal or error
            continue
        readable += 1
        yield judged
    if not readable and refusal is not None:
        raise refusal


def _cut_by_dp(candidate: Candidate, constraints: Sequence[Constraint]) -> Candidate | None:
    problem = exact_problem(candidate, constraints)
    if not broken(problem, splits_of(candidate)):
        return candidate
    tight = narrowed(problem)
    splits = None if tight is None else seed(tight)[0]
    return None if splits is None else _recut(candidate, splits)


def _anew(
    engine: BranchAndBound, found: Sequence[Candidate], constraints: Sequence[Constraint], budget_s: float
) -> Result:
    """Return the result for the first candidate that can meet the constraints once its stage counts are chosen anew.

    Raises:
        PlanError: no candidate can meet them; the message has the conflict of the fastest candidate.
    """
    devices = engine.problem.num_devices
    conflicts: list[Conflict] = []
    for before in _different(_readable(found, constraints)):
        exact = solve(exact_problem(before, constraints, devices=devices), budget_s=budget_s)
        if isinstance(exact, Conflict):
            conflicts.append(exact)
            continue
        engine.judge([_recut(before, exact.splits, keep_ranks=False)], before.strategy)
        changed = ", ".join(
            f"{chain.name} {count} -> {split.num_stages}"
            for chain, count, split in zip(before.chains.chains, before.counts, exact.splits, strict=True)
            if count != split.num_stages
        )
        best = engine.judged[-1]
        return best, (
            *_notes(constraints, found[0], best),
            f"stage counts changed to meet the constraints: {changed}",
            f"cuts, over {devices} devices: {exact.text}",
        )
    raise PlanError(conflicts[0].text)


def _different(found: Iterable[Candidate]) -> Iterator[Candidate]:
    seen: set[tuple[object, ...]] = set()
    for judged in found:
        key = (judged.chains, judged.degrees, judged.setting)
        if key not in seen and len(seen) < _MAX_ANEW:
            seen.add(key)
            yield judged


def _recut(candidate: Candidate, splits: Splits, *, keep_ranks: bool = True) -> Candidate:
    if splits == splits_of(candidate):
        return candidate
    return assemble(
        candidate.problem,
        candidate.chains,
        candidate.setting,
        candidate.degrees,
        [split.ranges for split in splits],
        [stage.ranks for stage in candidate.stages] if keep_ranks else None,
    )


def _notes(constraints: Sequence[Constraint], free: Candidate, best: Candidate) -> Iterator[str]:
    for constraint in constraints:
        yield f"constraint: {constraint.words}"
    if best.iteration_s > free.iteration_s:
        share = best.iteration_s / free.iteration_s - 1
        yield f"the constraints cost {share:.1%}: without them a step takes {format_seconds(free.iteration_s)}"
