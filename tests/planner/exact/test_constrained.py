"""Constraints on what the search finds: met by every candidate kept, priced by the simulator, refused in words."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.exact.constrained import constrained, exact_problem, splits_of
from mmcompile.planner.exact.split_problem import broken, slowest_ps, stage_bytes, tails
from mmcompile.planner.plan.constraints import parse_constraint
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.outcome import plan_of
from mmcompile.planner.search.partition import PER_SECOND
from mmcompile.planner.search.settings import SearchSpace
from mmcompile.planner.strategies.search import searched

GRAPH = toy_graph(
    {
        "vision": (ComponentKind.ENCODER, 6),
        "projector": (ComponentKind.PROJECTOR, 1),
        "language_model": (ComponentKind.LANGUAGE_MODEL, 12),
    },
    [("vision", "projector"), ("projector", "language_model")],
)
COSTS = {
    "vision": (frozen(300),) * 6,
    "projector": (cost(5, passes=False),),
    "language_model": (cost(200, parameter_bytes=10**9, activation_bytes=10**9),) * 12,
}
SPACE = SearchSpace(schedules=("1f1b", "gpipe"), recomputes=("none",))


def search(num_devices: int = 8, space: SearchSpace = SPACE) -> BranchAndBound:
    cluster = Cluster.parse(f"{num_devices}xA100-80G")
    made = problem_of(
        GRAPH, COSTS, cluster, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=16, space=space
    )
    engine, best = searched(made)
    assert best is not None
    return engine


class Found(NamedTuple):
    best: Candidate
    notes: tuple[str, ...]


def under(*texts: str, engine: BranchAndBound | None = None) -> Found:
    return Found(*constrained(engine or search(), [parse_constraint(text) for text in texts]))


def stage_of(candidate: Candidate, name: str) -> str:
    """The stage that holds a layer."""
    (found,) = [s.name for chain in candidate.to_chains() for s in chain.stages if name in s.layer_names]
    return found


def test_the_exact_problem_of_a_candidate_costs_what_the_candidate_costs() -> None:
    for judged in search().judged[:10]:
        candidate = judged
        own = exact_problem(candidate)
        splits = splits_of(candidate)
        assert broken(own, splits) == ()
        assert [n for row in stage_bytes(own, splits) for n in row] == [stage.total_bytes for stage in candidate.stages]
        first = [next(s for s in reversed(candidate.stages) if s.chain == index) for index in range(len(own.chains))]
        assert tails(own, splits) == [stage.depth for stage in first]
        assert slowest_ps(own, splits) / PER_SECOND >= max(stage.total_s for stage in candidate.stages) * (1 - 1e-9)


def test_layers_that_are_wanted_together_or_apart_are() -> None:
    found = under("together:language_model.2,language_model.5", "apart:language_model.6,language_model.7")
    candidate = found.best
    assert stage_of(candidate, "language_model.layers.2") == stage_of(candidate, "language_model.layers.5")
    assert stage_of(candidate, "language_model.layers.6") != stage_of(candidate, "language_model.layers.7")
    assert "(proved by Z3 in " in found.notes[-1]


def test_the_price_and_the_certificate_are_noted() -> None:
    engine = search()
    fastest_s = engine.fastest_s
    found = under("together:language_model.0,language_model.7", engine=engine)
    assert found.best.iteration_s > fastest_s
    assert found.notes[0] == "constraint: language_model.0 and language_model.7 share a stage"
    assert found.notes[1].startswith("the constraints cost ")
    assert found.notes[2].startswith("cuts, with these stage counts: no split is better") and "by Z3" in found.notes[2]


def test_what_the_search_found_is_kept_if_it_meets_the_constraints() -> None:
    engine = search()
    best = engine.best()
    assert best is not None
    held = max(best.rank_bytes)
    found = under(f"memory:{held + 1}B", engine=engine)
    assert found.best.counts == best.counts
    assert found.best.iteration_s == best.iteration_s
    assert not any(note.startswith("the constraints cost") for note in found.notes)


def test_without_constraints_there_is_a_certificate() -> None:
    engine = search()
    best = engine.best()
    assert best is not None
    found = under(engine=engine)
    assert (found.best.counts, found.best.iteration_s) == (best.counts, best.iteration_s)
    assert len(found.notes) == 1 and "no split is better" in found.notes[0]


def test_only_what_meets_the_constraints_is_left_in_the_engine() -> None:
    engine = search()
    found = under("together:language_model.0,language_model.4", engine=engine)
    assert found.best in engine.judged
    for judged in engine.judged:
        problem = exact_problem(judged, [parse_constraint("together:language_model.0,language_model.4")])
        assert broken(problem, splits_of(judged)) == ()
    assert plan_of(engine, found.best).predicted.iteration_s == found.best.iteration_s


def test_memory_of_every_stage() -> None:
    found = under("memory:40GB")
    assert max(found.best.rank_bytes) <= 40 * 10**9


def test_a_rank() -> None:
    found = under("on:language_model.-1=rank7")
    last = found.best.stages[-1]
    assert 7 in last.ranks and last.last == 12


def test_stage_counts_change_where_they_must() -> None:
    found = under("stages:language_model=2")
    counts = dict(zip((chain.name for chain in found.best.chains.chains), found.best.counts, strict=True))
    assert counts["language_model"] == 2
    assert found.best.num_ranks <= 8


def test_a_tied_head_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        under("together:language_model.0,language_model.-1", "memory:30GiB")
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "no plan: 'memory <= 30 GiB' conflicts with 'language_model.0 and language_model.-1 share a stage'"
    )
    assert any(line.startswith("  without 'language_model.0 and language_model.-1 share a stage'") for line in lines)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="'vision has 9 stages' cannot be met: vision has [67] layers"):
        under("stages:vision=9")


def test_a_name_that_no_candidate_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="'decoder.1' names no layer or component"):
        under("on:decoder.1=0")


def test_a_name_that_some_chains_have_chooses_them() -> None:
    # A projector with its encoder has no chain of its own.
    found = under("stages:projector=1")
    assert "projector" in [chain.name for chain in found.best.chains.chains]


def test_equal_tp() -> None:
    space = SearchSpace(tp=(1, 2), schedules=("1f1b",))
    found = under("equal-tp", engine=search(space=space))
    assert len({degrees.tp for degrees in found.best.degrees}) == 1
    assert all(
        before.last == after.first for before, after in pairwise(found.best.stages) if before.chain == after.chain
    )
