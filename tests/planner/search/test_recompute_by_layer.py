"""Recomputation layer by layer: what fits, no slower than one mode for all, and no choice of modes is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.oracles.stage_memory import recomputed_layers, stage_activation_bytes
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, vision_language

from mmcompile.config import PlanRequest, Recompute
from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost, layer_times
from mmcompile.planner.plan.constraints import MemoryCap
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.pricing.priced_chain import OPTIMIZER_STATES
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.candidate import Candidate, CandidateStage
from mmcompile.planner.search.outcome import plan_of
from mmcompile.planner.search.recompute_by_layer import by_layer, relaxed
from mmcompile.planner.search.settings import RECOMPUTES, SearchSpace
from mmcompile.planner.strategies.search import searched
from mmcompile.planning import recomputes_by_layer, search_space

GIB = 2**30


def heavy(cost: LayerCost, size: int) -> LayerCost:
    """A layer that keeps `size` bytes, 40 % of it when selective, 5 % when full."""
    return replace(
        cost,
        activation_bytes=size if cost.has_backward else 0,
        selective_bytes=size * 2 // 5,
        full_bytes=size // 20,
        unsaved_bytes=size // 50,
        shared_bytes=size // 40,
        kept_forward_bytes=cost.forward_bytes // 2,
        kept_kernels=3,
    )


def costs_of() -> dict[str, tuple[LayerCost, ...]]:
    _, costs = vision_language()
    return {
        name: tuple(heavy(cost, GIB // (2 if name == "language_model" else 8)) for cost in layers)
        for name, layers in costs.items()
    }


COSTS = costs_of()


def found(gib: float, *, recomputes: tuple[Recompute, ...] = RECOMPUTES) -> tuple[BranchAndBound, Candidate]:
    """The search's own outcome: one mode for all layers; on devices with so much memory."""
    cluster = Cluster.parse("1x4xH100")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=round(gib * GIB)))
    problem = problem_of(
        vision_language()[0],
        COSTS,
        cluster,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        stages={"vision": 1, "language_model": 2},
        projector="with_encoder",
        space=replace(SearchSpace(microbatches=(8,)), recomputes=recomputes),
    )
    engine, best = searched(problem)
    assert best is not None
    return engine, best


def layers_of(candidate: Candidate, stage: CandidateStage) -> list[LayerCost]:
    chain = candidate.chains.chains[stage.chain]
    return [COSTS[layer.component][layer.index] for layer in chain.layers[stage.first : stage.last]]


def priced(candidate: Candidate, stage: CandidateStage, modes: tuple[Recompute | None, ...]) -> tuple[float, int]:
    """(seconds, bytes) of a stage, straight from the cost model."""
    costs = recomputed_layers(layers_of(candidate, stage), modes)
    device = candidate.problem.cluster.device
    fixed = sum(cost.parameter_bytes + (1 + OPTIMIZER_STATES) * cost.trainable_bytes for cost in costs)
    held = stage.in_flight * stage_activation_bytes(costs) + max(cost.working_bytes for cost in costs)
    seconds = sum(layer_times(cost, device, "bfloat16").total_s for cost in costs)
    return seconds, fixed + (held if stage.in_flight else 0)


@pytest.mark.parametrize("gib", [12.0, 2.6, 1.9, 1.5, 1.3, 1.1])
def test_each_stage_is_as_fast_as_its_memory_allows(gib: float) -> None:
    _, best = found(gib)
    before, after = best, relaxed(best)
    limit = before.problem.memory_bytes(before.num_ranks)
    assert max(after.rank_bytes) <= limit
    for one, other in zip(before.stages, after.stages, strict=True):
        assert other.total_s <= one.total_s * (1 + 1e-12), "never slower"
        assert (other.ranks, other.first, other.last, other.in_flight) == (
            one.ranks,
            one.first,
            one.last,
            one.in_flight,
        )
        uniform: Recompute = before.setting.recompute
        modes = other.modes or tuple(uniform if cost.has_backward else None for cost in layers_of(before, one))
        seconds, held = priced(after, other, modes)
        assert (other.total_s, other.total_bytes) == (pytest.approx(seconds), held)
        assert [mode is None for mode in modes] == [not cost.has_backward for cost in layers_of(after, other)]
        every = product(*(RECOMPUTES if mode is not None else (None,) for mode in modes))
        fitting = (own for own in (priced(after, other, each) for each in every) if own[1] <= limit)
        assert seconds == pytest.approx(min(fitting)[0], rel=1e-12)


