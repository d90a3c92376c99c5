"""`BranchAndBound`: search for the fastest combination of setting, degrees and stage counts; bounds spare most of the work.

Combinations are taken by ascending guess of a step's seconds. One whose lower bound is above the fastest step so far is left out.
The chains of others are split into stages, the slowest as fast as possible; those whose bound, with these stages, is above the
fastest step are left out. The rest are simulated: their makespan is the mean over draws of random samples. If all combinations
are listed, the loop ends when none of them, split in this way, can be faster by more than the tolerance. Otherwise it stops after
a number of splits without a faster one, and neighbours of the fastest (a stage more or less in a chain) are tried. At last the
finalists are tried with the other schedules, and boundaries between their stages are moved to other layers, one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from statistics import fmean

import numpy as np

from mmcompile.planner.search.bounds import expected_s, lower_bound_s
from mmcompile.planner.search.candidate import Candidate, Ranges, assemble
from mmcompile.planner.search.combinations import CombinationGroup, Combinations
from mmcompile.planner.search.options import MemoryShortage
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import RECOMPUTES, SCHEDULES, Combination
from mmcompile.planner.search.splitter import Splitter

TOLERANCE = 0.005
"""Relative difference below which times are equal, as costs are no more exact: the simpler plan wins."""
# Number of combinations whose chains are split before their candidates are simulated together.
_BATCH = 24
# Number of combinations split in a row without a faster candidate, after which the search ends if not all are listed.
_PATIENCE = 48
# Number of combinations split in a row of which none fits, after which the search ends if not all are listed.
_MAX_VAIN = 400
# Most rounds in which the fastest candidate's stage counts are varied by one.
_MAX_ROUNDS = 6
FINALISTS = 12
"""Number of fastest candidates that are tried with every schedule, and whose cuts are moved."""
# Number of finalists whose cuts are moved by a layer where not all combinations are listed.
_POLISHED = 3
# Largest total of durations (draws x stages x microbatches x 3) that are simulated to move cuts.
_POLISH_SIZE = 200_000
# Largest stage, in layers, in which every additional cut is tried; in a larger one, only the middle.
_MAX_INSERTED = 6
# Relative excess of a moved candidate's lower bound over the fastest step, above which it is not simulated.
_POLISH_SLACK = 0.05


@dataclass(kw_only=True)
class BranchAndBound:
    """Search for the fastest candidate of a problem; its fields record the candidates that were tried and left out."""

    problem: Problem
    judged: list[Candidate] = field(default_factory=list)
    too_big: list[MemoryShortage] = field(default_factory=list)
    """Combinations that exceed the memory however their chains are cut."""
    bounded: list[tuple[float, CombinationGroup, int]] = field(default_factory=list)
    """Combinations that cannot be faster than the best: (lower bound in s, group, index in the group)."""
    unseen: int = 0
    """Number of combinations never split because the search ended early."""

    @cached_property
    def splitter(self) -> Splitter:
        """Splitter, which cuts the problem's chains into stages as evenly as the memory allows."""
        return Splitter(problem=self.problem)

    @cached_property
    def combos(self) -> Combinations:
        """Listing of the combinations of degrees and stage counts that the search considers."""
        return Combinations(problem=self.problem)

    @cached_property
    def groups(self) -> list[CombinationGroup]:
        """Groups of combinations, most promising first."""
        return self.combos.groups()

    @property
    def all_too_big(self) -> tuple[MemoryShortage, ...]:
        """Combinations that exceed the memory: first those found by splitting, then those excluded by bounds."""
        return (*self.too_big, *self.combos.tables.too_big.values())

    @property
    def everything(self) -> bool:
        """True if every combination was listed, so that the search is exhaustive."""
        return all(self.combos.listed)

    def run(self) -> None:
        """Search all combinations and append candidates to `judged`; candidates already there set the time to beat."""
        self._refine()
        if not self.judged and not self.everything:
            tight = self.first()
            self.judge([] if tight is None else [tight])
        if self.judged and not self.everything:
            self._neighbours()
        self._schedules()
        self._polish()

    def first(self) -> Candidate | None:
        """Return the first candidate found that fits the memory, or None.

        Settings, degrees and stage counts that need the least memory come first: most recomputation, most ranks, smallest
        microbatches. Chains are split into stages for at most `_MAX_VAIN` of these combinations.
        """
        order = [
            (-RECOMPUTES.index(group.setting.recompute), -int(group.ranks[index]), group.setting.samples, number, index)
            for number, group in enumerate(self.groups)
            for index in range(len(group))
        ]
        drafts = (self.draft(self.groups[number][index]) for *_, number, index in sorted(order)[:_MAX_VAIN])
        return next((candidate for candidate in drafts if candidate is not None), None)

    def best(self) -> Candidate | None:
        """Return the simplest simulated candidate whose step is about as short as the fastest; None if none was simulated."""
        limit_s = self.fastest_s * (1 + TOLERANCE / 2)
        close = (judged for judged in self.judged if judged.iteration_s <= limit_s)
        return min(close, key=_simplest, default=None)

    def fastest(self, number: int) -> list[Candidate]:
        """Return the simulated candidates with the shortest steps, at most `number`, in ascending order."""
        return sorted(self.judged, key=lambda judged: judged.iteration_s)[:number]

    @property
    def fastest_s(self) -> float:
        """Seconds of the shortest step of all simulated candidates (`judged`); infinite if there are none."""
        return min((judged.iteration_s for judged in self.judged), default=float("inf"))

    @property
    def lower_bound_s(self) -> float:
        """Lower bound in s of a step over all degrees and stage counts, all microbatches being mean; infinite if none exist."""
        bounds = [float(group.bound_s.min()) for group in self.groups]
        return min([*bounds, *self.combos.left_out], default=float("inf"))

    def judge(self, candidates: Sequence[Candidate], strategy: str = "auto") -> None:
        """Simulate candidates and append copies with the seconds of a step, and the strategy's name, to `judged`."""
        makespans_s = iter(expected_s([candidate for candidate in candidates if not candidate.shares_ranks]))
        for candidate in candidates:
            if candidate.shares_ranks:
                makespan_s = max(candidate.tail_s) + fmean(each.makespan_s for each in candidate.timelines())
            else:
                makespan_s = next(makespans_s)
            # Processes that share cores are never faster than all their work spread over the cores.
            devices = min(candidate.num_ranks, self.problem.cluster.num_devices)
            seconds = max(makespan_s, candidate.step_work_s / devices)
            self.judged.append(replace(candidate, iteration_s=seconds, strategy=strategy))

    def draft(self, combination: Combination) -> Candidate | None:
        """Return the candidate of a combination, its chains cut so that the slowest stage is as fast as possible.

        If a chain exceeds the memory, the result is None, and the shortage is recorded in `too_big`.
        """
        limit = self.problem.memory_bytes(combination.num_ranks)
        parts = self.splitter.parts(combination, limit)
        if not isinstance(parts, int):
            return assemble(self.problem, combination.chains, combination.setting, combination.degrees, parts)
        text = combination.text(many=self.problem.global_batch is not None)
        self.too_big.append(MemoryShortage(text=text, limit_bytes=limit))
        return None

    def _refine(self) -> None:
        """Split the chains of combinations into stages and simulate the resulting candidates, by ascending guess of a step.

        It stops when no other combination can be faster, or when many in a row brought no improvement.
        """
        order = self._order()
        seen = splits = improved_at = 0
        while True:
            limit_s = self.fastest_s * (1 - TOLERANCE / 2)
            batch: list[Candidate] = []
            taken = list(islice(order, _BATCH))
            seen += len(taken)
            for group, index in taken:
                if group.bound_s[index] >= limit_s:
                    self.bounded.append((float(group.bound_s[index]), group, index))
                    continue
                splits += 1
                candidate = self.draft(group[index])
                if candidate is None:
                    continue
                bound_s = max(lower_bound_s(candidate), float(group.bound_s[index]))
                if bound_s >= limit_s:
                    self.bounded.append((bound_s, group, index))
                    continue
                batch.append(candidate)
            before_s = self.fastest_s
            self.judge(batch)
            if self.fastest_s < before_s * (1 - TOLERANCE):
                improved_at = splits
            patience = _PATIENCE if self.judged else _MAX_VAIN
            if not taken or (not self.everything and splits - improved_at >= patience):
                self.unseen = sum(map(len, self.groups)) - seen
                return

    def _order(self) -> Iterator[tuple[CombinationGroup, int]]:
        if not self.groups:
            return
        guess_s = np.concatenate([group.guess_s for group in self.groups])
        ranks = np.concatenate([group.ranks for group in self.groups])
        owner = np.repeat(np.arange(len(self.groups)), [len(group) for group in self.groups])
        number = np.concatenate([np.arange(len(group)) for group in self.groups])
        for position in np.lexsort((ranks, guess_s)):
            yield self.groups[owner[position]], int(number[position])

    def _neighbours(self) -> None:
        """Simulate the fastest candidate with one stage more, less or moved to another chain; repeat while that is faster."""
        tried: set[Combination] = set()
        for _ in range(_MAX_ROUNDS):
            before_s = self.fastest_s
            (best,) = self.fastest(1)
            batch: list[Candidate] = []
            for counts in _near(best.counts):
                near = replace(best.combination, counts=counts)
                if near not in tried and self._own(best) and self._possible(near):
                    tried.add(near)
                    candidate = self.draft(near)
                    if candidate is not None and lower_bound_s(candidate) < before_s:
                        batch.append(candidate)
            self.judge(batch)
            if self.fastest_s >= before_s:
                return

    def _possible(self, combination: Combination) -> bool:
        fixed = self.problem.stages
        return combination.num_ranks <= self.problem.num_devices and all(
            1 <= count <= len(chain.layers) and fixed.get(chain.name, count) == count
            for chain, count in zip(combination.chains.chains, combination.counts, strict=True)
        )

    def _schedules(self) -> None:
        batch = [
            self.draft(replace(best.combination, setting=replace(best.setting, schedule=schedule)))
            for best in filter(self._own, self.fastest(FINALISTS))
            for schedule in self.problem.space.schedules
            if schedule != best.setting.schedule
        ]
        self.judge([candidate for candidate in batch if candidate is not None])

    def _polish(self) -> None:
        """Move, add or remove single cuts of the fastest candidates while steps get shorter: equal stages are not always best."""
        moving = list(filter(self._own, self.fastest(FINALISTS if self.everything else _POLISHED)))
        spent = 0
        while moving:
            batch = [(number, moved) for number, judged in enumerate(moving) for moved in self._moves(judged)]
            sizes = accumulate(moved.durations.size for _, moved in batch)
            kept = [each for each, size in zip(batch, sizes, strict=True) if spent + size <= _POLISH_SIZE]
            spent += sum(moved.durations.size for _, moved in kept)
            start = len(self.judged)
            self.judge([moved for _, moved in kept])
            better: dict[int, Candidate] = {}
            for (number, _), judged in zip(kept, self.judged[start:], strict=True):
                rival = better.get(number, moving[number])
                if judged.iteration_s < rival.iteration_s:
                    better[number] = judged
            moving = list(better.values())

    def _moves(self, candidate: Candidate) -> Iterator[Candidate]:
        parts = [
            [(stage.first, stage.last) for stage in candidate.stages if stage.chain == chain]
            for chain in range(len(candidate.degrees))
        ]
        for chain, ranges in enumerate(parts):
            fixed = candidate.chains.chains[chain].name in self.problem.stages
            for moved in other_cuts(ranges, same=fixed):
                every = [*parts[:chain], moved, *parts[chain + 1 :]]
                counts = tuple(map(len, every))
                if replace(candidate.combination, counts=counts).num_ranks <= self.problem.num_devices:
                    found = assemble(self.problem, candidate.chains, candidate.setting, candidate.degrees, every)
                    if found.fits and lower_bound_s(found) < self.fastest_s * (1 + _POLISH_SLACK):
                        yield found

    def _own(self, candidate: Candidate) -> bool:
        return not candidate.shares_ranks and any(candidate.chains is chains for chains in self.problem.sets)


