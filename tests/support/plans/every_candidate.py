"""Every candidate of a small space: what a search is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting


def compositions(length: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut so many layers."""
    for count in range(length):
        for cuts in combinations(range(1, length), count):
            yield list(pairwise((0, *cuts, length)))


def every_candidate(problem: Problem, engine: BranchAndBound) -> Iterator[Candidate]:
    for chains in problem.sets:
        for first in engine.combos.settings:
            for schedule in problem.space.schedules:
                setting = replace(first, schedule=schedule)
                last = len(chains.chains) - 1
                degrees = [
                    engine.combos.degrees(chain, setting, last=index == last)
                    for index, chain in enumerate(chains.chains)
                ]
                yield from every_cut(problem, chains, setting, list(product(*degrees)))


def every_cut(
    problem: Problem, chains: ChainSet, setting: Setting, choices: list[tuple[Degrees, ...]]
) -> Iterator[Candidate]:
    for degrees in choices:
        for parts in product(*(list(compositions(len(chain.layers))) for chain in chains.chains)):
            ranks = sum(own.ranks * len(ranges) for own, ranges in zip(degrees, parts, strict=True))
            if ranks <= problem.num_devices:
                yield assemble(problem, chains, setting, degrees, parts)
