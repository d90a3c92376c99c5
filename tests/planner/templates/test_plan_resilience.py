"""Templates of a real model's plan, against facts: its layers, and what AdamW holds of them after a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest
import torch
from support.plans.captured_once import CapturedOnce
from support.plans.problem import problem_of
from support.plans.toy_plan import FINGERPRINT, cost, toy_graph, vision_language
from torch import nn
from zoo import FAMILIES

import mmcompile as mm
from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.resilience.instantiate import instantiate
from mmcompile.planner.resilience.membership import MembershipPlan, Stop
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.planner.search.candidate import Candidate
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import SearchSpace
from mmcompile.planner.strategies.search import searched
from mmcompile.planner.templates.plan_resilience import notes_of, plan_resilience

BATCH = FAMILIES["llava"].batch()


def llava() -> nn.Module:
    """Frozen tower, but for its last layer that is used; projector and language model train, with tied embeddings."""
    model = FAMILIES["llava"].build()
    mm.freeze(model, ["projector", "language_model", "*vision_tower*layers.0.*"])
    model.get_submodule("lm_head").weight = model.get_submodule("model.language_model.embed_tokens").weight
    return model


@pytest.fixture(scope="module")
def subject() -> CapturedOnce:
    return CapturedOnce.on(llava(), BATCH)


@pytest.fixture(scope="module")
def phases() -> dict[str, float]:
    return {}


@pytest.fixture(scope="module")
def plan(subject: CapturedOnce, phases: dict[str, float]) -> Plan:
    return subject.plan(
        cluster="6x1xcpu",
        num_microbatches=8,
        projector="with_encoder",
        fault_tolerance=1,
        on_phase=phases.__setitem__,
    )


@pytest.fixture(scope="module")
def resilience(plan: Plan) -> Resilience:
    assert plan.resilience is not None
    return plan.resilience


def layers_of(plan: Plan) -> dict[str, list[tuple[str, int]]]:
    """Chain -> (component, layer), from the segments of its stages."""
    return {
        chain.name: [
            (segment.component, layer)
            for stage in chain.stages
            for segment in stage.segments
            for layer in range(segment.first, segment.last)
        ]
        for chain in plan.chains
    }


def test_a_template_has_every_layer_once_on_devices_of_their_own(plan: Plan, resilience: Resilience) -> None:
    layers = layers_of(plan)
    assert resilience.sizes == (2, 3, 4)
    for template in resilience.templates:
        run = Counter((stage.chain, layer) for stage in template.stages for layer in range(stage.first, stage.last))
        assert run == Counter((name, layer) for name, own in layers.items() for layer in range(len(own)))
        assert [stage.devices for stage in template.stages] == [(device,) for device in range(template.num_nodes)]
    assert {name: len(own) for name, own in resilience.layer_bytes.items()} == {
        name: len(own) for name, own in layers.items()
    }


def test_the_cover_statement_is_true(resilience: Resilience) -> None:
    assert str(resilience.cover) == "any 4..6 nodes can be used in full; below 4 training stops"
    assert (resilience.num_nodes, resilience.devices_per_node) == (6, 1)
    for nodes in range(7):
        ways = [
            sizes
            for count in range(2, 8)
            for sizes in combinations_with_replacement(resilience.sizes, count)
            if sum(sizes) == nodes
        ]
        assert bool(ways) == (nodes >= 4)
        found = instantiate(resilience.job, range(nodes))
        assert isinstance(found, MembershipPlan if nodes >= 4 else Stop)


def test_no_layer_is_lost_with_any_one_node(resilience: Resilience) -> None:
    job = resilience.job
    for nodes in range(4, 7):
        found = instantiate(job, range(nodes))
        assert isinstance(found, MembershipPlan)
        held = {
            node: set(job.needs(len(pipeline.nodes))[part].nonzero()[0].tolist())
            for pipeline in found.pipelines
            for part, node in enumerate(pipeline.nodes)
        }
        for lost in combinations(held, 1):
            assert set().union(*(own for node, own in held.items() if node not in lost)) == set(range(len(job.layers)))


def held_by_adamw(model: nn.Module, names: Iterable[str]) -> int:
    """Bytes of parameters that train and of their optimizer state after a step."""
    parameters = {id(own): own for own in map(model.get_parameter, names) if own.requires_grad}
    if not parameters:
        return 0
    optimizer = torch.optim.AdamW(parameters.values())
    model.zero_grad()
    model(**BATCH).loss.backward()
    optimizer.step()
    tensors = [
        *parameters.values(),
        *(value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)),
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_layer_bytes_are_what_adamw_holds_after_a_step(
    subject: CapturedOnce, plan: Plan, resilience: Resilience
) -> None:
    model, components = subject.model, {component.name: component for component in subject.found.graph.components}
    expected: Mapping[str, tuple[int, ...]] = {
        name: tuple(held_by_adamw(model, components[component].layers[layer].parameters) for component, layer in layers)
        for name, layers in layers_of(plan).items()
    }
    assert resilience.layer_bytes == expected
    tower, text = expected["vision_tower"], expected["language_model"]
    assert tower[0] == 0 < tower[1], "the embeddings of the frozen tower need no copy, the layer that trains does"
    vocabulary = model.get_parameter("lm_head.weight")
    assert vocabulary is model.get_parameter("model.language_model.embed_tokens.weight")
    tied = 3 * vocabulary.numel() * vocabulary.element_size() + 4
    assert text[0] == tied < text[-1], "both layers that use a tied parameter hold it"


def test_a_plan_with_templates_is_told_in_phases_and_survives_json(plan: Plan, phases: dict[str, float]) -> None:
    assert list(phases) == ["capture", "cost", "search", "templates", "links"]
    assert Plan.from_json(plan.to_json()) == plan
    assert "resilience   fault tolerance 1: any 4..6 nodes can be used in full; below 4 training stops" in str(plan)


def test_a_step_is_that_of_all_replicas(subject: CapturedOnce) -> None:
    plan = subject.plan(
        cluster="4x2xcpu",
        num_microbatches=3,
        replicas=2,
        projector="with_language_model",
        fault_tolerance=3,
    )
    found = plan.resilience
    assert found is not None
    assert (found.num_microbatches, found.microbatch_samples) == (6, len(BATCH["input_ids"]))
    assert [template.num_nodes for template in found.templates] == [1]
    assert [stage.devices for stage in found.templates[0].stages] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cluster": "3x1xcpu", "projector": "with_encoder"},
            "a fault tolerance of 1 needs 2 replicas of the model at 2 nodes each, 4 nodes; the cluster has 3: use 4 nodes, or "
            "a fault tolerance of 0",
        ),
        (
            {"cluster": "1x4xH100"},
            "a fault tolerance of 1 needs 2 replicas of the model at 1 nodes each, 2 nodes; the cluster has 1",
        ),
        (
            {"cluster": "4x1xcpu", "num_microbatches": 1},
            "a fault tolerance of 1 needs 2 pipelines with at least one microbatch each, and a step has 1; use 2 microbatches",
        ),
        (
            {"cluster": "4x4xH100", "context_parallel": 2},
            "no templates: their stages do not share tokens, and context_par",
        ),
        ({"cluster": "8x1xH100", "tensor_parallel": 2}, "no templates: stages share tensors inside a node, tensor_par"),
    ],
)
def test_what_cannot_be_promised_is_refused(options: dict[str, Any], message: str, subject: CapturedOnce) -> None:
    asked: dict[str, Any] = {"num_microbatches": 8, "fault_tolerance": 1} | options
    with pytest.raises(PlanError, match=message):
        subject.plan(**asked)


def test_a_negative_fault_tolerance_is_refused(subject: CapturedOnce) -> None:
    with pytest.raises(ConfigError, match="fault_tolerance is -1; give the number of nodes that may fail at once"):
        mm.plan(subject.model, BATCH, cluster="4x1xcpu", fault_tolerance=-1)


def best_of(cluster: str, strategy: str = "auto", global_batch: int | None = None) -> tuple[Problem, Candidate]:
    """The layout of a toy model, of one replica and 4 microbatches."""
    graph, costs = vision_language()
    problem = problem_of(
        graph,
        costs,
        Cluster.parse(cluster),
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        space=SearchSpace(microbatches=(4,)),
        global_batch=global_batch,
    )
    _, best = searched(problem, strategy)
    assert best is not None
    return problem, best


def test_layers_that_run_in_several_stages_have_no_templates() -> None:
    problem, candidate = best_of("4x2xH100", "replicated", global_batch=8)
    with pytest.raises(PlanError, match="this layout runs a layer in several stages at once"):
        plan_resilience(problem, candidate, 1)


def test_a_projector_alone_is_advised_to_join_where_that_helps() -> None:
    """Alone it takes a node for every replica: 6 nodes, where 4 would do."""
    problem, _ = best_of("5x1xH100")
    alone = next(chains for chains in problem.sets if chains.placement == "alone")
    _, best = searched(replace(problem, sets=(alone,)))
    assert best is not None
    with pytest.raises(PlanError, match="use 6 nodes, .*; projector 'with_encoder' instead of 'alone' has templates"):
        plan_resilience(problem, best, 1)
    assert plan_resilience(problem, best, 0).sizes == (3, 4, 5)


def test_what_templates_do_otherwise_is_noted() -> None:
    problem, candidate = best_of("4x1xH100")
    found = plan_resilience(problem, candidate, 1)
    assert list(notes_of(found, candidate, constrained=False)) == []
    (note,) = notes_of(found, candidate, constrained=True)
    assert note.startswith("templates have stages of their own: constraints and numbers of stages")
    other = replace(candidate, setting=replace(candidate.setting, schedule="zb-h1"))
    (note,) = notes_of(found, other, constrained=False)
    assert note.endswith("the layout above has zb-h1")


def test_node_counts_that_stay_partly_unused_are_noted() -> None:
    """Two layers make no template of more than two nodes, and a step of 4 microbatches feeds four of them."""
    graph = toy_graph({"language_model": (ComponentKind.LANGUAGE_MODEL, 2)}, [])
    where = Cluster.parse("12x1xH100")
    problem = problem_of(
        graph, {"language_model": (cost(90),) * 2}, where, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=4
    )
    _, best = searched(problem)
    assert best is not None
    found = plan_resilience(problem, best, 1)
    assert found.sizes == (1, 2) and found.cover.uncovered == (9, 10, 11, 12)
    (note,) = notes_of(found, best, constrained=False)
    assert note.startswith("templates: a step has 4 microbatches") and note.endswith("6 would do")
