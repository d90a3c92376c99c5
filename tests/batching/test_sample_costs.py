"""Costs of single samples: from what a processor returned as from shapes, and together what the plan predicts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from support.oracles.sample_shapes import shapes_of_samples
from support.plans.captured_once import CapturedOnce
from zoo.parts import AUDIO, IMAGE

from mmcompile.batching.balance.assignment import SampleCosts
from mmcompile.batching.sample_costs import costs_of_samples, costs_of_shapes
from mmcompile.data.sample import SampleShape
from mmcompile.errors import PlanError
from mmcompile.planner.plan.plan import Plan

ENCODERS = {"llava": "vision_tower", "qwen2_5_vl": "visual", "qwen2_audio": "audio_tower", "mllama": "vision_model"}
IN_SEQUENCE = {"llava": (IMAGE,), "qwen2_5_vl": (IMAGE,), "qwen2_audio": (AUDIO,), "mllama": ()}
"""Ids in the sequence that stand for rows of the encoder; Mllama's images are attended to from outside."""


@cache
def planned(family: str, projector: str | None = None) -> Plan:
    return _captured(family).plan(
        cluster="1x8xH100",
        num_microbatches=2,
        stages={"language_model": 1},
        replicas={"language_model": 2, ENCODERS[family]: 3},
        projector=projector,
    )


@cache
def _captured(family: str) -> CapturedOnce:
    return CapturedOnce.on(zoo.ALL[family].build(), zoo.ALL[family].batch())


def variable(count: int) -> list[zoo.Batch]:
    """Conversations of Qwen2.5-VL with pictures of several sizes, several of some."""
    found: list[zoo.Batch] = []
    for index, sample in enumerate(zoo.samples(zoo.ALL["qwen2_5_vl"], count, seed=1)):
        if "image_grid_thw" in sample:
            grid = sample["image_grid_thw"].clone()
            grid[:, 1] = 4 * (1 + index % 3)
            placeholders = int(grid.prod(dim=1).sum()) // 4
            ids = torch.cat([torch.full((1, placeholders), IMAGE), torch.full((1, 7 + index), 5)], dim=1)
            sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": grid}
        found.append(sample)
    return found


def equal(one: SampleCosts, two: SampleCosts) -> None:
    assert one.components == two.components
    np.testing.assert_allclose(one.costs, two.costs, rtol=1e-12)
    assert one.lengths is not None and two.lengths is not None
    assert (one.lengths == two.lengths).all()


