"""The search: against all allocations by hand, with fixed counts, on too few devices, on this machine, in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.plans.problem import problem_of
from support.plans.search_plan import search
from support.plans.toy_plan import FINGERPRINT, cost, frozen, toy_graph, vision_language

from mmcompile.costmodel.cluster import Cluster
from mmcompile.costmodel.compute import LayerCost
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.schedule.schedule import build_schedule
from mmcompile.planner.search import combinations
from mmcompile.planner.search.branch_and_bound import TOLERANCE
from mmcompile.planner.search.candidate import assemble
from mmcompile.planner.search.settings import Combination, Degrees, Setting
from mmcompile.planner.search.splitter import Splitter

ENCODER, PROJECTOR, LANGUAGE_MODEL = ComponentKind.ENCODER, ComponentKind.PROJECTOR, ComponentKind.LANGUAGE_MODEL
MICROBATCHES = 8

Case = tuple[ModelGraph, dict[str, tuple[LayerCost, ...]]]


def find(case: Case, cluster: str | Cluster, **options: Any) -> Plan:
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    options = {"num_microbatches": MICROBATCHES, "dtype": "bfloat16", **options}
    return search(*case, where, fingerprint=FINGERPRINT, **options)


def three_encoders() -> Case:
    """Vision, audio and video into one language model; audio trains, video has no projector."""
    kinds = {
        "vision": (ENCODER, 4),
        "audio": (ENCODER, 3),
        "video": (ENCODER, 2),
        "vision_projector": (PROJECTOR, 1),
        "audio_projector": (PROJECTOR, 1),
        "language_model": (LANGUAGE_MODEL, 6),
    }
    edges = [
        ("vision", "vision_projector"),
        ("audio", "audio_projector"),
        ("vision_projector", "language_model"),
        ("audio_projector", "language_model"),
        ("video", "language_model"),
    ]
    costs = {
        "vision": (frozen(120),) * 4,
        "audio": (cost(30, passes=False), *(cost(30),) * 2),
        "video": (frozen(80),) * 2,
        "vision_projector": (cost(5, passes=False),),
        "audio_projector": (cost(5),),
        "language_model": (cost(100),) * 6,
    }
    return toy_graph(kinds, edges), costs


def encoder_decoder() -> Case:
    """A vision encoder into a text encoder into a decoder that reads both."""
    kinds = {"vision": (ENCODER, 3), "text": (ENCODER, 3), "decoder": (LANGUAGE_MODEL, 4)}
    edges = [("vision", "text"), ("text", "decoder"), ("vision", "decoder")]
    costs = {"vision": (cost(50),) * 3, "text": (cost(40),) * 3, "decoder": (cost(60),) * 4}
    return toy_graph(kinds, edges), costs


def text_only(layers: int = 8) -> Case:
    return toy_graph({"language_model": (LANGUAGE_MODEL, layers)}, []), {"language_model": (cost(100),) * layers}


CASES = {
    "vision_language": vision_language(),
    "three_encoders": three_encoders(),
    "encoder_decoder": encoder_decoder(),
    "text_only": text_only(),
}


def check_whole(plan: Plan, case: Case) -> None:
    """Every layer is in exactly one stage, stages and ranks are in order, depths fall along the edges."""
    graph, costs = case
    covered = {
        (segment.component, layer)
        for stage in plan.stages
        for segment in stage.segments
        for layer in range(segment.first, segment.last)
    }
    assert len(covered) == sum(s.last - s.first for stage in plan.stages for s in stage.segments)
    assert covered == {(c.name, layer.index) for c in graph.components for layer in c.layers}
    assert [name for stage in plan.stages for name in stage.layer_names] == [
        f"{segment.component}.layers.{layer}"
        for stage in plan.stages
        for segment in stage.segments
        for layer in range(segment.first, segment.last)
    ]
    assert plan.chains[-1].components[-1] == graph.loss_component
    assert plan.stages[-1].depth == 0
    for chain in plan.chains:
        assert [stage.name for stage in chain.stages] == [f"{chain.name}.{i}" for i in range(len(chain.stages))]
        assert all(a.depth > b.depth for a, b in zip(chain.stages, chain.stages[1:], strict=False))
    assert plan.links == () and plan.shared_values == ()
    assert plan.predicted.iteration_s >= plan.predicted.lower_bound_s * (1 - 1e-9)
    assert 0 <= plan.predicted.bubble < 1
    forward = sum(layer.forward_flops for layers in costs.values() for layer in layers)
    assert forward > 0 and sum(stage.prediction.forward_s for stage in plan.stages) > 0
    build_schedule(plan.stages, [])


@pytest.mark.parametrize("cluster", ["1x1xH100", "1x2xH100", "1x3xL4", "1x6xH100", "2x4xA100-40G", "3x8xH100"])
@pytest.mark.parametrize("name", CASES)
def test_plans_are_whole_and_deterministic(name: str, cluster: str) -> None:
    plan = find(CASES[name], cluster)
    check_whole(plan, CASES[name])
    assert plan.num_ranks <= plan.cluster.num_devices
    assert find(CASES[name], cluster) == plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("name", "cluster"),
    [("vision_language", "1x6xH100"), ("three_encoders", "2x4xL4"), ("encoder_decoder", "1x7xH100")],
)
def test_no_allocation_beats_the_plan_by_more_than_the_tolerance(name: str, cluster: str) -> None:
    where = Cluster.parse(cluster)
    problem = problem_of(*CASES[name], where, num_microbatches=MICROBATCHES, dtype="bfloat16", fingerprint=FINGERPRINT)
    setting = Setting(num_microbatches=MICROBATCHES, samples=1)
    splitter = Splitter(problem=problem)
    best = float("inf")
    for chains in problem.sets:
        degrees = (Degrees(),) * len(chains.chains)
        for counts in product(*(range(1, len(chain.layers) + 1) for chain in chains.chains)):
            if sum(counts) <= where.num_devices:
                parts = splitter.parts(
                    Combination(chains=chains, setting=setting, degrees=degrees, counts=counts), None
                )
                assert not isinstance(parts, int)
                candidate = assemble(problem, chains, setting, degrees, parts)
                best = min(best, candidate.timelines()[0].makespan_s)
    plan = find(CASES[name], cluster)
    assert plan.predicted.lower_bound_s <= best
    assert (plan.predicted.iteration_s - plan.predicted.reduce_s) * (1 - TOLERANCE) <= best


@pytest.mark.parametrize("name", ["three_encoders", "encoder_decoder", "vision_language"])
def test_target_times_find_nearly_the_same_plan_as_all_allocations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = find(CASES[name], "1x8xH100")
    monkeypatch.setattr(combinations, "MAX_LISTED", 0)
    coupled = find(CASES[name], "1x8xH100")
    assert coupled.predicted.iteration_s <= everything.predicted.iteration_s * 1.03
    assert any("combinations" in note for note in coupled.notes)


def test_encoders_get_ranks_of_their_own_before_the_language_model() -> None:
    plan = find(three_encoders(), "2x4xH100")
    assert [stage.ranks for stage in plan.stages] == [(rank,) for rank in range(plan.num_ranks)]
    assert [chain.name for chain in plan.chains if chain.name != "vision_projector"][-1] == "language_model"


def test_frozen_encoders_only_run_forward_and_frozen_layers_behind_training_ones_pass_gradient() -> None:
    graph, costs = vision_language()
    costs = {**costs, "language_model": (cost(100, trains=False),) * 8}
    plan = find((graph, costs), "1x4xH100", projector="with_language_model")
    by_name = {stage.name: stage for stage in plan.stages}
    assert not by_name["vision.0"].has_backward
    assert by_name["vision.0"].prediction.times.backward_s == 0
    assert by_name["vision.0"].prediction.in_flight == 0
    last = plan.stages[-1]
    assert last.has_backward and last.prediction.weight_grad_s == 0 and last.prediction.gradient_bytes == 0


def test_memory_is_counted_per_stage_and_in_flight() -> None:
    plan = find(text_only(), "1x4xH100", stages={"language_model": 4})
    for stage, in_flight in zip(plan.stages, (4, 3, 2, 1), strict=True):
        predicted = stage.prediction
        assert predicted.in_flight == in_flight
        assert predicted.parameter_bytes == predicted.gradient_bytes == 2 * 10**6
        assert predicted.optimizer_bytes == 4 * 10**6
        assert predicted.activation_bytes == in_flight * 2 * 10**6
    # Two microbatches are never more than two in flight.
    few = find(text_only(), "1x4xH100", stages={"language_model": 4}, num_microbatches=2)
    assert [stage.prediction.in_flight for stage in few.stages] == [2, 2, 2, 1]


def test_memory_moves_the_cuts_and_too_little_of_it_is_explained() -> None:
    case = (
        toy_graph({"language_model": (LANGUAGE_MODEL, 4)}, []),
        {
            # Equal times, but the first layer holds four of six gigabytes.
            "language_model": tuple(
                cost(100, trains=False, parameter_bytes=size, activation_bytes=0)
                for size in (4 * 10**9, *(10**9,) * 2, 10**8)
            )
        },
    )
    roomy, tight = (
        replace(cluster, device=replace(cluster.device, memory_bytes=size))
        for cluster in [Cluster.parse("1x2xH100")]
        for size in (8 * 10**9, 45 * 10**8)
    )
    assert [s.segments[0].last for s in find(case, roomy).stages] == [2, 4]
    assert [s.segments[0].last for s in find(case, tight).stages] == [1, 4]
    starved = replace(tight, device=replace(tight.device, memory_bytes=10**9))
    with pytest.raises(PlanError) as caught:
        find(case, starved)
    assert str(caught.value).splitlines() == [
        "no plan fits 2 devices of 1x2xH100: they have 953.7 MiB each, 1.9 GiB together",
        "parameters, gradients and optimizer state need 5.7 GiB: more than there is",
        "  language_model: 5.7 GiB, and 0 B of activations a microbatch (recompute none); biggest layer 3.7 GiB",
        "not tried, for 0 s were up: recompute full; tensor parallelism; all of these together; up to 64 times the nodes; "
        "up to 64 times the nodes with recompute full, tensor parallelism",
    ]


def test_too_big_allocations_are_named_among_the_rejected() -> None:
    graph, costs = text_only()
    costs = {"language_model": (cost(100, parameter_bytes=10**9),) * 8}
    cluster = Cluster.parse("1x8xH100")
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=9 * 10**9))
    plan = find((graph, costs), cluster, num_microbatches=1)
    assert len(plan.stages) > 2
    assert any("a stage needs more than the 8.4 GiB of a device" in rejected.reason for rejected in plan.rejected)


@pytest.mark.parametrize("projector", ["with_encoder", "alone", "with_language_model"])
def test_the_projector_goes_where_it_is_told(projector: str) -> None:
    plan = find(vision_language(), "1x4xH100", projector=projector)
    chains = {
        "with_encoder": [("vision", "projector"), ("language_model",)],
        "alone": [("vision",), ("projector",), ("language_model",)],
        "with_language_model": [("vision",), ("projector", "language_model")],
    }
    assert [chain.components for chain in plan.chains] == chains[projector]
    stage = next(s for s in plan.stages if any(segment.component == "projector" for segment in s.segments))
    assert stage.has_backward


def test_counts_are_fixed_by_chain_name() -> None:
    plan = find(vision_language(), "1x8xH100", stages={"vision": 2, "language_model": 3})
    assert {chain.name: len(chain.stages) for chain in plan.chains if chain.name != "projector"} == {
        "vision": 2,
        "language_model": 3,
    }
    alone = find(vision_language(), "1x8xH100", stages={"projector": 1})
    assert [chain.name for chain in alone.chains] == ["vision", "projector", "language_model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": {"visoin": 2}}, "no chain 'visoin' to give 2 stages; chains are vision, language_model, projector"),
        ({"stages": {"language_model": 99}}, "language_model has 9 layers, cannot be 99 stages; use 1 to 9"),
        ({"stages": {"language_model": 0}}, "language_model has 9 layers, cannot be 0 stages; use 1 to 9"),
        (
            {"stages": {"language_model": 9, "projector": 1}},
            "no placement of the projector gives stages {'language_model': 9, 'projector': 1}; "
            "chains are vision (7 layers), ",
        ),
        (
            {"stages": {"language_model": 4}},
            "stages (language_model 4, at least one for every other chain) need 5 devices, got 4 of 1x4xH100; "
            "ask for fewer stages or a larger cluster",
        ),
    ],
)
def test_impossible_wishes_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        find(vision_language(), "1x4xH100", **options)
    assert message in str(caught.value)


def test_a_dtype_the_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="device L4 has no peak for dtype 'float64'"):
        find(vision_language(), "1x4xL4", dtype="float64")


def test_fewer_devices_than_chains_share_them_by_time() -> None:
    plan = find(three_encoders(), "1x2xH100")
    assert plan.num_ranks == 2
    assert plan.stages[-1].ranks == (1,)
    load = [0.0, 0.0]
    for stage in plan.stages:
        load[stage.ranks[0]] += stage.prediction.times.total_s
    assert max(load) < 0.75 * sum(load)
    assert plan.rejected[0].what == "a device for every chain"
    assert [chain.name for chain in plan.chains] == ["vision", "audio", "video", "language_model"]
    single = find(three_encoders(), "1x1xH100")
    assert single.num_ranks == 1
    assert single.predicted.bubble == pytest.approx(0.0, abs=1e-9)
    assert single.predicted.gap == pytest.approx(0.0, abs=1e-9)


def test_processes_may_exceed_the_cores_of_this_machine_and_the_plan_says_so() -> None:
    plan = find(vision_language(), Cluster.local(2), stages={"language_model": 3}, projector="with_encoder")
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,), (3,)]
    assert plan.rejected[0].what == "a core for every process"
    assert "4 processes share 2 cores" in plan.rejected[0].reason
    check_whole(plan, vision_language())


def test_values_that_enter_the_middle_shorten_the_encoders_warm_up() -> None:
    early = find(encoder_decoder(), "1x8xH100", stages={"vision": 1, "text": 1, "decoder": 4})
    late = find(
        encoder_decoder(),
        "1x8xH100",
        stages={"vision": 1, "text": 1, "decoder": 4},
        entries={("text", "decoder"): 2, ("vision", "decoder"): 3},
    )
    assert [stage.depth for stage in early.stages] == [5, 4, 3, 2, 1, 0]
    assert [stage.depth for stage in late.stages] == [3, 2, 3, 2, 1, 0]


def test_the_closest_losers_are_listed_with_their_times() -> None:
    plan = find(vision_language(), "1x6xH100")
    assert 1 <= len(plan.rejected) <= 6
    assert all("ms" in rejected.reason for rejected in plan.rejected)
    assert any("projector with_" in rejected.what or "projector alone" in rejected.what for rejected in plan.rejected)
