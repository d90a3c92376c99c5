"""`loosely-coupled`: for every stage count of the language model, encoders in the fewest stages that are no slower.

The paper takes degrees from the user; here replicas, microbatches and recomputation are tried too, with one tensor-parallel
degree for all chains. The fastest by an estimate are handed to the simulator, which chooses as in the paper.

Source: Cornstarch, Algorithm 1 (§5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

import numpy as np

from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.combinations import SPREAD_COST, Combinations
from mmcompile.planner.search.options import OptionTables
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting
from mmcompile.planner.search.splitter import Splitter

_MAX_FRAMES = 32
"""Most settings and degrees whose stage counts are tried: the fastest by a guess."""
_MAX_DRAFTED = 96
"""Most options that are split to find the finalists, for some do not fit the memory."""
_FINALISTS = 6
"""Number of estimated options that are simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    guess_s: float
    chains: ChainSet
    setting: Setting
    degrees: Degrees
    stages: int
    """Number of stages of the last chain."""


def loosely_coupled(problem: Problem) -> Sequence[Candidate]:
    """Yield the candidates of Algorithm 1."""
    tables = OptionTables(problem=problem)
    options = sorted(_options(problem, tables), key=lambda option: option.guess_s)
    splitter = Splitter(problem=problem)
    found: list[Candidate] = []
    for option in options[:_MAX_DRAFTED]:
        candidate = _drafted(problem, splitter, option)
        if candidate is not None:
            found.append(candidate)
        if len(found) == _FINALISTS:
            break
    return found


def _options(problem: Problem, tables: OptionTables) -> Iterator[_Option]:
    """Yield every stage count of the last chain, with a rough estimate of the step."""
    for _, _, chains, setting, degrees in sorted(_frames(problem, tables), key=lambda frame: frame[:2])[:_MAX_FRAMES]:
        yield from _counts(problem, tables, chains, setting, degrees)


def _frames(problem: Problem, tables: OptionTables) -> Iterator[tuple[float, int, ChainSet, Setting, Degrees]]:
    """Yield all but stage counts; first the step if all devices were the last chain's, in stages as even as layers allow."""
    apart = [chains for chains in problem.sets if not chains.colocated]
    number = 0
    for setting in Combinations(problem=problem, tables=tables).settings:
        if "1f1b" in problem.space.schedules:
            setting = replace(setting, schedule="1f1b")
        for tp in problem.space.tp:
            for cp in problem.space.cp:
                degrees = Degrees(tp=tp, cp=cp, dp=setting.dp)
                for chains in apart:
                    last = chains.chains[-1]
                    stages = min(problem.num_devices // degrees.ranks, len(last.layers))
                    if stages:
                        priced = problem.prices.priced(last, degrees, setting)
                        uneven = 1.0 + SPREAD_COST * problem.prices.spread(setting) * sqrt(log(stages))
                        guess_s = float(priced.total_s[-1]) * (1.0 + (setting.num_microbatches - 1) * uneven / stages)
                        tight = priced.held_bytes(stages, setting.num_microbatches) > stages * problem.memory_bytes(1)
                        yield guess_s * (1000.0 if tight else 1.0), number, chains, setting, degrees
                        number += 1


def _counts(
    problem: Problem, tables: OptionTables, chains: ChainSet, setting: Setting, degrees: Degrees
) -> Iterator[_Option]:
    last = chains.chains[-1]
    most = min(len(last.layers), problem.num_devices // degrees.ranks)
    if most < 1:
        return
    priced = problem.prices.priced(last, degrees, setting)
    targets = tables.slowest(priced, setting, most, last=True)
    path_s, needed = float(priced.total_s[-1]), np.arange(1, most + 1) * degrees.ranks
    encoder = replace(degrees, cp=1)
    for chain in chains.chains[:-1]:
        own = problem.prices.priced(chain, encoder, setting)
        slowest_s = tables.slowest(own, setting, len(chain.layers), last=False)
        # Falls with the number of stages, so the first that is fast enough is found by bisection.
        fewest = 1 + len(slowest_s) - np.searchsorted(np.minimum.accumulate(slowest_s)[::-1], targets, side="right")
        needed = needed + np.where(fewest > len(slowest_s), problem.num_devices + 1, fewest * encoder.ranks)
        path_s += float(own.total_s[-1])
    # Stages that work on unequal microbatches at the same time wait for the largest of them.
    uneven = 1.0 + SPREAD_COST * problem.prices.spread(setting) * np.sqrt(np.log(np.arange(1, most + 1)))
    possible = np.isfinite(targets)
    guess_s = path_s + (setting.num_microbatches - 1) * np.where(possible, targets, 0.0) * uneven
    for index in np.flatnonzero(possible & (needed <= problem.num_devices)).tolist():
        fixed = problem.stages.get(last.name, index + 1)
        if fixed == index + 1:
            yield _Option(
                guess_s=float(guess_s[index]), chains=chains, setting=setting, degrees=degrees, stages=index + 1
            )


def _drafted(problem: Problem, splitter: Splitter, option: _Option) -> Candidate | None:
    """Return the option with exact splits: encoders in the fewest stages that meet the last chain's time."""
    chains, setting = option.chains, option.setting
    memory_bytes = problem.memory_bytes(1)
    encoder = replace(option.degrees, cp=1)
    degrees = [*([encoder] * (len(chains.chains) - 1)), option.degrees]
    split = splitter.table(chains.chains[-1], setting, option.degrees, 0, memory_bytes, option.stages)[
        option.stages - 1
    ]
    if split is None:
        return None
    counts: list[int] = []
    for chain in chains.chains[:-1]:
        table = splitter.table(chain, setting, encoder, option.stages, memory_bytes, len(chain.layers))
        meets = (own is not None and own.bottleneck_s <= split.bottleneck_s for own in table)
        fewest = problem.stages.get(chain.name) or next((n for n, fast in enumerate(meets, 1) if fast), None)
        if fewest is None:
            return None
        counts.append(fewest)
    counts.append(option.stages)
    combination = Combination(chains=chains, setting=setting, degrees=tuple(degrees), counts=tuple(counts))
    if combination.num_ranks > problem.num_devices:
        return None
    parts = splitter.parts(combination, memory_bytes)
    return None if isinstance(parts, int) else assemble(problem, chains, setting, degrees, parts)
