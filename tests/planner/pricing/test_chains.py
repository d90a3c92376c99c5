"""Lining up components: where projectors go, which chain feeds which, in what order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.plans.toy_plan import cost, frozen, toy_graph, vision_language

from mmcompile.costmodel.compute import LayerCost
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.planner.pricing.chains import ChainEdge, chain_sets

ENCODER, PROJECTOR, LANGUAGE_MODEL = ComponentKind.ENCODER, ComponentKind.PROJECTOR, ComponentKind.LANGUAGE_MODEL


def lined_up(
    graph: ModelGraph, costs: Mapping[str, Sequence[LayerCost]], **options: Any
) -> dict[str | None, list[tuple[str, tuple[str, ...]]]]:
    sets = chain_sets(graph, costs, **options)
    return {each.placement: [(chain.name, chain.components) for chain in each.chains] for each in sets}


def test_a_projector_joins_its_encoder_stays_alone_or_joins_the_language_model() -> None:
    assert lined_up(*vision_language()) == {
        "with_encoder": [("vision", ("vision", "projector")), ("language_model", ("language_model",))],
        "alone": [
            ("vision", ("vision",)),
            ("projector", ("projector",)),
            ("language_model", ("language_model",)),
        ],
        "with_language_model": [("vision", ("vision",)), ("language_model", ("projector", "language_model"))],
    }


def test_edges_are_between_layers_of_chains() -> None:
    graph, costs = vision_language(encoder=6, language=8)
    (joined,) = chain_sets(graph, costs, projector="with_encoder")
    assert joined.edges == (
        ChainEdge(source=0, source_layer=5, target=0, target_layer=6),
        ChainEdge(source=0, source_layer=6, target=1, target_layer=0),
    )
    entries = {("projector", "language_model"): 3}
    (late,) = chain_sets(graph, costs, projector="with_language_model", entries=entries)
    assert late.edges[1] == ChainEdge(source=1, source_layer=0, target=1, target_layer=4)


def test_two_projectors_join_the_language_model_in_order() -> None:
    graph = toy_graph(
        {
            "audio": (ENCODER, 2),
            "vision": (ENCODER, 2),
            "vision_projector": (PROJECTOR, 1),
            "audio_projector": (PROJECTOR, 1),
            "language_model": (LANGUAGE_MODEL, 2),
        },
        [
            ("vision", "vision_projector"),
            ("audio", "audio_projector"),
            ("vision_projector", "language_model"),
            ("audio_projector", "language_model"),
        ],
    )
    costs = {component.name: (cost(1),) * len(component.layers) for component in graph.components}
    assert lined_up(graph, costs, projector="with_language_model")["with_language_model"] == [
        ("audio", ("audio",)),
        ("vision", ("vision",)),
        ("language_model", ("vision_projector", "audio_projector", "language_model")),
    ]


def test_a_projector_of_two_encoders_cannot_join_either() -> None:
    graph = toy_graph(
        {
            "vision": (ENCODER, 2),
            "audio": (ENCODER, 2),
            "fusion": (PROJECTOR, 1),
            "language_model": (LANGUAGE_MODEL, 2),
        },
        [("vision", "fusion"), ("audio", "fusion"), ("fusion", "language_model")],
    )
    costs = {component.name: (cost(1),) * len(component.layers) for component in graph.components}
    found = lined_up(graph, costs)
    # with_encoder comes out as "alone", once.
    assert list(found) == ["with_encoder", "with_language_model"]
    assert [name for name, _ in found["with_encoder"]] == ["vision", "audio", "fusion", "language_model"]


def test_text_only_is_one_chain_and_a_projector_placement_has_no_effect() -> None:
    graph = toy_graph({"language_model": (LANGUAGE_MODEL, 3)}, [])
    costs = {"language_model": (cost(1),) * 3}
    assert lined_up(graph, costs) == {None: [("language_model", ("language_model",))]}
    with pytest.raises(ConfigError, match="projector='alone' has no effect: Toy has no projector"):
        lined_up(graph, costs, projector="alone")


def test_costs_must_match_the_layers() -> None:
    graph, costs = vision_language(encoder=6)
    with pytest.raises(PlanError, match="component vision has 6 layers and 2 costs"):
        lined_up(graph, {**costs, "vision": (frozen(1),) * 2})


def test_an_unknown_placement_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="projector 'left' is not one of with_encoder, alone, with_language_model"):
        lined_up(*vision_language(), projector="left")
