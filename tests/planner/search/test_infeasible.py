"""Impossible requests: what needs more than there is, and the nearest requests that work."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.infeasible import Relaxation, Way, explain, fits, nearest, relaxations
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import SearchSpace
from mmcompile.planner.strategies.search import searched

GB = 10**9
GRAPH = toy_graph(
    {"vision": (ComponentKind.ENCODER, 4), "language_model": (ComponentKind.LANGUAGE_MODEL, 16)},
    [("vision", "language_model")],
)


def problem(
    cluster: str = "1x4xA40",
    *,
    state: int = 2 * GB,
    activations: int = GB,
    space: SearchSpace | None = None,
    global_batch: int | None = None,
) -> Problem:
    """16 trained layers, each with `state` bytes of parameters, gradients and optimizer state, and 8 microbatches."""
    layer = cost(200, parameter_bytes=state // 4, activation_bytes=activations)
    layer = replace(layer, full_bytes=activations // 100, selective_bytes=activations // 4)
    costs = {"vision": (frozen(100),) * 4, "language_model": (layer,) * 16}
    where = Cluster.parse(cluster)
    return problem_of(
        GRAPH,
        costs,
        where,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        num_microbatches=8,
        space=space or SearchSpace(),
        global_batch=global_batch,
    )


def test_what_fits_is_found_to_fit() -> None:
    assert fits(problem())
    assert searched(problem())[1] is not None


def test_recompute_is_the_first_thing_that_works() -> None:
    asked = problem(activations=4 * GB)
    assert searched(asked)[1] is None
    lines = explain(asked).splitlines()
    assert lines[0] == "no plan fits 4 devices of 1x4xA40: they have 44.7 GiB each, 178.8 GiB together"
    assert lines[1] == (
        "parameters, gradients and optimizer state need 29.8 GiB: the activations in flight do not fit beside"
    )
    assert lines[3] == (
        "  language_model: 29.8 GiB, and 59.6 GiB of activations a microbatch (recompute none); biggest layer 5.6 GiB"
    )
    assert lines[4:6] == ["what works, nearest first:", "  recompute selective"]
    assert lines[6].startswith("  tp 2") and lines[7].endswith("x4xA40")


def test_what_is_said_to_work_does() -> None:
    asked = problem(activations=6 * GB)
    for relaxation in relaxations(asked):
        words = nearest([relaxation]).works
        for said, make in relaxation.ways:
            if (said,) == words:
                engine, best = searched(make())
                assert best is not None, relaxation.words
                assert max(best.rank_bytes) <= engine.problem.memory_bytes(best.num_ranks)


def test_more_nodes_are_the_fewest_that_work() -> None:
    asked = problem(state=40 * GB)
    lines = explain(asked).splitlines()
    assert lines[1] == "parameters, gradients and optimizer state need 596.1 GiB: more than there is"
    assert "  20 devices, 5x4xA40" in lines
    larger = [make for own in relaxations(asked) for words, make in own.ways if words == "16 devices, 4x4xA40"]
    assert not fits(larger[0]())
    assert any(line.startswith("not enough: recompute full; tensor parallelism") for line in lines)


def test_what_is_allowed_already_is_not_proposed() -> None:
    space = SearchSpace(tp=(1, 2, 4), recomputes=("none", "selective", "full"))
    asked = problem(state=60 * GB, space=space)
    assert [own.words for own in relaxations(asked)] == ["up to 64 times the nodes"]
    asked = problem(state=60 * GB, space=space, global_batch=32)
    words = [[said for said, _ in own.ways][:2] for own in relaxations(asked)]
    assert words[0] == ["16 microbatches of 2 samples", "32 microbatches of 1 sample"]
    assert words[1] == ["8 devices, 2x4xA40", "12 devices, 3x4xA40"]


def test_nothing_works() -> None:
    asked = problem(state=500 * GB)
    text = explain(asked)
    assert "nothing near it works; use devices with more memory, or a smaller model" in text


def test_processes_of_this_machine_get_no_more_memory_by_being_more() -> None:
    asked = replace(problem(), prices=problem("1x4xA40").prices)
    local = problem_of(
        GRAPH,
        {"vision": (frozen(1),) * 4, "language_model": (cost(1, parameter_bytes=10**14),) * 16},
        Cluster.local(),
        dtype="float32",
        fingerprint=FINGERPRINT,
        num_microbatches=2,
    )
    assert any("nodes" in own.words for own in relaxations(asked))
    assert not any("nodes" in own.words for own in relaxations(local))


def ways(number: int) -> tuple[Way, ...]:
    """Ways to problems of 1, 2, ... samples."""
    small = problem()
    return tuple((f"way {index}", partial(replace, small, global_batch=index + 1)) for index in range(number))


@pytest.mark.parametrize("first", range(9))
def test_rising_ways_are_bisected_to_the_first_that_works(first: int) -> None:
    tried: list[Problem] = []

    def works(made: Problem) -> bool:
        tried.append(made)
        return made.global_batch is not None and made.global_batch > first

    found = nearest([Relaxation(words="more", ways=ways(8), rising=True)], works)
    assert found.works == ((f"way {first}",) if first < 8 else ())
    assert found.fails == (() if first < 8 else ("more",))
    assert len(tried) <= 7


def test_enough_is_enough_and_time_is_kept() -> None:
    asked = [Relaxation(words=f"r{index}", ways=ways(1)) for index in range(5)]
    assert len(nearest(asked, lambda _: True, wanted=2).works) == 2
    late = nearest(asked, lambda _: time.sleep(0.02) is None, budget_s=0.01, wanted=5)
    assert (late.works, late.untried) == (("way 0",), ("r1", "r2", "r3", "r4"))


def test_a_relaxation_that_gives_up_more_is_not_tried_for_nothing() -> None:
    less = Relaxation(words="less", ways=ways(3), rising=True)
    more = Relaxation(words="more", ways=ways(3), rising=True, instead_of="less")
    other = Relaxation(words="other", ways=ways(1), useless_after=("less",))
    found = nearest([less, more, other], lambda made: made.global_batch in (2, 3))
    assert (found.works, found.fails) == (("way 1",), ())


def test_the_engine_is_left_as_it_was() -> None:
    asked = problem(activations=6 * GB)
    explain(asked)
    assert BranchAndBound(problem=asked).first() is None