def test_a_search_starts_from_none_and_relaxes_what_it_had_to_recompute() -> None:
    _, best = found(12.0)
    assert relaxed(best) is best and best.setting.recompute == "none"
    engine, best = found(2.6)
    after = relaxed(best)
    engine.judge([after])
    again = engine.judged[-1]
    assert again.iteration_s < best.iteration_s, "the step gets shorter"
    plan = plan_of(engine, again)
    assert plan.recompute == "mixed" != best.setting.recompute
    assert Plan.from_json(plan.to_json()) == plan
    counts = Counter(mode for stage in plan.stages for mode in stage.recompute)
    assert counts.keys() >= {None, "none"}, "the frozen encoder has nothing to win"
    kept = counts.total() - counts[None]
    words = ", ".join(f"{mode} {counts[mode]}" for mode in ("selective", "full") if counts[mode])
    assert f"recompute {words} of {kept} layers, " in str(plan)
    first, second = (stage for stage in plan.stages if stage.name.startswith("language_model"))
    assert first.prediction.in_flight > second.prediction.in_flight
    assert _time_lost(first.modes) >= _time_lost(second.modes), "more in flight, more again"


def _time_lost(modes: Mapping[tuple[str, int], Recompute]) -> int:
    return sum(RECOMPUTES.index(mode) for mode in modes.values())


def test_other_cuts_may_be_faster_once_layers_are_relaxed() -> None:
    """One mode for all fits with uneven stages when selective, with even ones when full; relaxed, even stages win."""
    engine, best = found(2.0)
    own = relaxed(best)
    engine.judge([own])
    alone = engine.judged[-1]
    assert best.setting.recompute == "selective" and alone.iteration_s <= best.iteration_s
    chosen = by_layer(*found(2.0))
    assert chosen.setting.recompute == "full" and chosen.iteration_s < 0.95 * alone.iteration_s
    assert max(chosen.rank_bytes) <= chosen.problem.memory_bytes(chosen.num_ranks)
    constrained = by_layer(engine, best, [MemoryCap(num_bytes=2 * GIB)])
    assert [(stage.first, stage.last) for stage in constrained.stages] == [
        (stage.first, stage.last) for stage in best.stages
    ]


@pytest.mark.parametrize("gib", [12.0, 3.0, 1.9, 1.1])
def test_a_step_never_gets_longer(gib: float) -> None:
    engine, best = found(gib)
    assert by_layer(engine, best).iteration_s <= best.iteration_s


def test_a_memory_cap_is_kept_to() -> None:
    _, best = found(6.0, recomputes=("full",))
    free, capped = (
        relaxed(best),
        relaxed(best, [MemoryCap(num_bytes=2 * GIB, where="language_model.0")]),
    )
    index = free.names.index("language_model.0")
    assert free.stages[index].total_bytes > 2 * GIB >= capped.stages[index].total_bytes
    assert free.stages[index].total_s < capped.stages[index].total_s
    others = [number for number in range(len(free.stages)) if number != index]
    assert [free.stages[other] for other in others] == [capped.stages[other] for other in others]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"recompute": "auto"}, True),
        ({"recompute": "full"}, False),
        ({"global_batch": 8}, True),
        ({"global_batch": 8, "recompute": "full"}, False),
        ({"global_batch": 8, "strategy": "dflop"}, False),
        ({"global_batch": 8, "strategy": "dflop", "recompute": "auto"}, True),
        ({"recompute": "auto", "fault_tolerance": 1}, False),
    ],
)
def test_when_layers_are_relaxed(options: dict[str, Any], expected: bool) -> None:
    request = PlanRequest(cluster="1x4xH100", **options)
    assert recomputes_by_layer(request) is expected
    one_mode = options.get("recompute", "none" if "global_batch" not in options else "auto") != "auto"
    assert len(search_space(request, Cluster.parse(request.cluster), can_share_tokens=False).recomputes) == (
        1 if one_mode else 3
    )
