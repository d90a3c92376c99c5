"""Replicas that are decided: kept exactly, one number in a tower, refused in words where they cannot be."""

from __future__ import annotations

import pytest
from support.plans.every_candidate import every_candidate
from support.plans.problem import problem_of
from support.plans.search_plan import search
from support.plans.toy_plan import FINGERPRINT, cost, toy_graph, vision_language

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.search import combinations
from mmcompile.planner.search.bounds import expected_s
from mmcompile.planner.search.branch_and_bound import TOLERANCE, BranchAndBound
from mmcompile.planner.search.problem import balance_groups_of, decided_replicas
from mmcompile.planner.search.settings import SearchSpace
from mmcompile.planner.strategies.search import searched

WIDE = Cluster.parse("2x8xH100")


def planned(replicas: dict[str, int], cluster: Cluster = WIDE, **options: object) -> Plan:
    wanted = options if "global_batch" in options else {"num_microbatches": 4, **options}
    return search(
        *vision_language(),
        cluster,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        replicas=replicas,
        **wanted,  # type: ignore[arg-type]
    )


def counts(plan: Plan) -> dict[str, int]:
    return {chain.name: chain.dp for chain in plan.chains}


@pytest.mark.parametrize(
    ("replicas", "projector", "expected"),
    [
        ({"language_model": 2}, "with_encoder", {"vision": 2, "language_model": 2}),
        ({"language_model": 2, "vision": 3}, "with_encoder", {"vision": 3, "language_model": 2}),
        ({"language_model": 2, "projector": 3}, "with_encoder", {"vision": 3, "language_model": 2}),
        ({"vision": 3}, "alone", {"vision": 3, "projector": 3, "language_model": 1}),
        ({"projector": 2}, "with_language_model", {"vision": 2, "language_model": 2}),
    ],
)
def test_each_microbatch_is_like_the_captured_one_and_replicas_are_kept(
    replicas: dict[str, int], projector: str, expected: dict[str, int]
) -> None:
    plan = planned(replicas, projector=projector, stages={"language_model": 2})
    assert counts(plan) == expected
    assert (plan.num_microbatches, plan.schedule, plan.recompute, plan.microbatch_samples) == (4, "1f1b", "none", 0.0)
    assert all(chain.tp == chain.cp == 1 and not chain.fsdp for chain in plan.chains)
    used = [rank for stage in plan.stages for rank in stage.ranks]
    assert sorted(used) == list(range(plan.num_ranks))
    assert all(len(stage.ranks) == chain.dp for chain in plan.chains for stage in chain.stages)


def test_ranks_go_replica_by_replica() -> None:
    plan = planned({"language_model": 2, "vision": 3}, stages={"language_model": 2}, projector="with_encoder")
    assert [stage.ranks for stage in plan.stages] == [(0, 1, 2), (3, 5), (4, 6)]


def test_replicas_of_shards() -> None:
    plan = planned({"language_model": 2}, shards=2, projector="with_encoder", stages={"language_model": 1})
    assert plan.chains[-1].cp == 2
    assert plan.stages[-1].ranks == (2, 3, 4, 5)


def test_a_replica_of_an_encoder_works_on_its_part_of_a_slot() -> None:
    """Costs known at one load only hold for any; with twice the replicas, a message brings half."""
    one, two = (
        planned({"vision": number}, projector="with_encoder", stages={"language_model": 1}) for number in (1, 2)
    )
    assert one.predicted.iteration_s == pytest.approx(two.predicted.iteration_s, rel=0.01)


def test_processes_of_this_machine_may_be_more_than_its_cores() -> None:
    plan = planned({"language_model": 40}, Cluster.local(), projector="with_encoder")
    assert counts(plan) == {"vision": 40, "language_model": 40} and plan.num_ranks >= 80


@pytest.mark.parametrize(
    ("replicas", "options", "message"),
    [
        (
            {"lm": 2},
            {},
            "no chain 'lm' to give 2 replicas; chains and components are vision, projector, language_model",
        ),
        ({"vision": 0}, {}, "vision cannot have 0 replicas; give 1 or more"),
        (
            {"vision": 2, "projector": 3},
            {"projector": "alone"},
            "no placement gives vision 2, projector 3 replicas: chains that lead from one encoder",
        ),
        (
            {"language_model": 9},
            {},
            "replicas language_model 9\\) need 18 devices, got 16 of 2x8xH100; ask for fewer stages or replicas or a larger",
        ),
        (
            {"language_model": 5},
            {"global_batch": 12},
            r"global_batch is 12; none of \(5,\) replicas gets whole samples",
        ),
    ],
)
def test_what_cannot_be_is_refused(replicas: dict[str, int], options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(replicas, WIDE, **options)


@pytest.mark.parametrize("replicas", [{"language_model": 2, "vision": 4}, {"vision": 3}, {"language_model": 3}])
def test_the_rest_is_searched_with_a_global_batch(replicas: dict[str, int]) -> None:
    plan = planned(replicas, global_batch=12, space=SearchSpace.everything(WIDE))
    assert {name: counts(plan)[name] for name in replicas} == replicas
    assert plan.global_batch == 12


def test_a_strategy_that_decides_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy entrain decides replicas itself, and found none with vision 3"):
        planned({"vision": 3}, global_batch=12, space=SearchSpace.everything(WIDE), strategy="entrain")


def test_towers() -> None:
    graph, costs = vision_language()
    problem = problem_of(graph, costs, WIDE, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=2)
    found = {chains.placement: balance_groups_of(chains) for chains in problem.sets}
    assert found == {"with_encoder": ((0,), (1,)), "alone": ((0, 1), (2,)), "with_language_model": ((0,), (1,))}
    alone = next(chains for chains in problem.sets if chains.placement == "alone")
    assert decided_replicas(alone, {"projector": 3}, follow=False) == (3, 3, None)
    assert decided_replicas(alone, {"projector": 3}, follow=True) == (3, 3, 1)
    assert decided_replicas(alone, {"projector": 3, "vision": 2}, follow=True) is None


@pytest.mark.parametrize("listed", [True, False])
def test_chains_of_a_tower_have_equally_many(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the space that keeps to that is faster, where all is listed."""
    kinds = {
        "vision": (ComponentKind.ENCODER, 2),
        "projector": (ComponentKind.PROJECTOR, 1),
        "language_model": (ComponentKind.LANGUAGE_MODEL, 2),
    }
    graph = toy_graph(kinds, [("vision", "projector"), ("projector", "language_model")])
    costs = {"vision": (cost(300), cost(200)), "projector": (cost(20),), "language_model": (cost(100),) * 2}
    if not listed:
        monkeypatch.setattr(combinations, "MAX_LISTED", 0)
    problem = problem_of(
        graph,
        costs,
        Cluster.parse("1x7xH100"),
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=4,
        projector="alone",
        space=SearchSpace(dp=None, microbatches=(2,)),
    )
    engine, best = searched(problem)
    assert best is not None
    chosen = [group[index].degrees for group in engine.groups for index in range(len(group))]
    assert len({own[0].dp for own in chosen}) > 1
    assert all(own[0].dp == own[1].dp for own in chosen)
    assert best.degrees[0].dp == best.degrees[1].dp
    if listed:
        keeping = [
            candidate
            for candidate in every_candidate(problem, BranchAndBound(problem=problem))
            if candidate.degrees[0].dp == candidate.degrees[1].dp
        ]
        assert best.iteration_s <= min(expected_s(keeping)) * (1 + TOLERANCE)
