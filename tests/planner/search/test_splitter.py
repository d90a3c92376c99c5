"""`Splitter` against all cuts: it takes what fits by the count of whole candidates, and nothing else."""

from __future__ import annotations

from itertools import combinations

import pytest
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.search.candidate import Ranges, assemble
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, SearchSpace, Setting
from mmcompile.planner.search.splitter import Splitter

DEGREES = Degrees(dp=4, fsdp=True)
SETTING = Setting(num_microbatches=2, samples=1, dp=4)


@pytest.fixture(scope="module")
def problem() -> Problem:
    """All components in one line: six small layers before four large ones, so that gathered parameters are of unequal size."""
    graph = toy_graph(
        {"vision": (ComponentKind.ENCODER, 6), "language_model": (ComponentKind.LANGUAGE_MODEL, 4)},
        [("vision", "language_model")],
    )
    costs = {
        "vision": (cost(100, parameter_bytes=10**6),) * 6,
        "language_model": (cost(200, parameter_bytes=10**9),) * 4,
    }
    return problem_of(
        graph,
        costs,
        Cluster.parse("1x8xH100"),
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        space=SearchSpace(dp=(4,), placements=("colocated",), microbatches=(2,)),
        global_batch=8,
    )


def needs(problem: Problem, ranges: Ranges) -> int:
    (chains,) = problem.sets
    return max(assemble(problem, chains, SETTING, [DEGREES], [ranges]).rank_bytes)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_line_of_sharded_replicas_fits_what_its_stages_hold(problem: Problem, count: int) -> None:
    (chains,) = problem.sets
    (chain,) = chains.chains
    assert len(chain.layers) == 10
    cuts = [(0, *cut, 10) for cut in combinations(range(1, 10), count - 1)]
    least = min(needs(problem, tuple(zip(cut, cut[1:], strict=False))) for cut in cuts)
    splitter = Splitter(problem=problem)
    combination = Combination(chains=chains, setting=SETTING, degrees=(DEGREES,), counts=(count,))
    parts = splitter.parts(combination, least)
    assert not isinstance(parts, int)
    assert needs(problem, parts[0]) == least
    assert splitter.parts(combination, least - 1) == 0
