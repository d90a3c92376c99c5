"""All templates of a cluster, their text and JSON, and what is said when there are none."""

from __future__ import annotations

import msgspec
import pytest

from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.resilience.nodes import Cover
from mmcompile.planner.resilience.template import Template, format_templates
from mmcompile.planner.templates.generate import generate
from mmcompile.planner.templates.layer_table import ChainLayers, LayerTable, SharedLayers

GIB = 2**30


def shared(layers: int, devices: int = 1, *, held: int = 10, saved: int = 1) -> SharedLayers:
    return SharedLayers(
        devices=devices,
        forward_s=(1e-3 / devices,) * layers,
        backward_s=(2e-3 / devices,) * layers,
        parameter_bytes=(held * GIB // devices,) * layers,
        activation_bytes=(saved * GIB // devices,) * layers,
    )


def chain(
    layers: int, memory: int | None = None, *, per_node: int = 1, devices: tuple[int, ...] = (1,), **sizes: int
) -> LayerTable:
    return LayerTable(
        chains=(ChainLayers(name="lm", shared=tuple(shared(layers, count, **sizes) for count in devices)),),
        devices_per_node=per_node,
        memory_bytes=None if memory is None else memory * GIB,
    )


def test_sizes_run_from_the_fewest_nodes_that_hold_a_replica() -> None:
    """8 layers of 11 GiB, in 40 GiB: 3 a stage, fewer where more microbatches are in flight."""
    templates = generate(chain(8, memory=40), 9, 1)
    assert list(templates) == [3, 4, 5, 6]
    assert all(template.num_nodes == count for count, template in templates.items())
    assert str(Cover.of(templates, 9, 1)) == "any 6..9 nodes can be used in full; below 6 training stops"


def test_sizes_without_a_pipeline_are_missing_and_the_cover_says_so() -> None:
    """3 layers make no more than 3 stages."""
    templates = generate(chain(3), 8, 0)
    assert list(templates) == [1, 2, 3]
    Cover.of(templates, 8, 0).check()
    alone = generate(chain(3, memory=24), 8, 0)
    assert list(alone) == [2, 3]


@pytest.mark.parametrize(
    ("table", "num_nodes", "text"),
    [
        (
            chain(4, memory=8),
            4,
            "no template: a replica fits in no number of nodes up to 4: layer 0 of lm needs 11.0 GiB on a device that has "
            "8.0 GiB; use recomputation, smaller microbatches or larger devices",
        ),
        (
            chain(4, memory=5, per_node=2, devices=(1, 2)),
            4,
            "no template: a replica fits in no number of nodes up to 4: layer 0 of lm needs 5.5 GiB on each of 2 devices that "
            "have 5.0 GiB; use recomputation, smaller microbatches or larger devices",
        ),
        (
            chain(8, memory=20),
            4,
            "no template: a replica fits in no number of nodes up to 4: parameters, gradients and optimizer state are "
            "80.0 GiB, and stages far from the loss keep a microbatch of activations for each stage behind them, in 20.0 GiB "
            "a device; use recomputation, smaller microbatches or more nodes",
        ),
        (
            chain(3, per_node=4),
            4,
            "no template: a replica fits in no number of nodes up to 4: a node holds 4 stages or more, and 3 layers make no more "
            "than 3; use fewer nodes in a pipeline, or let a stage have more devices",
        ),
        (
            chain(8, per_node=3, devices=(2,)),
            2,
            "no template: a replica fits in no number of nodes up to 2: stages of 2 devices do not add up to nodes of 3",
        ),
    ],
)
def test_when_nothing_fits(table: LayerTable, num_nodes: int, text: str) -> None:
    with pytest.raises(PlanError) as error:
        generate(table, num_nodes, 0)
    assert str(error.value) == text


def test_more_chains_than_devices() -> None:
    tower = ChainLayers(name="vision", shared=(shared(2),), feeds="lm")
    table = LayerTable(chains=(tower, ChainLayers(name="lm", shared=(shared(2),))), devices_per_node=1)
    assert list(generate(table, 4, 0)) == [2, 3, 4]
    with pytest.raises(
        PlanError, match="2 chains need a device each, and there are 1; use more nodes, or colocate components"
    ):
        generate(table, 1, 0)


def test_replicas_that_do_not_fit() -> None:
    with pytest.raises(
        PlanError, match="a fault tolerance of 3 needs 4 replicas of the model at 3 nodes each, 12 nodes"
    ):
        generate(chain(8, memory=40), 9, 3)
    with pytest.raises(ConfigError, match="fault tolerance is -1"):
        generate(chain(8), 9, -1)


def test_templates_survive_json() -> None:
    templates = generate(chain(8, memory=40), 9, 1)
    assert msgspec.json.decode(msgspec.json.encode(templates), type=dict[int, Template]) == templates


def test_templates_print() -> None:
    templates = generate(chain(8, per_node=2, devices=(1, 2)), 2, 0)
    assert str(templates[2]) == "2 nodes: lm[0:4]@0-1 lm[4:8]@2-3, slowest 6.00 ms"
    assert format_templates(templates.values()) == (
        "nodes  stages  devices a stage  slowest  fill  gap\n"
        "    1       1                2  12.0 ms  0 ms    0\n"
        "    2       2                2  6.00 ms  6 ms    0"
    )
