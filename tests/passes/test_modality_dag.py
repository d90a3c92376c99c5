"""`ModalityDag` on the small model and on component DAGs drawn by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest
from support.graphs.hand_graph import small_graph

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import Component, ComponentKind, ModelGraph
from mmcompile.passes.modality_dag import ModalityDag


def with_edges(graph: ModelGraph, names: str, edges: list[tuple[str, str]]) -> ModelGraph:
    components = tuple(
        Component(name=name, kind=ComponentKind.ENCODER, sources=(), modules=(), layers=()) for name in names
    )
    return replace(graph, components=components, edges=tuple((a, b, (f"{a}{b}",)) for a, b in edges))


def test_report_as_text() -> None:
    assert str(ModalityDag().run(small_graph())) == (
        "vision [encoder] depth 2\n"
        "audio [encoder] depth 1\n"
        "projector [projector] depth 1\n"
        "language_model [language_model] depth 0\n"
        "audio -> language_model: transpose_9\n"
        "vision -> projector: add_3\n"
        "projector -> language_model: linear_8\n"
        "independent: audio, vision\n"
        "independent: audio, projector\n"
        "branch: audio\n"
        "branch: vision -> projector\n"
        "branch: language_model\n"
        "join: language_model"
    )


def test_an_edge_into_the_middle_ends_a_branch() -> None:
    # a feeds c directly and through b, as an encoder with deep features does.
    report = ModalityDag().run(with_edges(small_graph(), "abc", [("a", "b"), ("b", "c"), ("a", "c")]))
    assert dict(report.depth) == {"a": 2, "b": 1, "c": 0}
    assert report.branches == (("a",), ("b",), ("c",))
    assert report.joins == ("c",)
    assert report.independent == (("a",), ("b",), ("c",))


def test_independence_and_depth_match_their_definitions_on_random_dags() -> None:
    graph = small_graph()
    names = "abcdef"
    rng = random.Random(0)
    for _ in range(50):
        edges = [pair for pair in itertools.combinations(names, 2) if rng.random() < 0.35]
        report = ModalityDag().run(with_edges(graph, names, edges))
        dag = nx.DiGraph(edges)
        dag.add_nodes_from(names)
        together = {pair for group in report.independent for pair in itertools.combinations(sorted(group), 2)}
        for pair in itertools.combinations(names, 2):
            reaches = nx.has_path(dag, *pair) or nx.has_path(dag, *reversed(pair))
            assert (pair in together) == (not reaches)
        for name in names:
            paths = [path for end in names for path in nx.all_simple_paths(dag, name, end)]
            assert report.depth[name] == max((len(path) - 1 for path in paths), default=0)
        assert sorted(name for branch in report.branches for name in branch) == list(names)


def test_a_cycle_is_an_error() -> None:
    graph = with_edges(small_graph(), "ab", [("a", "b"), ("b", "a")])
    with pytest.raises(VerifyError, match="components of SmallModel form a cycle: a -> b; merge them into one"):
        ModalityDag().run(graph)
