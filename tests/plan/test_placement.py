"""Stages of a context-parallel chain become one shard a rank, and what they exchange is priced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.plan.placement import Placement, shard_names
from mmcompile.plan.plan import Link, Plan
from mmcompile.plan.search.search import search
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


def test_a_whole_plan_keeps_its_names() -> None:
    plan = found(1, vision=1, language_model=2)
    assert [stage.name for stage in Placement.of(plan).stages] == [stage.name for stage in plan.stages]


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