def other_cuts(ranges: Ranges, *, same: bool = False) -> Iterator[list[tuple[int, int]]]:
    """Yield other ways to cut a chain, one change away from the given stages, each as (first, end) layer of each stage.

    One boundary between stages, or all, is shifted by a layer; unless `same` keeps the number of stages, one is also removed or
    added: [(0, 2), (2, 4)] -> [(0, 1), (1, 4)], [(0, 3), (3, 4)], [(0, 4)], [(0, 1), (1, 2), (2, 4)], ...
    """
    cuts = [last for _, last in ranges[:-1]]
    end = ranges[-1][1]
    changed = [[*cuts[:i], cut + step, *cuts[i + 1 :]] for i, cut in enumerate(cuts) for step in (-1, 1)]
    if len(cuts) > 1:
        changed += [[cut + step for cut in cuts] for step in (-1, 1)]
    if not same:
        changed += [[*cuts[:i], *cuts[i + 1 :]] for i in range(len(cuts))]
        for first, last in ranges:
            places = range(first + 1, last) if last - first <= _MAX_INSERTED else [(first + last) // 2]
            changed += [sorted((*cuts, place)) for place in places]
    for each in changed:
        bounds = [0, *each, end]
        if all(before < after for before, after in pairwise(bounds)):
            yield list(pairwise(bounds))


def _simplest(candidate: Candidate) -> tuple[int, int, int, int, float]:
    return (
        candidate.num_ranks,
        len(candidate.stages),
        SCHEDULES.index(candidate.setting.schedule),
        RECOMPUTES.index(candidate.setting.recompute),
        candidate.iteration_s,
    )


def _near(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for chain in range(len(counts)):
        for step in (-1, 1):
            yield tuple(count + step * (index == chain) for index, count in enumerate(counts))
    for more in range(len(counts)):
        for less in range(len(counts)):
            if more != less:
                yield tuple(count + (index == more) - (index == less) for index, count in enumerate(counts))
