"""The fastest pipeline of a layer table: against every pipeline of small ones, and by its properties on larger ones."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.oracles.template_oracle import (
    TICK_S,
    fastest_s,
    iteration_s,
    num_microbatches,
    pipelines,
    random_table,
    stage_ticks,
    stages_of,
)

from mmcompile.planner.templates.generate import fastest_templates
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers
from mmcompile.planner.templates.line import Line


def check_against_all(table: LayerTable) -> int:
    """Pipelines of 1 to 3 nodes are found where there are any, and none is faster. Returns how many were found."""
    templates = fastest_templates(table, [1, 2, 3])
    for nodes in (1, 2, 3):
        least_s = fastest_s(table, nodes)
        assert (nodes in templates) == (least_s is not None)
        if least_s is not None:
            template = templates[nodes]
            stages = stages_of(table, template)
            assert stages in list(pipelines(table, nodes))
            own_s = iteration_s(table, stages)
            assert own_s is not None, f"a stage does not fit its memory: {template}"
            assert round(own_s / TICK_S) == round(least_s / TICK_S), f"not the fastest: {template}"
            assert template.gap == 0.0
            assert template.iteration_s(num_microbatches(table, stages)) == pytest.approx(least_s, abs=1e-12)
            assert [round(stage.seconds / TICK_S) for stage in template.stages] == [
                stage_ticks(table, stage) for stage in stages
            ]
    return len(templates)


@pytest.mark.parametrize("block", range(10))
def test_no_pipeline_of_a_small_chain_is_faster(block: int) -> None:
    """30 chains of up to 8 layers on up to 3 nodes of up to 2 devices; half of them with scarce memory."""
    found = 0
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(seed)
        layers = rng.randint(1, 8)
        first = rng.randint(0, layers - 1)
        # One chain, or an encoder in front of one.
        parts = (layers,) if first == 0 or rng.random() < 0.6 else (first, layers - first)
        found += check_against_all(random_table(rng, parts, rng.choice((1, 2)), memory=rng.random() < 0.5))
    assert found >= 30


@pytest.mark.parametrize("block", range(6))
def test_no_pipeline_of_small_branching_chains_is_faster(block: int) -> None:
    """20 times one or two towers that enter a language model at its start or in the middle."""
    found = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        towers = rng.choice((1, 2))
        parts = (*(rng.randint(1, 4 - towers) for _ in range(towers)), rng.randint(1, 4))
        middle = rng.random() < 0.6
        found += check_against_all(
            random_table(rng, parts, rng.choice((1, 2)), memory=rng.random() < 0.5, middle=middle)
        )
    assert found >= 10


def test_nodes_of_four_devices() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        check_against_all(random_table(rng, (5,), 4, memory=seed % 2 == 0))


def equal_layers(layers: int, *, devices: tuple[int, ...] = (1,), per_node: int = 1, saved: int = 0) -> LayerTable:
    shared = tuple(
        SharedLayers(
            devices=count,
            forward_s=(1e-3 / count,) * layers,
            backward_s=(2e-3 / count,) * layers,
            parameter_bytes=(10,) * layers,
            activation_bytes=(saved,) * layers,
        )
        for count in devices
    )
    chain = ChainLayers(name="lm", shared=shared)
    return LayerTable(chains=(chain,), devices_per_node=per_node, memory_bytes=100 if saved else None)


def test_equal_stages_take_as_long_as_1f1b_takes() -> None:
    """(N_b + S - 1)(F + B), by hand."""
    template = fastest_templates(equal_layers(8), [4])[4]
    assert [(stage.first, stage.last) for stage in template.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    for microbatches in (4, 16, 100):
        assert template.iteration_s(microbatches) == pytest.approx((microbatches + 3) * 6e-3)


def test_devices_that_share_well_share_stages() -> None:
    template = fastest_templates(equal_layers(8, devices=(1, 2, 4), per_node=4), [2])[2]
    assert [stage.devices for stage in template.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_stages_far_from_the_loss_get_fewer_layers_where_memory_is_scarce() -> None:
    """100 bytes: 10 a layer, and 9 for each of its microbatches in flight."""
    assert [s.last - s.first for s in fastest_templates(equal_layers(9, saved=0), [3])[3].stages] == [3, 3, 3]
    scarce = fastest_templates(equal_layers(9, saved=9), [3])[3]
    for depth, stage in enumerate(reversed(scarce.stages)):
        assert (stage.last - stage.first) * (10 + 9 * (depth + 1)) <= 100
    assert [s.last - s.first for s in scarce.stages] == [2, 3, 4]


def test_all_sizes_at_once_are_the_sizes_one_by_one() -> None:
    table = random_table(random.Random(5), (20,), 4, memory=False)
    together = fastest_templates(table, range(1, 7))
    assert list(together) == [1, 2, 3, 4, 5, 6]
    for nodes, template in together.items():
        alone = fastest_templates(table, [nodes])[nodes]
        microbatches = num_microbatches(table, stages_of(table, template))
        assert microbatches == num_microbatches(table, stages_of(table, alone))
        assert alone.iteration_s(microbatches) == pytest.approx(template.iteration_s(microbatches), abs=1e-12)


@pytest.mark.parametrize("memory", [None, 60])
def test_larger_pipelines_use_every_device_once_and_no_stage_spans_nodes(memory: int | None) -> None:
    rng = random.Random(1)
    table = random_table(rng, (10, 6, 24), 4, memory=False, middle=True)
    table = LayerTable(chains=table.chains, devices_per_node=4, memory_bytes=memory)
    for nodes, template in fastest_templates(table, [2, 3]).items():
        assert [device for stage in template.stages for device in stage.devices] == list(range(4 * nodes))
        assert all(len({device // 4 for device in stage.devices}) == 1 for stage in template.stages)
        for chain in table.chains:
            own = [stage for stage in template.stages if stage.chain == chain.name]
            assert (own[0].first, own[-1].last) == (0, chain.num_layers)
            assert all(a.last == b.first for a, b in pairwise(own))
        stages = stages_of(table, template)
        own_s = iteration_s(table, stages)
        assert own_s is not None
        assert own_s == pytest.approx(template.iteration_s(num_microbatches(table, stages)), abs=1e-12)
        assert 0.0 <= template.gap < 0.2


@pytest.mark.parametrize("seed", range(4))
def test_the_gap_of_larger_branching_chains_is_true(seed: int) -> None:
    """Against thousands of pipelines of two towers and a language model: none is faster than the bound."""
    table = random_table(random.Random(seed), (7, 7, 9), 2, memory=seed % 2 == 1, middle=seed > 1)
    least_s = fastest_s(table, 3)
    found = fastest_templates(table, [3])
    assert (3 in found) == (least_s is not None)
    if least_s is not None:
        template = found[3]
        own_s = iteration_s(table, stages_of(table, template))
        assert own_s is not None
        assert own_s * (1 - template.gap) <= least_s + 1e-12
        assert template.gap < 0.2


def test_layers_that_take_no_time_have_a_pipeline() -> None:
    free = SharedLayers(
        devices=1, forward_s=(0.0,) * 3, backward_s=(0.0,) * 3, parameter_bytes=(1,) * 3, activation_bytes=(0,) * 3
    )
    lm = ChainLayers(name="lm", shared=(free,))
    towers = tuple(ChainLayers(name=name, shared=(free,), feeds="lm") for name in ("vision", "audio"))
    for chains in ((lm,), (*towers, lm)):
        template = fastest_templates(LayerTable(chains=chains, devices_per_node=1), [3])[3]
        assert (template.iteration_s(8), template.gap) == (0.0, 0.0)


def test_no_counts_no_templates() -> None:
    assert fastest_templates(equal_layers(3), []) == {}
    assert fastest_templates(equal_layers(3), [0, -1]) == {}


def test_more_nodes_than_layers_have_no_pipeline() -> None:
    assert list(fastest_templates(equal_layers(3), [1, 2, 3, 4, 5])) == [1, 2, 3]


def test_depth_counts_the_longest_path() -> None:
    """A tower that enters in the middle is not behind the stages before its entry."""
    table = random_table(random.Random(0), (2, 6), 1, memory=False)
    tower, lm = table.chains
    late = LayerTable(
        chains=(ChainLayers(name=tower.name, shared=tower.shared, feeds="lm", entry=5), lm), devices_per_node=1
    )
    assert Line.of(table).is_chain
    assert not Line.of(late).is_chain
    stages = stages_of(late, fastest_templates(late, [5])[5])
    assert num_microbatches(late, stages) < 4 * 5
