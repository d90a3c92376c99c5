"""Stages become one placed stage for each replica, one for each shard of its tokens; what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.hand_plan import Part, hand_plan
from support.plans.search_plan import search
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.plan.placement import Placement, check_runnable, lockstep_of, replica_name, shard_names
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Link
from mmcompile.report.predict import predict

GRAPH = toy_graph(
    {"vision": (ComponentKind.ENCODER, 2), "language_model": (ComponentKind.LANGUAGE_MODEL, 4)},
    [("vision", "language_model")],
)
COSTS = {"vision": (frozen(1.0),) * 2, "language_model": (cost(2.0),) * 4}


def found(shards: int, cluster: str = "1x8xH100", **stages: int) -> Plan:
    return search(
        GRAPH,
        COSTS,
        Cluster.parse(cluster),
        num_microbatches=4,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        stages=stages,
        shards=shards,
    )


def test_every_stage_of_the_last_chain_has_as_many_ranks_as_shards() -> None:
    plan = found(3, vision=1, language_model=2)
    assert [stage.ranks for stage in plan.stages] == [(0,), (1, 2, 3), (4, 5, 6)]
    assert [chain.cp for chain in plan.chains] == [1, 3]
    assert plan.context_parallel == 3
    assert plan.num_ranks == 7


def test_shards_share_the_devices_there_are() -> None:
    plan = found(4)
    assert plan.num_ranks <= 8
    assert {len(stage.ranks) for stage in plan.chains[-1].stages} == {4}
    with pytest.raises(PlanError, match="at least one for every other chain, 4 ranks for each of language_model"):
        found(4, "1x4xH100", language_model=1)


def test_placement_names_shards_and_their_group() -> None:
    plan = found(2, vision=1, language_model=1)
    assert shard_names(plan.stages[-1]) == ("language_model.0@0", "language_model.0@1")
    placed = Placement.of(plan).stages
    assert [(stage.name, stage.ranks, stage.group) for stage in placed] == [
        ("vision.0", (0,), ()),
        ("language_model.0@0", (1,), (1, 2)),
        ("language_model.0@1", (2,), (1, 2)),
    ]


def test_ranks_that_share_tensors_follow_each_other_in_each_part_of_the_tokens() -> None:
    plan = replicated(1, 2)
    vision, language = plan.chains
    stages = tuple(
        replace(stage, ranks=tuple(range(10 + 8 * i, 18 + 8 * i))) for i, stage in enumerate(language.stages)
    )
    shared = replace(language, tp=2, cp=2, fsdp=True, stages=stages)
    placed = [
        stage
        for stage in Placement.of(replace(plan, chains=(vision, shared))).stages
        if stage.program_name.startswith("language_model.0")
    ]
    assert [(s.name, s.ranks[0], s.tensor_group, s.token_group, s.sharing) for s in placed] == [
        ("language_model.0#0@0", 10, (10, 11), (10, 12), (10, 14)),
        ("language_model.0#0@1", 11, (10, 11), (11, 13), (11, 15)),
        ("language_model.0#0@2", 12, (12, 13), (10, 12), (12, 16)),
        ("language_model.0#0@3", 13, (12, 13), (11, 13), (13, 17)),
        ("language_model.0#1@0", 14, (14, 15), (14, 16), (10, 14)),
        ("language_model.0#1@1", 15, (14, 15), (15, 17), (11, 15)),
        ("language_model.0#1@2", 16, (16, 17), (14, 16), (12, 16)),
        ("language_model.0#1@3", 17, (16, 17), (15, 17), (13, 17)),
    ]
    # The second rank of each pair has the loss and the gradients of the first one.
    assert [s.repeats for s in placed] == [False, True] * 4
    assert [s.same_values for s in placed] == [f"language_model.0@{part}" for part in (0, 0, 1, 1) * 2]
    assert len(lockstep_of(placed)) == 1


def test_a_whole_plan_keeps_its_names() -> None:
    plan = found(1, vision=1, language_model=2)
    assert [stage.name for stage in Placement.of(plan).stages] == [stage.name for stage in plan.stages]


def replicated(vision: int, language: int) -> Plan:
    return hand_plan(
        [
            Part(name="vision", layers=2, stages=1, dp=vision),
            Part(name="language_model", layers=4, stages=2, dp=language),
        ]
    )


def test_every_replica_is_placed_and_named() -> None:
    placement = Placement.of(replicated(3, 2))
    assert (placement.towers, placement.num_replicas) == (("vision", "language_model"), (3, 2))
    assert [(s.name, s.ranks, s.program_name, s.tower, s.replica, s.depth) for s in placement.stages] == [
        ("vision.0#0", (0,), "vision.0", "vision", 0, 2),
        ("vision.0#1", (1,), "vision.0", "vision", 1, 2),
        ("vision.0#2", (2,), "vision.0", "vision", 2, 2),
        ("language_model.0#0", (3,), "language_model.0", "language_model", 0, 1),
        ("language_model.0#1", (4,), "language_model.0", "language_model", 1, 1),
        ("language_model.1#0", (5,), "language_model.1", "language_model", 0, 0),
        ("language_model.1#1", (6,), "language_model.1", "language_model", 1, 0),
    ]


def test_one_replica_of_one_tower_keeps_its_name() -> None:
    placement = Placement.of(replicated(2, 1))
    assert [s.name for s in placement.stages] == ["vision.0#0", "vision.0#1", "language_model.0", "language_model.1"]
    assert placement.num_replicas == (2, 1)


def test_each_replica_shares_its_tokens_in_a_group_of_its_own() -> None:
    plan = replicated(1, 4)
    language = replace(plan.chains[1], dp=2, cp=2)
    placed = Placement.of(replace(plan, chains=(plan.chains[0], language))).stages
    assert shard_names(language.stages[0], 2) == ("language_model.0@0", "language_model.0@1")
    assert replica_name("language_model.0@1", 1) == "language_model.0#1@1"
    assert [(s.name, s.ranks, s.program_name, s.replica, s.group) for s in placed[1:5]] == [
        ("language_model.0#0@0", (1,), "language_model.0@0", 0, (1, 2)),
        ("language_model.0#0@1", (2,), "language_model.0@1", 0, (1, 2)),
        ("language_model.0#1@0", (3,), "language_model.0@0", 1, (3, 4)),
        ("language_model.0#1@1", (4,), "language_model.0@1", 1, (3, 4)),
    ]


def test_what_cannot_run_is_named_with_what_to_plan_instead() -> None:
    plan = replicated(2, 2)
    check_runnable(plan)
    vision, language = plan.chains
    refused = replace(
        plan,
        chains=(replace(vision, cp=2, dp=1), replace(language, tp=2, dp=1, fsdp=True)),
        schedule="zb-h1",
    )
    with pytest.raises(PlanError) as error:
        check_runnable(refused)
    for part in (
        "replicas of language_model share its parameters (fsdp), and there is one",
        "add gradients up in the backward, where schedule zb-h1 computes none of weights",
        "vision has context parallel degree 2",
        "Choose other degrees, another schedule, or no fsdp",
    ):
        assert part in str(error.value)
    projector = replace(vision, name="projector", dp=1, stages=(replace(vision.stages[0], name="projector.0"),))
    link = Link(source="vision.0", target="projector.0", tensors=(), gradient=(), num_bytes=0)
    with pytest.raises(PlanError, match="vision has 2, projector has 1"):
        check_runnable(replace(plan, chains=(vision, projector, language), links=(*plan.links, link)))


def test_replicas_that_share_parameters_go_in_lockstep() -> None:
    plan = replicated(2, 2)
    vision, language = plan.chains
    assert not any(stage.sharing for stage in Placement.of(plan).stages)
    placed = Placement.of(replace(plan, chains=(vision, replace(language, fsdp=True)))).stages
    first = language.stages[0]
    own = [index for index, stage in enumerate(placed) if stage.program_name == first.name]
    assert [(placed[i].ranks, placed[i].sharing, placed[i].replica) for i in own] == [
        ((first.ranks[0],), first.ranks, 0),
        ((first.ranks[1],), first.ranks, 1),
    ]
    assert own in lockstep_of(placed)
    assert len(lockstep_of(placed)) == len(language.stages)


def test_ranks_share_parameters_with_one_group() -> None:
    plan = replicated(2, 2)
    vision, language = plan.chains
    first, *others = language.stages

    def with_ranks(*ranks: int) -> Plan:
        moved = replace(language, fsdp=True, stages=(replace(first, ranks=ranks), *others))
        return replace(plan, chains=(replace(vision, fsdp=True), moved))

    check_runnable(with_ranks(*vision.stages[0].ranks))
    with pytest.raises(
        PlanError, match=r"rank 0 shares parameters of vision.0 with ranks \[0, 1\], of language_model.0 with"
    ):
        check_runnable(with_ranks(0, 9))
    with pytest.raises(PlanError, match=r"share its parameters \(fsdp\), and several of them are on one rank"):
        check_runnable(with_ranks(9, 9))


def test_predictions_show_every_shard() -> None:
    plan = found(2, vision=1, language_model=2)
    ends = (("vision.0", "language_model.0"), ("language_model.0", "language_model.1"))
    links = tuple(Link(source=a, target=b, tensors=(), gradient=(), num_bytes=10**6) for a, b in ends)
    timeline = predict(replace(plan, links=links))
    names = {event.stage for event in timeline.events}
    assert names == {"vision.0", *(f"language_model.{stage}@{shard}" for stage in (0, 1) for shard in (0, 1))}
    ends_s = [
        [event.end_s for event in timeline.events if event.stage == f"language_model.1@{shard}"] for shard in (0, 1)
    ]
    assert ends_s[0] == ends_s[1]
