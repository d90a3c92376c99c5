"""Demands that conflict: a smallest set of them, in words, and what would do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.plans.exact_cases import all_splits, chain, equal_layers, feed, problem, random_case

from mmcompile.errors import PlanError
from mmcompile.planner.exact.conflict import Conflict, conflict
from mmcompile.planner.exact.rules import Cap
from mmcompile.planner.exact.solver import solve
from mmcompile.planner.exact.split_problem import ExactProblem, broken
from mmcompile.planner.search.partition import PartitionLayer

GIB = 2**30


def conflict_of(asked: ExactProblem) -> Conflict:
    found = solve(asked)
    assert isinstance(found, Conflict)
    return found


def has_split(asked: ExactProblem) -> bool:
    """By trying everything, the number of stages free."""
    chains = [replace(own, low=1, high=own.num_layers, ranks=()) for own in asked.chains]
    asked = replace(asked, chains=tuple(chains))
    return any(not broken(asked, splits) for splits in all_splits(chains))


@pytest.mark.parametrize("number", range(120))
def test_no_demand_of_a_conflict_can_be_left_out(number: int) -> None:
    chains, constraints, options = random_case(random.Random(1000 + number))
    chains = [replace(own, ranks=()) for own in chains]
    asked = problem(chains, *[text for text in constraints if "rank" not in text], **options)
    found = solve(asked)
    if not isinstance(found, Conflict):
        return
    assert not has_split(replace(asked, demands=found.demands))
    for demand in found.demands:
        rest = tuple(other for other in found.demands if other is not demand)
        assert has_split(replace(asked, demands=rest)), found.text


def tied(*constraints: str) -> ExactProblem:
    """34 layers of 10 GiB; embedding and head are to share a stage, and so all in between."""
    own = [chain("language_model", equal_layers(34, 0.1, fixed_bytes=10 * GIB), low=1, high=12)]
    return problem(own, "together:language_model.0,language_model.33", *constraints, memory_bytes=80 * GIB, devices=12)


def test_a_tied_head_that_does_not_fit() -> None:
    assert conflict_of(tied("memory:40GiB")).text.splitlines() == [
        "no plan: 'memory <= 40 GiB' conflicts with 'language_model.0 and language_model.33 share a stage'",
        "  with 340.0 GiB in place of 'memory <= 40 GiB' there is one",
        "  without 'language_model.0 and language_model.33 share a stage' there is one, with a slowest stage of 300 ms",
    ]
    assert conflict_of(tied()).text.splitlines()[0] == (
        "no plan: 'memory <= 80.0 GiB of a device' conflicts with 'language_model.0 and language_model.33 share a stage'"
    )


def test_more_stages_than_layers() -> None:
    found = conflict_of(problem([chain("projector", equal_layers(2))], "stages:projector=3"))
    assert found.text.splitlines() == [
        "no plan: 'projector has 3 stages' cannot be met: projector has 2 layers, and a stage has at least one",
        "  with 2 stages of projector in place of 'projector has 3 stages' there is one, with a slowest stage of 1.00 s",
    ]


def test_a_layer_that_fits_nowhere_is_named() -> None:
    layers = [PartitionLayer(seconds=1.0, fixed_bytes=size * GIB) for size in (1, 7, 2)]
    found = conflict_of(problem([chain("l", layers)], "memory:4GiB"))
    assert found.text.splitlines() == [
        "no plan: 'memory <= 4 GiB' cannot be met: l.1 (model.l.layers.1) alone needs 7.0 GiB",
        "  with 7.0 GiB in place of 'memory <= 4 GiB' there is one",
    ]


def test_the_layout_is_part_of_a_conflict_where_it_is_in_the_way() -> None:
    chains = [
        chain("v", equal_layers(4), low=1, high=1, feeds=(feed(1),)),
        chain("l", equal_layers(4), low=2, high=2),
    ]
    found = conflict_of(problem(chains, "apart:v.0,v.3", "together:l.0,l.1", counts=[1, 2]))
    assert [(demand.words, demand.asked) for demand in found.demands] == [
        ("v.0 and v.3 are in different stages", True),
        ("v has 1 stage", False),
    ]
    assert found.remedies[1].startswith("with 2 stages of v in place of 'v has 1 stage' there is one")


def test_degrees_that_differ_are_named() -> None:
    chains = [chain("v", equal_layers(2), feeds=(feed(1),)), chain("l", equal_layers(2), tp=2)]
    assert conflict_of(problem(chains, "equal-tp")).text.splitlines()[0] == (
        "no plan: 'all chains have equal tp' cannot be met: v has tp 1, l has tp 2"
    )


def test_a_conflict_over_devices() -> None:
    chains = [
        chain("v", equal_layers(4), feeds=(feed(1),)),
        chain("l", equal_layers(4)),
    ]
    found = conflict_of(problem(chains, "stages:v=2..3", "stages:l=3..", devices=4))
    assert found.text.startswith(
        "no plan: 'v has 2 to 3 stages' conflicts with 'l has at least 3 stages' and 'at most 4 devices'"
    )
    assert "without 'at most 4 devices' there is one" in found.text


def test_the_memory_that_would_do_is_the_least() -> None:
    layers = [PartitionLayer(seconds=1.0, fixed_bytes=1000 * size) for size in (3, 5, 4, 6)]
    own = [chain("l", layers, low=2, high=2)]
    found = conflict_of(problem(own, "memory:7000B", counts=[2]))
    caps = [demand for demand in found.demands if isinstance(demand.rule, Cap)]
    assert len(caps) == 1 and found.remedies[0].startswith("with 9.8 KiB in place of 'memory <= 7 KB'")


def test_without_time_the_demands_are_listed() -> None:
    with pytest.raises(
        PlanError, match=r"no plan meets all of 'language_model.0 and .*; 0 s were up before the conflict"
    ):
        conflict(tied(), 0.0)
