"""Layer tables: what they refuse, JSON, and prices that are those of the planner."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.plans.problem import problem_of
from support.plans.sized_plan import vision_language_72b
from support.plans.toy_plan import FINGERPRINT, cost, toy_graph

from mmcompile.costmodel.cluster import Cluster
from mmcompile.errors import PlanError
from mmcompile.ir.graph import ComponentKind
from mmcompile.planner.resilience.nodes import Cover
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, SearchSpace, Setting
from mmcompile.planner.templates.generate import generate
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers
from mmcompile.planner.templates.plan_resilience import layer_table

SHARED = SharedLayers(
    devices=1, forward_s=(1.0, 2.0), backward_s=(2.0, 4.0), parameter_bytes=(5, 5), activation_bytes=(1, 1)
)
LM = ChainLayers(name="lm", shared=(SHARED,))
TOWER = ChainLayers(name="vision", shared=(SHARED,), feeds="lm", entry=1)


def table(*chains: ChainLayers, devices_per_node: int = 2) -> LayerTable:
    return LayerTable(chains=chains, devices_per_node=devices_per_node)


@pytest.mark.parametrize(
    ("chains", "text"),
    [
        ((), "a layer table without chains has nothing to plan"),
        ((TOWER,), "chain vision is last, so it ends in the loss, but feeds lm"),
        ((LM, LM), "chain lm feeds None; it must feed one of lm"),
        ((replace(TOWER, feeds="audio"), LM), "chain vision feeds audio; it must feed one of lm"),
        ((replace(TOWER, entry=2), LM), "chain vision enters lm at layer 2; its layers are 0 to 1"),
        (
            (replace(TOWER, shared=(replace(SHARED, devices=2),)), LM),
            r"chain lm is priced on \(1,\) devices, vision on \(2,\)",
        ),
        (
            (replace(LM, shared=(replace(SHARED, devices=4),)),),
            r"chain lm is priced on \(4,\) devices; give rising counts up to the 2 of a node",
        ),
        (
            (replace(LM, shared=(replace(SHARED, activation_bytes=(1,)),)),),
            r"chain lm on 1 devices has columns of \[1, 2\] layers",
        ),
        (
            (replace(LM, shared=(replace(SHARED, forward_s=(1.0, -2.0)),)),),
            "chain lm on 1 devices has a layer of negative cost",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(chains: tuple[ChainLayers, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        table(*chains)


def test_nodes_without_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="a layer table has 0 devices a node; give 1 or more"):
        table(LM, devices_per_node=0)


def test_a_table_survives_json() -> None:
    value = table(TOWER, LM)
    assert msgspec.json.decode(msgspec.json.encode(value), type=LayerTable) == value


def problem_of_72b(cluster: str) -> Problem:
    graph, costs = vision_language_72b()
    where = Cluster.parse(cluster)
    return problem_of(
        graph,
        costs,
        where,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        global_batch=64,
        space=SearchSpace.everything(where),
        projector="with_encoder",
    )


def test_prices_are_those_of_the_planner() -> None:
    problem, setting = problem_of_72b("16x8xH100"), Setting(num_microbatches=64, samples=1.0)
    (chains,) = [each for each in problem.sets if each.placement == "with_encoder"]
    value = layer_table(problem, chains, setting)
    assert [(chain.name, chain.num_layers, chain.feeds, chain.entry) for chain in value.chains] == [
        ("vision", 28, "language_model", 0),
        ("language_model", 82, None, 0),
    ]
    assert value.devices == (1, 2, 4, 8)
    assert value.memory_bytes == problem.cluster.device.memory_bytes
    for spec, chain in zip(chains.chains, value.chains, strict=True):
        for shared in chain.shared:
            priced = problem.prices.priced(spec, Degrees(tp=shared.devices), setting)
            assert sum(shared.forward_s) + sum(shared.backward_s) == pytest.approx(float(priced.total_s[-1]))
            assert sum(shared.activation_bytes) == priced.saved_bytes[-1]
            assert sum(shared.parameter_bytes) >= priced.parameter_bytes[-1] + 3 * priced.trainable_bytes[-1]


def test_what_is_computed_again_is_held_while_it_is() -> None:
    problem = problem_of_72b("16x8xH100")
    problem = replace(problem, space=replace(problem.space, tp=(8,)))
    chains = problem.sets[0]
    kept = layer_table(problem, chains, Setting(num_microbatches=64, samples=1.0))
    again = layer_table(problem, chains, Setting(num_microbatches=64, samples=1.0, recompute="full"))
    assert kept.chains[-1].shared[0].working_bytes == 0 < again.chains[-1].shared[0].working_bytes
    assert sum(again.chains[-1].shared[0].activation_bytes) < sum(kept.chains[-1].shared[0].activation_bytes)
    assert again.devices == (8,)


def test_a_real_size_gets_templates() -> None:
    """72B parameters with AdamW in bfloat16 are 8 bytes each: 576 GB, a node of 8 x 80 GB with nothing else."""
    problem = problem_of_72b("8x8xH100")
    value = layer_table(problem, problem.sets[0], Setting(num_microbatches=64, samples=1.0, recompute="full"))
    templates = generate(value, 8, 1)
    assert list(templates) == list(range(min(templates), 8 - min(templates) + 1))
    assert all(template.gap == 0.0 for template in templates.values())
    Cover.of(templates, 8, 1).check()


def test_a_chain_that_feeds_two_others_is_refused() -> None:
    graph = toy_graph(
        {
            "vision": (ComponentKind.ENCODER, 2),
            "projector": (ComponentKind.PROJECTOR, 1),
            "language_model": (ComponentKind.LANGUAGE_MODEL, 2),
        },
        [("vision", "projector"), ("projector", "language_model"), ("vision", "language_model")],
    )
    costs = {"vision": (cost(50),) * 2, "projector": (cost(5),), "language_model": (cost(90),) * 2}
    where = Cluster.parse("2x2xH100")
    problem = problem_of(graph, costs, where, dtype="bfloat16", fingerprint=FINGERPRINT, num_microbatches=4)
    (alone,) = [each for each in problem.sets if each.placement == "alone"]
    with pytest.raises(
        PlanError, match="chain vision feeds projector and language_model, and a template's chain feeds one"
    ):
        layer_table(problem, alone, Setting(num_microbatches=4, samples=1.0))
