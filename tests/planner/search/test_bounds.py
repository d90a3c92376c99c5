"""The bound never exceeds the simulator, and the quick seconds are the simulator's, under every schedule."""

from __future__ import annotations

import random

import pytest
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.search.bounds import expected_s, lower_bound_s
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.settings import SCHEDULES, Combination, Degrees, Setting
from mmcompile.planner.search.splitter import Splitter

CLUSTER = Cluster.parse("3x4xL4")


def random_candidate(seed: int, schedule: ScheduleKind = "1f1b", *, ranks: bool = False) -> Candidate:
    """One to three encoders of random sizes, frozen or not, into a language model; random counts."""
    rng = random.Random(seed)
    kinds: dict[str, tuple[ComponentKind, int]] = {}
    edges: list[tuple[str, str]] = []
    for index in range(rng.randint(0, 3)):
        kinds[f"encoder{index}"] = (ComponentKind.ENCODER, rng.randint(1, 4))
        edges.append((f"encoder{index}", "language_model"))
        if index and rng.random() < 0.3:
            edges.append((f"encoder{index - 1}", f"encoder{index}"))
    kinds["language_model"] = (ComponentKind.LANGUAGE_MODEL, rng.randint(1, 6))
    trains = {name: rng.random() < 0.5 for name in kinds}
    costs = {
        name: tuple(
            (cost if trains[name] or name == "language_model" else frozen)(rng.randint(1, 50)) for _ in range(count)
        )
        for name, (_, count) in kinds.items()
    }
    setting = Setting(num_microbatches=rng.choice([1, 2, 5, 16]), samples=1, schedule=schedule)
    graph = toy_graph(kinds, edges)
    problem = problem_of(graph, costs, CLUSTER, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=1)
    (chains,) = problem.sets
    counts = tuple(rng.randint(1, min(3, len(chain.layers))) for chain in chains.chains)
    degrees = (Degrees(),) * len(counts)
    combination = Combination(chains=chains, setting=setting, degrees=degrees, counts=counts)
    parts = Splitter(problem=problem).parts(combination, None)
    assert not isinstance(parts, int)
    placed = [(rng.randrange(2),) for _ in range(sum(counts))] if ranks else None
    return assemble(problem, chains, setting, degrees, parts, placed)


def simulated_s(candidate: Candidate) -> float:
    """The last end of a stage's work and what follows it."""
    (timeline,) = candidate.timelines(record=True)
    ends = {
        event.stage: event.end_s
        for event in sorted(timeline.events, key=lambda event: event.end_s)
        if event.kind.is_compute
    }
    return max(ends[name] + tail_s for name, tail_s in zip(candidate.names, candidate.tail_s, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_quick_seconds_are_the_simulators_and_the_bound_is_below(schedule: ScheduleKind) -> None:
    candidates = [random_candidate(seed, schedule) for seed in range(60)]
    for candidate, seconds in zip(candidates, expected_s(candidates), strict=True):
        assert seconds == pytest.approx(simulated_s(candidate), rel=1e-12)
        assert lower_bound_s(candidate) <= candidate.timelines()[0].makespan_s * (1 + 1e-12)


def test_candidates_are_judged_together_as_alone() -> None:
    candidates = [random_candidate(seed, SCHEDULES[seed % len(SCHEDULES)]) for seed in range(16)]
    assert expected_s(candidates) == [expected_s([candidate])[0] for candidate in candidates]
    assert expected_s([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_when_stages_share_ranks(seed: int) -> None:
    candidate = random_candidate(seed, ranks=True)
    assert lower_bound_s(candidate) <= candidate.timelines()[0].makespan_s * (1 + 1e-12)


def test_the_bound_is_reached_by_equal_stages_without_link_time() -> None:
    graph = toy_graph({"language_model": (ComponentKind.LANGUAGE_MODEL, 4)}, [])
    costs = {"language_model": (cost(10, output_bytes=0),) * 4}
    problem = problem_of(graph, costs, CLUSTER, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=9)
    (chains,) = problem.sets
    setting = Setting(num_microbatches=9, samples=1)
    candidate = assemble(problem, chains, setting, [Degrees()], [[(0, 1), (1, 2), (2, 3), (3, 4)]])
    assert lower_bound_s(candidate) == pytest.approx(candidate.timelines()[0].makespan_s)
