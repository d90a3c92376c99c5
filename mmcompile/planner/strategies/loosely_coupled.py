"""`loosely-coupled`: for every number of language-model stages, encoders in the fewest stages as fast as the slowest of these.

The paper takes degrees from the user; here replicas, microbatches and recomputation are tried too, with one tensor-parallel
degree for all chains. The fastest by an estimate are handed to the simulator, which chooses as in the paper.

Source: Cornstarch, Algorithm 1 (§5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain as chained
from itertools import product

import numpy as np

from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.combinations import Combinations, even_guess_s, unevenness
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting
from mmcompile.planner.search.splitter import Splitter

# Number of (setting, degrees) pairs, fastest by a guess, whose stage counts are tried.
_MAX_FRAMES = 32
# Number of stage counts, fastest by the rough estimate, whose layers are split exactly to find those to simulate.
_MAX_DRAFTED = 96
# Number of candidates, fastest by the estimate with exact splits, that are given to the simulator.
_FINALISTS = 6


def loosely_coupled(problem: Problem) -> Sequence[Candidate]:
    """Return the best candidates of Cornstarch's Algorithm 1 by its estimate, for the simulator to choose from."""
    combos = Combinations(problem=problem)
    frames = sorted(_frames(combos), key=lambda frame: frame[0])[:_MAX_FRAMES]
    options = chained.from_iterable(_counts(combos, *frame) for _, frame in frames)
    splitter = Splitter(problem=problem)
    found: list[Candidate] = []
    for option in sorted(options, key=lambda option: option.guess_s)[:_MAX_DRAFTED]:
        candidate = _drafted(problem, splitter, option)
        if candidate is not None:
            found.append(candidate)
        if len(found) == _FINALISTS:
            break
    return found


def _frames(combos: Combinations) -> Iterator[tuple[float, tuple[ChainSet, Setting, Degrees]]]:
    """Yield (guess in s, (chain set, setting, degrees)) without stage counts; the degrees are the same for all chains.

    The guess is of a step as if the last chain had all devices, times 1000 if memory looks too small, so that it comes last.
    """
    problem = combos.problem
    apart = [chains for chains in problem.sets if not chains.colocated]
    for setting, tp, cp in product(combos.settings, problem.space.tp, problem.space.cp):
        if "1f1b" in problem.space.schedules:
            setting = replace(setting, schedule="1f1b")
        degrees = Degrees(tp=tp, cp=cp, dp=setting.dp)
        for chains in apart:
            last = chains.chains[-1]
            stages = min(problem.num_devices // degrees.ranks, len(last.layers))
            if stages:
                priced = problem.prices.priced(last, degrees, setting)
                yield even_guess_s(problem, [priced], setting, stages), (chains, setting, degrees)


def _counts(combos: Combinations, chains: ChainSet, setting: Setting, degrees: Degrees) -> Iterator[Combination]:
    """Yield a combination of stage counts, with a guess of a step's seconds, for each stage count that the last chain can have.

    Encoders have 1 stage each as a placeholder; `_drafted` replaces it.
    """
    problem, last = combos.problem, chains.chains[-1]
    most = min(len(last.layers), problem.num_devices // degrees.ranks)
    if most < 1:
        return
    priced = problem.prices.priced(last, degrees, setting)
    targets = combos.tables.slowest(priced, setting, most, last=True)
    path_s, needed = float(priced.total_s[-1]), np.arange(1, most + 1) * degrees.ranks
    encoder = replace(degrees, cp=1)
    for chain in chains.chains[:-1]:
        own = problem.prices.priced(chain, encoder, setting)
        slowest_s = combos.tables.slowest(own, setting, len(chain.layers), last=False)
        # Falls with the number of stages, so the first that is fast enough is found by bisection.
        fewest = 1 + len(slowest_s) - np.searchsorted(np.minimum.accumulate(slowest_s)[::-1], targets, side="right")
        needed = needed + np.where(fewest > len(slowest_s), problem.num_devices + 1, fewest * encoder.ranks)
        path_s += float(own.total_s[-1])
    uneven = unevenness(problem, setting, np.arange(1, most + 1))
    possible = np.isfinite(targets)
    guess_s = path_s + (setting.num_microbatches - 1) * np.where(possible, targets, 0.0) * uneven
    for index in np.flatnonzero(possible & (needed <= problem.num_devices)).tolist():
        if problem.stages.get(last.name, index + 1) == index + 1:
            yield Combination(
                guess_s=float(guess_s[index]),
                chains=chains,
                setting=setting,
                degrees=(*[encoder] * (len(chains.chains) - 1), degrees),
                counts=(*[1] * (len(chains.chains) - 1), index + 1),
            )


def _drafted(problem: Problem, splitter: Splitter, option: Combination) -> Candidate | None:
    """Return a combination with its layers split exactly into stages; None if it needs too much memory or too many devices.

    Each encoder gets the fewest stages that are no slower than the slowest stage of the last chain.
    """
    chains, setting, degrees, stages = option.chains, option.setting, option.degrees, option.counts[-1]
    memory_bytes = problem.memory_bytes(1)
    split = splitter.table(chains.chains[-1], setting, degrees[-1], 0, memory_bytes, stages)[stages - 1]
    if split is None:
        return None
    counts: list[int] = []
    for chain, own in zip(chains.chains[:-1], degrees, strict=False):
        table = splitter.table(chain, setting, own, stages, memory_bytes, len(chain.layers))
        meets = (each is not None and each.bottleneck_s <= split.bottleneck_s for each in table)
        fewest = problem.stages.get(chain.name) or next((n for n, fast in enumerate(meets, 1) if fast), None)
        if fewest is None:
            return None
        counts.append(fewest)
    combination = replace(option, counts=(*counts, stages))
    if combination.num_ranks > problem.num_devices:
        return None
    parts = splitter.parts(combination, memory_bytes)
    return None if isinstance(parts, int) else assemble(problem, chains, setting, degrees, parts)
