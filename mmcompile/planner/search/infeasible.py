"""Explanation of an impossible request: the lacking resource, and the nearest requests that work.

Relaxations are tried one at a time, the cheapest for the user first: recompute, share tensors, take smaller microbatches, all
three together, add nodes, train less. A relaxation works if the search finds a split that fits the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from mmcompile.config import Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, SearchSpace
from mmcompile.units import format_bytes

_BUDGET_S = 20.0
# Number of feasible relaxations after which `nearest` tries no more.
_WANTED = 3
# Largest factor on the requested number of nodes that is tried.
_MAX_NODES = 64

Way = tuple[str, Callable[[], Problem]]
"""(a changed request in words for the user, function that makes its planning problem)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxation:
    """One kind of change to a request, for example more nodes, as a list of changed requests, the smallest change first."""

    words: str
    ways: tuple[Way, ...]
    rising: bool = False
    """True if all changed requests after one that fits the memory fit too, so that the first is found by bisection."""
    instead_of: str = ""
    """`words` of an earlier relaxation, whose i-th changed request is a smaller change than the i-th of this one; "" for none.

    If the first one there that fits the memory is the i-th, only those before the i-th of this relaxation are tried.
    """
    useless_after: tuple[str, ...] = ()
    """`words` of relaxations that are smaller changes; if a request of one of them fits the memory, this one is not tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """Result of trying relaxations: those with a feasible request, those without, and those not tried."""

    works: tuple[str, ...]
    """First changed request that fits the memory, in words, of each kind of change that has one, in order of trial."""
    fails: tuple[str, ...]
    """`Relaxation.words` of each kind of change, such as more nodes, with which no changed request fits the memory."""
    untried: tuple[str, ...]
    """`Relaxation.words` of each kind of change that was left when the time was up."""


def explain(problem: Problem, *, budget_s: float = _BUDGET_S) -> str:
    """Return the lines of a PlanError: why no candidate fits, and the nearest requests that do, found in `budget_s` seconds."""
    found = nearest(relaxations(problem), budget_s=budget_s)
    lines = list(_needs(problem))
    if found.works:
        lines += ["what works, nearest first:", *(f"  {words}" for words in found.works)]
    elif not found.untried:
        lines.append("nothing near it works; use devices with more memory, or a smaller model")
    if found.fails:
        lines.append(f"not enough: {'; '.join(found.fails)}")
    if found.untried:
        lines.append(f"not tried, for {budget_s:g} s were up: {'; '.join(found.untried)}")
    return "\n".join(lines)


def fits(problem: Problem) -> bool:
    """Return whether the search finds a candidate of a problem that fits the memory."""
    return BranchAndBound(problem=problem).first() is not None


def nearest(
    asked: Sequence[Relaxation],
    works: Callable[[Problem], bool] = fits,
    *,
    budget_s: float = _BUDGET_S,
    wanted: int = _WANTED,
) -> Nearest:
    """Try relaxations in order until `wanted` are feasible, as `works` tests, or `budget_s` seconds are up; return results."""
    until = time.monotonic() + budget_s
    found: dict[str, int] = {}
    said: list[str] = []
    fails: list[str] = []
    for number, relaxation in enumerate(asked):
        if len(said) == wanted:
            break
        if time.monotonic() >= until:
            return Nearest(works=tuple(said), fails=tuple(fails), untried=tuple(own.words for own in asked[number:]))
        if not found.keys().isdisjoint(relaxation.useless_after):
            continue
        ways = relaxation.ways[: found.get(relaxation.instead_of)]
        first = _first(ways, relaxation.rising, works)
        if first is not None:
            found[relaxation.words] = first
            said.append(ways[first][0])
        elif len(ways) == len(relaxation.ways):
            fails.append(relaxation.words)
    return Nearest(works=tuple(said), fails=tuple(fails), untried=())


def _first(ways: Sequence[Way], rising: bool, works: Callable[[Problem], bool]) -> int | None:
    def does(number: int) -> bool:
        return works(ways[number][1]())

    if not rising or not ways:
        return next((number for number in range(len(ways)) if does(number)), None)
    # A request after one that works does too. Steps double until one works; the first that does is between it and the one before.
    low, high = -1, 0
    while not does(high):
        if high == len(ways) - 1:
            return None
        low, high = high, min(2 * high + 1, len(ways) - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


def relaxations(problem: Problem) -> tuple[Relaxation, ...]:
    """Return the possible relaxations of a request, the cheapest for the user first, without those already in effect."""
    found = [
        Relaxation(words="recompute full", ways=tuple(_recomputes(problem))),
        Relaxation(words="tensor parallelism", ways=tuple(_tensors(problem))),
        Relaxation(words="smaller microbatches", ways=tuple(_microbatches(problem)), rising=True),
    ]
    names = tuple(own.words for own in found if own.ways)
    together = ", ".join(names)
    every, frozen = partial(_everything, problem), cache(partial(projector_only, problem))
    if len(names) > 1:
        ways = ((f"together: {together}", every),)
        found.append(Relaxation(words=_ALL, ways=ways, useless_after=names))
    ways = tuple(_nodes(lambda: problem, problem.cluster, ""))
    found.append(Relaxation(words=_NODES, ways=ways, rising=True))
    if names:
        ways = tuple(_nodes(every, problem.cluster, f", with {together}"))
        words = f"{_NODES} with {together}"
        found.append(Relaxation(words=words, ways=ways, rising=True, instead_of=_NODES, useless_after=(*names, _ALL)))
    if trains_more(problem):
        found.append(Relaxation(words=_FROZEN, ways=((_FROZEN, frozen),)))
        words = f"{_FROZEN}, with {together}"
        ways = ((words, lambda: _everything(frozen())),) if names else ()
        found.append(Relaxation(words=words, ways=ways, useless_after=(*names, _ALL, _FROZEN)))
    return tuple(own for own in found if own.ways)


_ALL = "all of these together"
_NODES = f"up to {_MAX_NODES} times the nodes"
_FROZEN = "training only the projector"


def _recomputes(problem: Problem) -> Iterator[Way]:
    kinds: tuple[Recompute, ...] = ("selective", "full")
    for recompute in kinds[: 0 if "full" in problem.space.recomputes else None]:
        if recompute not in problem.space.recomputes:
            yield (
                f"recompute {recompute}",
                partial(replace, problem, space=replace(problem.space, recomputes=(recompute,))),
            )


def _tensors(problem: Problem) -> Iterator[Way]:
    for degree in SearchSpace.everything(problem.cluster).tp:
        if degree > max(problem.space.tp):
            yield f"tp {degree}", partial(replace, problem, space=replace(problem.space, tp=(degree,)))


def _microbatches(problem: Problem) -> Iterator[Way]:
    """Yield requests with more and smaller microbatches for the same samples; none if the number of microbatches is free."""
    asked = problem.space.microbatches
    if asked is None:
        return
    batch, share = _batch(problem), _share(problem)
    for count in range(max(asked) + 1, share + 1):
        if share % count == 0:
            samples = share // count
            words = f"{count} microbatches of {samples} sample{'s' if samples != 1 else ''}"
            space = replace(problem.space, microbatches=(count,))
            yield words, partial(replace, problem, space=space, global_batch=batch)


def _batch(problem: Problem) -> int:
    asked, replicas = problem.space.microbatches, min(problem.space.dp or (1,))
    return problem.global_batch or problem.graph.num_samples * max(asked or (1,)) * replicas


def _share(problem: Problem) -> int:
    return _batch(problem) // min(problem.space.dp or (1,))


def _everything(problem: Problem) -> Problem:
    smaller = any(True for _ in _microbatches(problem))
    space = replace(
        problem.space,
        tp=SearchSpace.everything(problem.cluster).tp,
        recomputes=("full",),
        microbatches=(_share(problem),) if smaller else problem.space.microbatches,
    )
    return replace(problem, space=space, global_batch=_batch(problem) if smaller else problem.global_batch)


def _nodes(make: Callable[[], Problem], cluster: Cluster, words: str) -> Iterator[Way]:
    # Processes of one machine share its memory: more of them have no more.
    for factor in range(2, 1 if cluster.is_local else _MAX_NODES + 1):
        larger = replace(cluster, num_nodes=cluster.num_nodes * factor)
        yield f"{larger.num_devices} devices, {larger}{words}", partial(_on, make, larger)


def _on(make: Callable[[], Problem], cluster: Cluster) -> Problem:
    problem = make()
    prices = replace(problem.prices, pricing=replace(problem.pricing, cluster=cluster))
    return replace(problem, prices=prices)


def _needs(problem: Problem) -> Iterator[str]:
    """Yield the lines of an error message that compare the memory that the model needs with the memory of all devices."""
    each = problem.memory_bytes(1)
    together = each * problem.num_devices
    setting = replace(BranchAndBound(problem=problem).combos.settings[-1], dp=1)
    yield (
        f"no plan fits {problem.num_devices} devices of {problem.cluster}: they have {format_bytes(each)} each, "
        f"{format_bytes(together)} together"
    )
    lines: list[str] = []
    state = 0
    for chain in problem.sets[0].chains:
        priced = problem.prices.priced(chain, Degrees(cp=problem.pricing.given_cp), setting)
        needed = priced.state_bytes + priced.worst_bytes
        own = int(priced.state_bytes[-1])
        state += own
        lines.append(
            f"  {chain.name}: {format_bytes(own)}, and {format_bytes(int(priced.worst_bytes[-1]))} of activations a "
            f"microbatch (recompute {setting.recompute}); biggest layer {format_bytes(int((needed[1:] - needed[:-1]).max()))}"
        )
    verdict = "more than there is" if state > together else "the activations in flight do not fit beside"
    yield f"parameters, gradients and optimizer state need {format_bytes(state)}: {verdict}"
    yield from lines


def trains_more(problem: Problem) -> bool:
    """Return whether a model with projectors trains parameters outside of them. False if costs are of a context-parallel rank."""
    # The costs of a context-parallel rank cannot be computed anew with other parameters frozen.
    names = _projectors(problem)
    trained = {spec.name for spec in problem.graph.parameters if spec.trainable}
    return bool(names) and not trained <= names and problem.pricing.given_cp == 1


def projector_only(problem: Problem) -> Problem:
    """Return the problem with all but projectors frozen and new costs; the graph's annotations, changed by that, are restored."""
    graph = problem.graph
    names = _projectors(problem)
    specs = (replace(spec, trainable=spec.name in names) for spec in graph.parameters)
    frozen = replace(graph, parameters=tuple(specs))
    cost = Cost()
    passes = Pipeline(passes=(GradientFlow(), cost), verify=False)
    try:
        table = passes.run(frozen).of(cost)
    finally:
        passes.run(graph)
    pricing = replace(problem.pricing, table=table)
    return replace(problem, prices=replace(problem.prices, graph=frozen, pricing=pricing))


def _projectors(problem: Problem) -> set[str]:
    named = {
        name
        for component in problem.graph.components
        if component.kind is ComponentKind.PROJECTOR
        for layer in component.layers
        for name in layer.parameters
    }
    return {spec.name for spec in problem.graph.parameters if not named.isdisjoint((spec.name, *spec.aliases))}
