"""First answer and first bound for the exact splitter: an interval DP per chain under the demands that one chain can check.

A chain's distance to the loss, the number of stages from its end to the loss, sets its microbatches in flight and so its memory.
Taken alone, with the least distance that it can have, each chain is split optimally into every number of stages (the recurrence
of `mmcompile.planner.search.partition`, stages that a demand forbids costing infinity). A lower bound is the least stage time at
which the chains, in their fewest stages, fit the devices. With the distances that follow from all splits, the same DP gives one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from mmcompile.planner.exact.rules import Cap, Count, Cuts, Devices, InStage, Unsatisfiable
from mmcompile.planner.exact.split_problem import ExactProblem, Splits, broken, covers, slowest_ps, tails
from mmcompile.planner.search.partition import INFINITE, Split, Table, cheapest_splits

# Number of target times of the slowest stage, least first, whose stage counts are tried with the real distances to the loss.
_MAX_REALISED = 32


def seed(problem: ExactProblem) -> tuple[Splits | None, int]:
    """Return a first answer by DP, which is deterministic: splits of all chains, and a lower bound.

    Returns:
        Splits that meet every demand, or None if the DP found none, although one may exist; and a lower bound of the slowest
        stage in picoseconds, INFINITE if no split exists.
    """
    if any(isinstance(demand.rule, Unsatisfiable) for demand in problem.demands):
        return None, INFINITE
    dp, best = _ChainSplits(problem), None
    targets = list(_targets(problem, dp))
    for target_ps, counts in targets[:_MAX_REALISED]:
        if best is not None and slowest_ps(problem, best) <= target_ps:
            break
        found = _realise(problem, dp, counts)
        if found is not None and (best is None or slowest_ps(problem, found) < slowest_ps(problem, best)):
            best = found
    return best, targets[0][0] if targets else INFINITE


def _counts_allowed(problem: ExactProblem, chain: int) -> range:
    own = problem.chains[chain]
    low, high = own.low, min(own.high, own.num_layers)
    for demand in problem.demands:
        if isinstance(demand.rule, Count) and demand.rule.chain == chain:
            low, high = max(low, demand.rule.low), min(high, demand.rule.high)
    return range(low, high + 1)


def narrowed(problem: ExactProblem) -> ExactProblem | None:
    """Return the problem with each chain's range of stage counts reduced to what demands allow; None if a range becomes empty."""
    counts = [_counts_allowed(problem, chain) for chain in range(len(problem.chains))]
    if not all(counts):
        return None
    chains = (replace(chain, low=own[0], high=own[-1]) for chain, own in zip(problem.chains, counts, strict=True))
    return replace(problem, chains=tuple(chains))


def least_tails(problem: ExactProblem) -> list[int]:
    """Return the least possible number of stages between each chain's end and the loss."""
    least = [0] * len(problem.chains)
    for index in reversed(range(len(least))):
        for feed in problem.chains[index].feeds:
            below = max(1, problem.chains[feed.target].low) if feed.target_layer == 0 else 1
            least[index] = max(least[index], least[feed.target] + below)
    return least


@dataclass(frozen=True, slots=True)
class _ChainSplits:
    """Optimal splits of single chains into stages, computed once for each tail (number of stages from a chain to the loss)."""

    problem: ExactProblem
    known: dict[tuple[int, int], dict[int, Split]] = field(default_factory=dict)

    def splits(self, chain: int, tail: int) -> dict[int, Split]:
        """Return number of stages -> optimal split of a chain into so many stages, for every number for which one exists.

        `tail` is the number of stages between the chain's end and the loss, on which the memory of its stages depends.
        """
        key = (chain, tail)
        if key not in self.known:
            counts = _counts_allowed(self.problem, chain)
            if not counts or counts.stop <= 1:
                found = {}
            elif _depends_on_position(self.problem, chain):
                found = {count: self._chain(chain, tail, count) for count in counts}
            else:
                found = dict.fromkeys(counts, self._chain(chain, tail, counts[-1]))
            self.known[key] = {count: splits[count] for count, splits in found.items() if count in splits}
        return self.known[key]

    def _chain(self, chain: int, tail: int, count: int) -> dict[int, Split]:
        # If a demand names a stage by its index from the first, only the split into `count` stages is right.
        costs = (_cost(self.problem, chain, tail, k, count) for k in range(1, count + 1))
        return {k: split for k, split in enumerate(cheapest_splits(costs), start=1) if split is not None}


def _depends_on_position(problem: ExactProblem, chain: int) -> bool:
    return any(
        isinstance(rule, InStage | Cap) and rule.chain == chain and rule.stage is not None
        for rule in (demand.rule for demand in problem.demands)
    )


def _cost(problem: ExactProblem, chain: int, tail: int, k: int, count: int) -> Table:
    """Return the picoseconds of every possible stage that is the k-th from the end of `count` stages, [N+1, N+1].

    Entry [i, j] is for the stage of layers i..j-1; INFINITE if it breaks a memory limit or another demand of the problem. `tail`
    is the number of stages between the chain's end and the loss, on which the memory depends.
    """
    own = problem.chains[chain].tables
    start, end = np.arange(len(own.times))[:, None], np.arange(len(own.times))[None, :]
    bad = np.zeros(own.times.shape, dtype=bool)
    for rule in (demand.rule for demand in problem.demands):
        match rule:
            case Cap() if covers(rule, chain, count - k):
                bad |= own.needs(problem.in_flight(tail + k - 1)) > rule.num_bytes
            case Cuts(some=True) if rule.chain == chain:
                bad |= (start <= rule.first) & (end > rule.last)
            case Cuts() if rule.chain == chain:
                bad |= ((rule.first < start) & (start <= rule.last)) | ((rule.first < end) & (end <= rule.last))
            case InStage() if rule.chain == chain and rule.stage == count - k:
                bad |= (start > rule.first) | (end < rule.last)
            case InStage() if rule.chain == chain and rule.stage >= count:
                bad |= True
            case _:
                pass
    return np.where(bad, INFINITE, own.times)


def _targets(problem: ExactProblem, dp: _ChainSplits) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (ps of the slowest stage, fewest stages of each chain that are no slower), ps rising, where the devices suffice."""
    options = [dp.splits(chain, tail) for chain, tail in enumerate(least_tails(problem))]
    if not all(options):
        return
    budgets = [demand.rule.most for demand in problem.demands if isinstance(demand.rule, Devices)]
    times = [{count: split.bottleneck_ps for count, split in splits.items()} for splits in options]
    floor_ps = max(min(own.values()) for own in times)
    for target_ps in sorted({value for own in times for value in own.values() if value >= floor_ps}):
        counts = tuple(min(count for count, value in own.items() if value <= target_ps) for own in times)
        needed = sum(count * chain.devices for count, chain in zip(counts, problem.chains, strict=True))
        if all(needed <= budget for budget in budgets):
            yield target_ps, counts


def _realise(problem: ExactProblem, dp: _ChainSplits, counts: tuple[int, ...]) -> Splits | None:
    # The last chain first: the splits after a chain determine its distance to the loss.
    splits = [Split(boundaries=(0, chain.num_layers)) for chain in problem.chains]
    for chain in reversed(range(len(splits))):
        options = dp.splits(chain, tails(problem, tuple(splits))[chain])
        if counts[chain] not in options:
            return None
        splits[chain] = options[counts[chain]]
    found = tuple(splits)
    return None if broken(problem, found) else found
