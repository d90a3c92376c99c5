"""Parameter groups and master weights where layers move between workers; and what cannot be had with fault tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.graphs.hand_stages import HandModel
from support.models.elastic_model import batches
from support.models.grouped_adamw import ADAMW, GROUPS, RATES, scheduled
from support.models.layer_models import OPTIMIZERS, bits, initial, layer, layers, specs
from support.plans.hand_plan import Part, hand_plan

from mmcompile.elastic_run import elastic_job
from mmcompile.errors import ConfigError
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.optim.optimizer import HyperSchedule, OptimizerSpec
from mmcompile.runtime.optim.param_groups import ParameterGroup

SPEC = OptimizerSpec.of(
    OPTIMIZERS["adamw"],
    [ParameterGroup(match="1", lr=1e-3), ParameterGroup(match="*.tied", lr=0.1)],
    master_weights=True,
)


def store_with(spec: OptimizerSpec) -> LayerStore:
    values = initial()
    return LayerStore(specs(values), values, spec)


def train(store: LayerStore, steps: Sequence[int]) -> None:
    """Gradients as the sums of a step leave them: in masters where there are any."""
    for step in steps:
        for name, updated in store.state.optimizer.updated.items():
            generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
            gradient = torch.randn(updated.shape, generator=generator).to(updated.dtype)
            updated.grad = torch.empty_like(updated).copy_(gradient)
        store.state.optimizer.step()


def test_masters_move_with_their_layer() -> None:
    source, target = store_with(SPEC), store_with(SPEC)
    source.hold(layers(0, 1, 5))
    train(source, range(3))
    target.hold(layers(1))
    train(target, [9])  # of another past
    for index in (5, 1, 0):
        target.put(layer(index), source.bundle(layer(index)))
        assert target.digest(layer(index)) == source.digest(layer(index))
    masters = source.state.optimizer.masters or {}
    assert masters.keys() == {"1.half", "5.narrow"}
    assert {"state/master/1.half", "value/1.half"} <= source.bundle(layer(1)).keys()
    source.keep(layers(1))
    for store in (source, target):
        train(store, range(3, 6))
    assert bits(source.bundle(layer(1))) == bits(target.bundle(layer(1)))
    source.clear()
    assert not source.state.optimizer.masters and not source.state.optimizer.updated


def test_groups_have_their_rates_in_a_store() -> None:
    store = store_with(SPEC)
    store.hold(layers(0, 1, 5))
    before = {name: updated.detach().clone() for name, updated in store.state.optimizer.updated.items()}
    train(store, [0])
    for name, updated in store.state.optimizer.updated.items():
        if updated.numel():
            # Adam's first step is as long as the rate, and AdamW decays by a tenth of that.
            rate = 1e-3 if name.startswith("1.") else 0.1 if name == "0.tied" else 1e-2
            moved = float((updated.detach() - before[name] * (1 - rate * 0.1)).abs().max())
            assert moved == pytest.approx(rate, rel=1e-3), name


def test_rates_of_all_groups_follow_from_the_step() -> None:
    rates = HyperSchedule(OptimizerSpec.of(ADAMW, GROUPS), scheduled)
    for step in (1, 2, 5, 3):
        wanted = [base * rate(step - 1) for base, rate in zip((1e-3, 1e-2, 1e-2), RATES, strict=True)]
        assert [settings["lr"] for settings in rates.of(step)] == pytest.approx(wanted)
        assert [settings["weight_decay"] for settings in rates.of(step)] == [0.1, 0.0, 0.1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shard_optimizer": True},
            "shard_optimizer does not go with fault tolerance: a rank that updates alone may die",
        ),
        ({"accumulate": 2}, "accumulate is 2; with fault tolerance a step is one batch"),
    ],
)
def test_what_cannot_be_had(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        elastic_job(
            HandModel(),
            None,
            hand_plan([Part(name="language_model", layers=2, stages=1)]),
            data=batches("map"),
            num_steps=1,
            folder="unused",
            **options,
        )
