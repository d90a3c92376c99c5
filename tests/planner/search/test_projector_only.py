"""Freezing all but the projectors of a captured model, as if it had been captured so."""

from __future__ import annotations

import pytest
from support.paths import CONFIGS
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT

from mmcompile.api import capture, freeze
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.meta_model import skeleton
from mmcompile.passes.cost.cost import Cost
from mmcompile.planner.search.infeasible import projector_only, trains_more
from mmcompile.planner.search.problem import Problem

CONFIG = CONFIGS / "llava-tiny.json"


def problem(*train: str) -> Problem:
    """A tiny LLaVA that trains what is named."""
    model = skeleton(CONFIG)
    freeze(model, train)
    graph = capture(model)
    return problem_of(
        graph,
        Cost().run(graph),
        Cluster.parse("4xA40"),
        dtype="float32",
        fingerprint=FINGERPRINT,
        num_microbatches=4,
    )


@pytest.fixture(scope="module")
def everything() -> Problem:
    return problem("all")


def lines(problem: Problem) -> list[tuple[object, ...]]:
    """How the components are lined up."""
    return [
        (chains.placement, chains.edges, [(chain.name, chain.components, chain.layers) for chain in chains.chains])
        for chains in problem.sets
    ]


def test_costs_are_those_of_a_model_captured_with_only_the_projector_trained(everything: Problem) -> None:
    wanted, found = problem("projector"), projector_only(everything)
    assert found.pricing.table.layers == wanted.pricing.table.layers
    assert lines(found) == lines(wanted)


def test_the_graph_is_left_as_it_was(everything: Problem) -> None:
    before = dict(everything.pricing.table.layers)
    projector_only(everything)
    assert Cost().run(everything.graph).layers == before


def test_there_is_nothing_to_freeze_where_only_the_projector_trains(everything: Problem) -> None:
    assert trains_more(everything)
    assert not trains_more(projector_only(everything))
