"""`benchmarks/axes_reasons.py`: reasons in words, and layouts that no neighbour beats."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from support.paths import BENCHMARKS
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, vision_language

from mmcompile.costmodel.cluster import Cluster
from mmcompile.passes.tensor_parallel.tensor_axes import TensorAxes
from mmcompile.planner.search.branch_and_bound import TOLERANCE, BranchAndBound
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, SearchSpace, Setting

sys.path.insert(0, str(BENCHMARKS))
layouts: Any = import_module("axes_layouts")
reasons: Any = import_module("axes_reasons")
Layout, Spent, Surroundings, Tried = layouts.Layout, layouts.Spent, reasons.Surroundings, reasons.Tried

BATCH, HEADS = 8, "25 heads do not divide by 2"
HERE = Spent(compute_s=6.0, exchange_s=1.0, update_s=1.0, idle_s=2.0)
GIB = 2**30


@pytest.mark.parametrize(
    ("tried", "text"),
    [
        (Tried(axis="tp", value=8, impossible="28 heads do not divide by 8"), "tp 8: 28 heads do not divide by 8"),
        (Tried(axis="tp", value=2, needs_bytes=97 * GIB), "tp 2: a stage needs 97 GiB of 80"),
        (
            Tried(axis="tp", value=4, step_s=11.1, spent=replace(HERE, exchange_s=2.1), also=("pp 3",)),
            "tp 4 (pp 3): 11% slower, exchanges +1.1 s",
        ),
        (
            Tried(axis="fsdp", value=0, needs_bytes=97 * GIB, step_s=25.0, spent=replace(HERE, compute_s=21.0)),
            "no fsdp: a stage needs 97 GiB of 80; it fits, 2.5 times as long, computing +15 s",
        ),
        (Tried(axis="pp", value=5, step_s=10.01, spent=HERE, also=("8 devices",)), "pp 5 (8 devices): as fast"),
        (Tried(axis="dp", value=5, step_s=9.0, spent=HERE), "dp 5: 10.0% faster"),
    ],
)
def test_reasons_are_worded(tried: Any, text: str) -> None:
    assert reasons.worded(tried, 10.0, HERE, 80 * GIB) == text


def _problem() -> Problem:
    graph, costs = vision_language()
    cluster = Cluster.parse("1x4xA40")
    space = SearchSpace(
        tp=(1, 2, 4), dp=None, recomputes=("none",), schedules=("1f1b",), placements=("disjoint",), microbatches=None
    )
    return problem_of(
        graph,
        costs,
        cluster,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        space=space,
        global_batch=BATCH,
        tensor_degrees={"vision": (1,)},
    )


def test_no_neighbour_of_the_layout_found_is_faster() -> None:
    problem = _problem()
    axes = TensorAxes(degrees=(1, 2, 4), reasons={}, shares={}, kept={})
    tensor = {
        "vision": replace(axes, degrees=(1,), reasons={2: HEADS, 4: HEADS}),
        "projector": axes,
        "language_model": axes,
    }
    engine = BranchAndBound(problem=problem)
    chains = problem.sets[0]
    worst = engine.draft(
        Combination(
            chains=chains,
            setting=Setting(num_microbatches=1, samples=BATCH),
            degrees=(Degrees(),) * len(chains.chains),
            counts=(1,) * len(chains.chains),
        )
    )
    assert worst is not None
    engine.judge([worst])
    around = Surroundings(problem=problem, tensor=tensor, no_cp="tokens are not shared here")
    candidate, step_s, tried = around.climb(worst, engine.fastest_s)

    assert step_s < 0.7 * engine.fastest_s, "four devices, of which two were used one after the other"
    every = [one for own in tried for one in own]
    assert all(one.step_s >= step_s * (1 - TOLERANCE) for one in every if one.spent is not None)
    assert {one.impossible for one in tried[0] if one.axis == "tp"} == {HEADS}
    assert {one.impossible for one in tried[-1] if one.axis == "cp"} == {"tokens are not shared here"}
    spent = Spent.of(candidate, step_s)
    parts = (spent.compute_s, spent.exchange_s, spent.update_s, spent.idle_s)
    assert sum(parts) == pytest.approx(step_s)
    assert min(parts) >= 0

    # What tp 1, 2 and 4 of the language model take at best, by trying all that fits the four devices.
    here = Layout.of(candidate)
    own = here.value(len(here.counts) - 1, "tp")
    others = [one for one in tried[-1] if one.axis == "tp" and one.spent is not None and one.value != own]
    assert others
    for one in others:
        assert one.step_s >= _fastest_s(problem, one.value) * (1 - 1e-9)


def _fastest_s(problem: Problem, tp: int) -> float:
    """By brute force over settings, replicas and stages of the first chain set."""
    engine = BranchAndBound(problem=problem)
    chains = problem.sets[0]
    divisors = [1, 2, 4, 8]
    for dp, other, count in product(divisors, divisors, divisors):
        if dp * count > BATCH or (BATCH // count) % other:
            continue
        setting = Setting(num_microbatches=count, samples=BATCH / dp / count, dp=dp)
        for counts in product((1, 2, 3), repeat=len(chains.chains)):
            degrees = (*(Degrees(dp=other),) * (len(chains.chains) - 1), Degrees(tp=tp, dp=dp))
            combination = Combination(chains=chains, setting=setting, degrees=degrees, counts=counts)
            if combination.num_ranks <= problem.num_devices:
                found = engine.draft(combination)
                engine.judge([] if found is None else [found])
    return engine.fastest_s
