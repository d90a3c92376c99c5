"""Baselines: each has the structure it is named for, fits, and is priced like any other plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.plans.search_plan import search
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.comm import collective_s
from mmcompile.costmodel.compute import LayerCost, seconds
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.pricing.chains import chain_sets
from mmcompile.planner.pricing.pricing import Pricing
from mmcompile.planner.search.bounds import expected_s
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.problem import ChainPrices, Problem
from mmcompile.planner.search.settings import Degrees, SearchSpace
from mmcompile.planner.strategies.baselines import BASELINES, baseline

GRAPH = toy_graph(
    {
        "vision": (ComponentKind.ENCODER, 6),
        "audio": (ComponentKind.ENCODER, 4),
        "projector": (ComponentKind.PROJECTOR, 1),
        "language_model": (ComponentKind.LANGUAGE_MODEL, 8),
    },
    [("vision", "projector"), ("projector", "language_model"), ("audio", "language_model")],
)
COSTS = {
    "vision": (frozen(300),) * 6,
    "audio": (frozen(100),) * 4,
    "projector": (cost(5, passes=False),),
    "language_model": (cost(200, trains=False),) * 8,
}


def problem(
    cluster: str = "1x8xA100-80G",
    costs: Mapping[str, tuple[LayerCost, ...]] = COSTS,
    space: SearchSpace | None = None,
    global_batch: int | None = 16,
    stages: Mapping[str, int] | None = None,
) -> Problem:
    where = Cluster.parse(cluster)
    return Problem(
        prices=ChainPrices(
            graph=GRAPH, pricing=Pricing(table=CostTable(layers=costs), cluster=where, dtype="bfloat16")
        ),
        sets=chain_sets(GRAPH, costs),
        space=space or SearchSpace(microbatches=(16,)),
        fingerprint=FINGERPRINT,
        global_batch=global_batch,
        stages=stages or {},
    )


def components(candidate: Candidate) -> list[list[str]]:
    """Of each stage, in order of the chains."""
    chains = candidate.chains.chains
    return [
        list(dict.fromkeys(layer.component for layer in chains[stage.chain].layers[stage.first : stage.last]))
        for stage in candidate.stages
    ]


def sizes(candidate: Candidate, component: str) -> list[int]:
    """Layers of a component in each stage."""
    chains = candidate.chains.chains
    return [
        sum(layer.component == component for layer in chains[stage.chain].layers[stage.first : stage.last])
        for stage in candidate.stages
    ]


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_uses_all_devices_and_is_priced(name: str) -> None:
    found = baseline(name, problem())
    assert found.num_ranks == 8
    assert found.setting.schedule == "1f1b"
    (seconds,) = expected_s([found])
    assert seconds == pytest.approx(np.mean([timeline.makespan_s for timeline in found.timelines()]), rel=1e-2)
    assert seconds * 8 >= found.step_work_s * 0.999
    names = {layer for chain in found.to_chains() for stage in chain.stages for layer in stage.layer_names}
    assert len(names) == 19


def test_stages_are_cut_by_forward_time_however_little_is_trained() -> None:
    found = baseline("frozen-unaware", problem())
    of_component = {name: sum(size > 0 for size in sizes(found, name)) for name in COSTS}
    # Forward takes 1,800 in the encoders' first, 400 in the second and 1,600 in the language model.
    assert (of_component["vision"], of_component["audio"], of_component["language_model"]) == (3, 1, 4)
    trained = {name: tuple(cost(layer.forward_flops / 1e9) for layer in layers) for name, layers in COSTS.items()}
    assert baseline("frozen-unaware", problem(costs=trained)).counts == found.counts


def test_encoders_come_first_in_one_line() -> None:
    found = baseline("megatron", problem())
    assert len(found.degrees) == 1
    assert set(components(found)[0]) == {"vision", "projector", "audio"}
    assert components(found)[1:] == [["language_model"]] * 7
    assert sorted(sizes(found, "language_model")) == [0, 1, 1, 1, 1, 1, 1, 2]


def test_encoders_take_more_first_stages_where_one_does_not_hold_them() -> None:
    heavy = {**COSTS, "vision": (LayerCost(**{**as_dict(COSTS["vision"][0]), "parameter_bytes": 15 * 10**9}),) * 6}
    found = baseline("megatron", problem(costs=heavy))
    assert sum("language_model" not in own for own in components(found)) == 2


def as_dict(own: LayerCost) -> dict[str, int]:
    return {name: getattr(own, name) for name in own.__dataclass_fields__}


def test_every_stage_of_the_language_model_runs_all_encoders() -> None:
    found = baseline("replicated", problem())
    assert sizes(found, "vision") == [6] * 8
    assert sizes(found, "audio") == [4] * 8
    assert sizes(found, "language_model") == [1] * 8
    assert found.step_work_s > baseline("megatron", problem()).step_work_s * 3


def test_every_stage_has_as_many_layers() -> None:
    found = baseline("equal-layers", problem())
    assert [stage.last - stage.first for stage in found.stages] == [3, 3, 3, 2, 2, 2, 2, 2]


def test_encoders_share_the_first_stage_with_layers_of_the_language_model() -> None:
    found = baseline("pinned", problem("1x4xA100-80G"))
    assert sizes(found, "language_model") == [2] * 4
    assert sizes(found, "vision") == [6, 0, 0, 0]
    assert sizes(found, "audio") == [4, 0, 0, 0]


def test_every_device_is_a_replica_that_holds_its_share() -> None:
    found = baseline("fsdp", problem(space=SearchSpace()))
    assert len(found.stages) == 1
    (degrees,) = found.degrees
    assert (degrees.dp, degrees.tp, degrees.fsdp) == (8, 1, True)
    assert found.setting.num_microbatches * found.setting.samples == pytest.approx(2)
    whole = sum(layer.parameter_bytes for layers in COSTS.values() for layer in layers)
    assert found.stages[0].parameter_bytes == pytest.approx(whole / 8, rel=1e-3)


def test_replicas_that_share_parameters_may_share_tensors() -> None:
    found = baseline("fsdp", problem(space=SearchSpace(tp=(2,))))
    (degrees,) = found.degrees
    assert (degrees.dp, degrees.tp, degrees.fsdp) == (4, 2, True)
    assert found.num_ranks == 8
    assert found.setting.num_microbatches * found.setting.samples == pytest.approx(4)
    best = baseline("fsdp", problem(space=SearchSpace(tp=(1, 2))))
    assert min(expected_s([found])) >= min(expected_s([best]))


def test_tensor_parallel_ranks_of_one_degree() -> None:
    found = baseline("frozen-unaware", problem("2x4xA100-80G", space=SearchSpace(tp=(2,), microbatches=(16,))))
    assert found.num_ranks == 8
    assert {degrees.tp for degrees in found.degrees} == {2}


def test_a_degree_that_does_not_divide_is_priced_as_ranks_run_it() -> None:
    """Eight ranks share half of the work of the vision tower (its heads do not divide), of the projector nothing is known."""
    where = Cluster.parse("1x8xA100-80G")
    half = TensorShare(
        sums=1,
        summed_bytes=10**6,
        copies=0,
        copied_bytes=0,
        parameter_bytes=0,
        trainable_bytes=0,
        parts=(("forward_flops", 0.5 + 0.5 / 8),),
    )
    pricing = Pricing(
        table=CostTable(layers=COSTS),
        cluster=where,
        dtype="bfloat16",
        tensor_degrees={"vision": (1, 2, 4), "projector": (1,)},
        tensor_shares={"vision": {8: (half,) * 6}},
    )
    whole = problem(space=SearchSpace(tp=(8,), microbatches=(16,)))
    found = baseline("equal-layers", replace(whole, prices=replace(whole.prices, pricing=pricing)))
    assert found.degrees == (Degrees(tp=8),)

    def flops(costs: Sequence[LayerCost]) -> float:
        return sum(seconds(own.forward_flops, 0, 0, where.device, "bfloat16") for own in costs)

    launches = sum(own.kernels for costs in COSTS.values() for own in costs) * where.device.launch_s

    vision = flops(COSTS["vision"]) * (0.5 + 0.5 / 8) + 6 * collective_s("all_reduce", 10**6, 8, where)
    rest = flops([*COSTS["audio"], *COSTS["language_model"]]) / 8
    blocks = sum(
        (2 if own.attention_flops else 1) * collective_s("all_reduce", own.output_bytes, 8, where)
        for own in (*COSTS["audio"], *COSTS["language_model"])
    )
    wanted = vision + rest + blocks + flops(COSTS["projector"]) + launches
    assert found.stages[0].forward_s == pytest.approx(wanted, rel=1e-3)


def test_as_strategies_they_propose_one_candidate_or_none() -> None:
    for name, strategy in BASELINES.items():
        (found,) = strategy(problem())
        assert found.stages == baseline(name, problem()).stages
        assert strategy(problem(stages={"vision": 2})) == ()


@pytest.mark.parametrize("name", BASELINES)
def test_a_search_by_a_baseline_makes_its_plan(name: str) -> None:
    where = Cluster.parse("1x8xA100-80G")
    space = SearchSpace(microbatches=(16,))
    plan = search(
        GRAPH, COSTS, where, dtype="bfloat16", fingerprint=FINGERPRINT, space=space, global_batch=16, strategy=name
    )
    own = baseline(name, problem())
    assert plan.strategy == name
    stages = [stage for chain in own.to_chains() for stage in chain.stages]
    assert [stage.layer_names for stage in plan.stages] == [stage.layer_names for stage in stages]
    assert plan.predicted.iteration_s == pytest.approx(expected_s([own])[0])
    assert Plan.from_json(plan.to_json()) == plan


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(PlanError, match="no baseline 'ddp'; known are frozen-unaware, megatron, replicated"):
        baseline("ddp", problem())
    with pytest.raises(PlanError, match="strategy pinned decides the stages itself; leave vision out"):
        baseline("pinned", problem(stages={"vision": 2}))
    with pytest.raises(PlanError, match="strategy fsdp shares a batch between replicas; say how many samples"):
        baseline("fsdp", problem(global_batch=None))
    with pytest.raises(PlanError, match="strategy frozen-unaware finds no layout on 1 devices of 1x1xA100-80G"):
        baseline("frozen-unaware", problem("1x1xA100-80G"))
    huge = {**COSTS, "vision": (LayerCost(**{**as_dict(COSTS["vision"][0]), "parameter_bytes": 10**12}),) * 6}
    with pytest.raises(
        PlanError, match=r"strategy pinned fits no layout: the smallest \(.*\) needs 5\.\d TiB on one device"
    ):
        baseline("pinned", problem(costs=huge))
