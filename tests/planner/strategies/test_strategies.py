"""Published searches do what their papers say, and ours is never slower than any strategy by the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plans.problem import problem_of
from support.plans.search_plan import search
from support.plans.sized_plan import mixed_samples, vision_language_72b, workload
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.errors import ConfigError
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, SearchSpace
from mmcompile.planner.search.splitter import Splitter
from mmcompile.planner.strategies.dflop import dflop
from mmcompile.planner.strategies.entrain import allocate, entrain
from mmcompile.planner.strategies.loosely_coupled import loosely_coupled
from mmcompile.planner.strategies.search import AUTO, STRATEGIES, searched, strategy_of


def toy() -> tuple[ModelGraph, dict[str, tuple[LayerCost, ...]]]:
    """A frozen encoder of 6 layers into a language model of 8."""
    graph = toy_graph(
        {"vision": (ComponentKind.ENCODER, 6), "language_model": (ComponentKind.LANGUAGE_MODEL, 8)},
        [("vision", "language_model")],
    )
    return graph, {"vision": (frozen(150),) * 6, "language_model": (cost(100),) * 8}


def toy_problem(devices: int = 8, batch: int = 8, space: SearchSpace | None = None) -> Problem:
    cluster = Cluster.parse(f"1x{devices}xH100")
    return problem_of(
        *toy(),
        cluster,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=batch,
        space=space or SearchSpace.everything(cluster),
    )


def sized_problem(cluster: str, batch: int) -> Problem:
    graph, table = vision_language_72b()
    where = Cluster.parse(cluster)
    return problem_of(
        graph,
        table,
        where,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=batch,
        workload=workload(table, mixed_samples(300)),
        space=SearchSpace.everything(where),
    )


def test_an_unknown_strategy_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no strategy 'best'; choose one of auto, loosely-coupled, dflop, entrain, "):
        strategy_of("best")
    with pytest.raises(ConfigError, match="no strategy 'best'"):
        searched(toy_problem(), "best")


@pytest.mark.parametrize(
    "problem", [toy_problem(), toy_problem(6, 12), sized_problem("4x8xH100", 64)], ids=["8", "6", "32"]
)
def test_ours_is_never_slower_than_any_other(problem: Problem) -> None:
    _, ours = searched(problem)
    assert ours is not None
    for name in STRATEGIES:
        _, other = searched(problem, name)
        if other is not None:
            assert ours.iteration_s <= other.iteration_s * 1.005, name


def test_a_plan_names_its_strategy() -> None:
    graph, costs = toy()
    options = {"dtype": "bfloat16", "fingerprint": FINGERPRINT, "global_batch": 8}
    cluster = Cluster.parse("1x8xH100")
    space = SearchSpace.everything(cluster)
    ours = search(graph, costs, cluster, **options, space=space)  # type: ignore[arg-type]
    theirs = search(graph, costs, cluster, **options, space=space, strategy="dflop")  # type: ignore[arg-type]
    assert (ours.strategy, theirs.strategy) == (AUTO, "dflop")
    assert theirs.schedule == "1f1b"


def test_loosely_coupled_gives_encoders_the_fewest_stages_that_are_no_slower() -> None:
    space = SearchSpace(dp=(1,), microbatches=(8,))
    problem = toy_problem(space=space)
    splitter = Splitter(problem=problem)
    found = loosely_coupled(problem)
    assert found
    for candidate in found:
        vision, language = candidate.chains.chains
        encoders, stages = candidate.counts
        target = splitter.table(language, candidate.setting, Degrees(), 0, None, 8)[stages - 1]
        table = splitter.table(vision, candidate.setting, Degrees(), stages, None, 6)
        assert target is not None
        bottlenecks = [split.bottleneck_s for split in table if split is not None]
        assert bottlenecks[encoders - 1] <= target.bottleneck_s
        assert all(slower > target.bottleneck_s for slower in bottlenecks[: encoders - 1])


def test_dflop_takes_the_least_of_its_formula_on_all_devices() -> None:
    problem = toy_problem(space=SearchSpace(tp=(1,), dp=None))
    (candidate,) = dflop(problem)
    assert candidate.num_ranks == 8

    def makespan_s(encoder: Degrees, pp: int, language: Degrees, stages: int, microbatches: int) -> float:
        setting = replace(
            candidate.setting, num_microbatches=microbatches, dp=language.dp, samples=8 / language.dp / microbatches
        )
        vision, language_model = candidate.chains.chains
        slowest_s = max(
            float(problem.prices.priced(vision, encoder, setting).total_s[-1]) / pp,
            float(problem.prices.priced(language_model, language, setting).total_s[-1]) / stages,
        )
        return (microbatches + pp + stages - 1) * slowest_s

    best = min(
        makespan_s(Degrees(dp=e_dp), pp, Degrees(dp=l_dp), stages, count)
        for l_dp in (1, 2, 4, 8)
        for e_dp in (1, 2, 4, 8)
        for pp in range(1, 7)
        for stages in range(1, 9)
        if pp * e_dp + stages * l_dp == 8
        for count in (1, 2, 4, 8)
        if 8 // l_dp % count == 0
    )
    encoder, language = candidate.degrees
    got = makespan_s(encoder, candidate.counts[0], language, candidate.counts[1], candidate.setting.num_microbatches)
    assert got == pytest.approx(best)
    # Equal numbers of layers, whatever they cost.
    assert all(np.ptp([s.last - s.first for s in candidate.stages if s.chain == chain]) <= 1 for chain in (0, 1))


def test_entrain_allocates_in_proportion_to_work() -> None:
    problem = toy_problem(space=SearchSpace(tp=(1, 2), dp=(1,), microbatches=(8,)))
    (candidate,) = entrain(problem)
    work = {
        chain.name: float(problem.prices.priced(chain, Degrees(), candidate.setting).total_s[-1])
        for chain in candidate.chains.chains
    }
    given = {
        chain.name: degrees.ranks * count
        for chain, degrees, count in zip(candidate.chains.chains, candidate.degrees, candidate.counts, strict=True)
    }
    assert given == allocate(work, 8)


def test_strategies_keep_to_the_space_and_to_demanded_stages() -> None:
    problem = replace(toy_problem(space=SearchSpace(dp=(1, 2), microbatches=(4,))), stages={"language_model": 2})
    for propose in (loosely_coupled, dflop, entrain):
        for candidate in propose(problem):
            assert candidate.counts[1] == 2
            assert candidate.setting.num_microbatches == 4
            assert candidate.setting.dp in (1, 2)
            assert {degrees.tp for degrees in candidate.degrees} == {1}
