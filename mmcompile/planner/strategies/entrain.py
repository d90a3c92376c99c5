"""`entrain`: devices in proportion to each component's work, then the best degrees of each within its share.

For every number of replicas, a replica's devices are divided among the components in proportion (`allocate`) to their seconds for
the dataset's mean microbatch (the paper's: for a profiling batch). Each component tries every tp x cp x pp that fills its share,
with layers split by Eq. 4.1. The seconds of a step with K microbatches are estimated by Eq. 4.2,

    T = sum of all stage times + (K - 1) slowest stage + resharding

where resharding is K messages over each edge between chains of different degrees. The highest throughput wins. All components
have the same number of replicas. Every K that divides a replica's samples is tried, and every recomputation mode.

Source: Entrain, Algorithm 3 (dissertation of Oobleck / Cornstarch / Entrain, §4.4.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from mmcompile.errors import ConfigError
from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.combinations import Combinations
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees
from mmcompile.planner.search.splitter import Splitter

# Number of topologies (tp x cp x pp of each component), fastest by a rough estimate, that are split exactly.
_MAX_SPLIT = 48


def entrain(problem: Problem) -> Sequence[Candidate]:
    """Return the candidate of Entrain's Algorithm 3; an empty sequence if no topology fits the memory."""
    apart = [chains for chains in problem.sets if not chains.colocated]
    if not apart:
        return ()
    chains, splitter = apart[0], Splitter(problem=problem)
    found: list[Candidate] = []
    for each in sorted(_topologies(problem, chains), key=lambda each: each.guess_s)[:_MAX_SPLIT]:
        parts = splitter.parts(each, problem.memory_bytes(problem.num_devices))
        if not isinstance(parts, int):
            found.append(assemble(problem, chains, each.setting, each.degrees, parts))
    return (min(found, key=_step_s),) if found else ()


def _topologies(problem: Problem, chains: ChainSet) -> Iterator[Combination]:
    """Yield every choice of degrees and stage counts with which each chain uses exactly its share of the devices.

    `guess_s` of a choice is the seconds of a training step by Entrain's Eq. 4.2.
    """
    combos = Combinations(problem=problem)
    tables = combos.tables
    for setting in combos.settings:
        per_replica = problem.num_devices // setting.dp
        if per_replica < len(chains.chains):
            continue
        setting = replace(setting, schedule="1f1b" if "1f1b" in problem.space.schedules else setting.schedule)
        whole = Degrees(dp=setting.dp)
        work = {chain.name: float(problem.prices.priced(chain, whole, setting).total_s[-1]) for chain in chains.chains}
        shares = allocate(work, per_replica)
        ways: list[list[tuple[Degrees, int, float, float]]] = []
        for chain in chains.chains:
            last = chain is chains.chains[-1]
            own: list[tuple[Degrees, int, float, float]] = []
            for tp, cp in product(problem.space.tp, problem.space.cp if last else (1,)):
                pp, left = divmod(shares[chain.name], tp * cp)
                if left or not 1 <= pp <= len(chain.layers) or problem.stages.get(chain.name, pp) != pp:
                    continue
                degrees = Degrees(tp=tp, cp=cp, dp=setting.dp)
                priced = problem.prices.priced(chain, degrees, setting)
                slowest_s = float(tables.slowest(priced, setting, len(chain.layers), last=last)[pp - 1])
                if slowest_s < float("inf"):
                    own.append((degrees, pp, slowest_s, float(priced.total_s[-1])))
            ways.append(own)
        for chosen in product(*ways):
            degrees, counts, slowest_s, total_s = zip(*chosen, strict=True)
            guess_s = sum(total_s) + (setting.num_microbatches - 1) * max(slowest_s)
            yield Combination(chains=chains, guess_s=guess_s, setting=setting, degrees=degrees, counts=counts)


def _step_s(candidate: Candidate) -> float:
    """Return the seconds of a training step by Eq. 4.2 of Entrain. Messages count only between chains of different degrees."""
    count = candidate.setting.num_microbatches
    slowest_s = max(stage.total_s for stage in candidate.stages)
    crossing_s = sum(
        seconds
        for (source, target), seconds in candidate.link_s.items()
        if candidate.degrees[candidate.stages[source].chain] != candidate.degrees[candidate.stages[target].chain]
    )
    return sum(stage.total_s for stage in candidate.stages) + (count - 1) * slowest_s + count * crossing_s


def allocate(work: Mapping[str, float], devices: int, minimum: int = 1) -> dict[str, int]:
    """Allocate devices in proportion to work, by largest remainder; ties go to the component named first.

    A component whose share is below the minimum gets the minimum, and the others share the rest.

    Args:
        work: component -> seconds, FLOPs or any other measure of work.

    Raises:
        ConfigError: fewer devices than the minimum for all components, negative work, or no work at all.
    """
    if devices < minimum * len(work):
        raise ConfigError(
            f"{devices} devices for {len(work)} components of at least {minimum}; give {minimum * len(work)} or more"
        )
    if min(work.values()) < 0 or not sum(work.values()):
        raise ConfigError(f"work is {dict(work)}; wanted none negative and at least one above zero")
    free = dict(work)
    given: dict[str, int] = {}
    left = devices
    while small := [name for name, amount in free.items() if amount / sum(free.values()) * left < minimum]:
        for name in small:
            given[name] = minimum
            left -= minimum
            del free[name]
    total = sum(free.values())
    shares = {name: amount / total * left for name, amount in free.items()}
    given |= {name: int(share) for name, share in shares.items()}
    rest = devices - sum(given.values())
    for name in sorted(shares, key=lambda name: int(shares[name]) - shares[name])[:rest]:
        given[name] += 1
    return {name: given[name] for name in work}