def test_processed_samples() -> None:
    samples: list[dict[str, Any]] = [
        {
            "id": 7,
            "input_ids": torch.tensor([[5, 9, 9, 9, 9, 6, 7, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "pixel_values": torch.zeros(16, 1176, dtype=torch.bfloat16),
        },
        {
            "input_ids": torch.tensor([5, 9, 8]),
            "pixel_values": torch.zeros(2, 3, 56, 28),
            "input_features": torch.zeros(1, 80, 3000),
            "feature_attention_mask": torch.arange(3000)[None] < 301,
        },
        {"input_ids": [1, 2, 3]},
    ]
    assert list(shapes_of_samples(samples, placeholders=(9, 8), patch=14)) == [
        SampleShape(name="7", text_tokens=3, images=(16,)),
        SampleShape(name="sample 1", text_tokens=1, images=(8, 8), audios=(1500,)),
        SampleShape(name="sample 2", text_tokens=3),
    ]
    packed = list(shapes_of_samples(samples[1:2], patch=14, packed_sounds=True))
    assert packed[0].audios == (151,)


@pytest.mark.parametrize("family", ENCODERS)
def test_samples_cost_what_their_shapes_cost(family: str) -> None:
    plan, samples = planned(family), zoo.samples(zoo.ALL[family], 8, seed=1)
    samples = [*samples, *variable(6)] if family == "qwen2_5_vl" else samples
    shapes = list(shapes_of_samples(samples, placeholders=IN_SEQUENCE[family], patch=14))
    found = costs_of_samples(plan, samples)
    equal(found, costs_of_shapes(plan, shapes))
    assert found.components == (ENCODERS[family], "language_model")
    assert found.lengths is not None
    assert found.lengths[-1].tolist() == [sample["input_ids"].shape[1] for sample in samples]
    if family == "qwen2_5_vl":
        assert len(set(found.costs[0].tolist())) > 4


@pytest.mark.parametrize("family", ENCODERS)
def test_a_sample_takes_part_in_a_tower_exactly_if_it_carries_its_modality(family: str) -> None:
    samples = zoo.samples(zoo.ALL[family], 8, seed=1)
    carries = [any(name in sample for name in ("pixel_values", "input_features")) for sample in samples]
    assert not all(carries)
    found = costs_of_samples(planned(family), samples).takes_part
    assert found.tolist() == [carries, [True] * 8]


@pytest.mark.parametrize("projector", ["with_encoder", "alone", "with_language_model"])
@pytest.mark.parametrize("family", ["llava", "qwen2_audio"])
def test_samples_of_a_batch_cost_together_what_the_plan_predicts(family: str, projector: str) -> None:
    check_sums(family, planned(family, projector))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama"])
def test_samples_of_other_families_cost_together_what_the_plan_predicts(family: str) -> None:
    check_sums(family, planned(family))


def check_sums(family: str, plan: Plan) -> None:
    """Replicas of an encoder share the samples of both language models' microbatches."""
    chosen = zoo.ALL[family]
    size = replace(chosen.first, samples=1)
    samples = [chosen.draw(size, seed=index) for index in range(chosen.first.samples)]
    found = costs_of_samples(plan, samples)
    towers = {ENCODERS[family]: plan.chains[:-1], "language_model": plan.chains[-1:]}
    for row, (tower, chains) in enumerate(towers.items()):
        assert found.components[row] == tower
        names = {chain.name for chain in chains}
        fixed = sum(rate.seconds.fixed for rate in plan.sample_rates if rate.chain in names)
        predicted = sum(stage.prediction.times.total_s for chain in chains for stage in chain.stages)
        assert found.costs[row].sum() * 2 / chains[0].dp + fixed == pytest.approx(predicted, rel=1e-9)
        assert 0 <= fixed < predicted


def test_only_marked_tokens_count() -> None:
    sample = zoo.ALL["llava"].text_only_batch()
    sample = {name: value[:1] for name, value in sample.items()}
    mask = torch.ones_like(sample["input_ids"])
    mask[:, -4:] = 0
    marked = {**sample, "attention_mask": mask}
    flat = {name: value[0] for name, value in marked.items()}
    bare = {"input_ids": sample["input_ids"][:, :-4]}
    found = costs_of_samples(planned("llava"), [marked, flat, bare])
    assert found.lengths is not None
    assert len(set(found.lengths[-1].tolist())) == len(set(found.costs[-1].tolist())) == 1


def test_no_rows_is_no_image() -> None:
    text = {name: value[:1] for name, value in zoo.ALL["llava"].text_only_batch().items()}
    empty = {**text, "pixel_values": torch.zeros(0, 3, 56, 56)}
    assert costs_of_samples(planned("llava"), [text, empty]).takes_part.tolist() == [[False] * 2, [True] * 2]


def test_five_hundred_samples_are_priced_in_milliseconds() -> None:
    samples = zoo.samples(zoo.ALL["qwen2_5_vl"], 8, seed=1) * 64
    plan = planned("qwen2_5_vl")
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        costs_of_samples(plan, samples)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05  # about 4 ms on one core


def test_a_plan_keeps_its_rates_as_json() -> None:
    plan = planned("llava")
    assert [(rate.chain, rate.geometry.component) for rate in plan.sample_rates] == [
        (chain.name, component) for chain in plan.chains for component in chain.components
    ]
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_without_rates_prices_nothing() -> None:
    bare = replace(planned("llava"), sample_rates=())
    with pytest.raises(PlanError, match="the plan has no rates to price samples with; make it anew"):
        costs_of_samples(bare, [])
    some = replace(bare, sample_rates=planned("llava").sample_rates[-1:])
    with pytest.raises(PlanError, match="the plan has no rate for vision_tower"):
        costs_of_shapes(some, [])


def test_nothing_costs_nothing() -> None:
    samples: list[Mapping[str, torch.Tensor]] = []
    assert costs_of_samples(planned("llava"), samples).num_samples == 0
