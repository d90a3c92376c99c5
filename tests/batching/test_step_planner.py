"""From samples to a step plan, on real captures: who computes what, which rows travel, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from support.parity.layouts import PARTS
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.registry import balancer
from mmcompile.batching.sample_costs import costs_of_samples
from mmcompile.batching.step_plan import StepPlan
from mmcompile.batching.step_planner import StepPlanner
from mmcompile.captured_model import captured_step
from mmcompile.codegen.program_cache import Patterns
from mmcompile.data.collate import Sample, Value, collate
from mmcompile.errors import BatchError, PlanError
from mmcompile.planner.plan.placement import Placement
from mmcompile.planner.plan.plan import Plan

MICROBATCHES = 2


class Dealt(Balancer):
    """Samples dealt out to buckets in turn, encoders one slot ahead where they can be."""

    name: ClassVar[str] = "dealt"

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        microbatch, replica = np.divmod(np.arange(costs.num_samples) % grid.num_buckets, grid.num_replicas[-1])
        early = np.maximum(microbatch - 1, 0)
        encoders = [np.arange(costs.num_samples) % count for count in grid.num_replicas[:-1]]
        return assignment_of(costs, grid, [*encoders, replica], [*(early for _ in encoders), microbatch])


@functools.cache
def _family(name: str) -> tuple[Plan, Patterns, Placement, tuple[Sample, ...]]:
    """A plan with three replicas of the encoder and two of the language model, and samples for it."""
    model = ALL[name].build(torch.float64)
    drawn = samples(ALL[name], 6, dtype=torch.float64, seed=1)
    batch = collate(drawn[:2])
    plan = mm.plan(
        model,
        batch,
        num_microbatches=MICROBATCHES,
        stages={"language_model": 1, **dict.fromkeys(PARTS[name].encoders, 1)},
        replicas={"language_model": 2, PARTS[name].encoders[0]: 3},
        cluster="1x8xA100-80G",
    )
    return plan, Patterns(model, plan, captured_step(model, batch), batch), Placement.of(plan), tuple(drawn)


def _planner(name: str, chosen: Balancer, placement: Placement | None = None) -> StepPlanner:
    plan, patterns, placed, _ = _family(name)
    costs = functools.partial(costs_of_samples, plan)
    return StepPlanner(placement or placed, patterns, collate=_collate, balancer=chosen, costs=costs)


def _collate(members: Sequence[Sample], names: Sequence[int]) -> dict[str, Value]:
    return collate(members, names=names)


def _members(plan: StepPlan, tower: str) -> list[int]:
    return sorted(sample for m in plan.microbatches if m.tower == tower for sample in m.samples)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("llava", Dealt()),
        pytest.param("qwen2_5_vl", balancer("joint"), marks=pytest.mark.slow),
        pytest.param("mllama", Dealt(), marks=pytest.mark.slow),
    ],
)
def test_every_sample_is_computed_once_and_its_rows_arrive_once(name: str, chosen: Balancer) -> None:
    drawn = _family(name)[-1]
    plan = _planner(name, chosen).plan(1, drawn).plan
    encoder, language = _family(name)[2].towers
    with_media = [i for i, sample in enumerate(drawn) if any(key.startswith("pixel_values") for key in sample)]
    assert _members(plan, language) == list(range(len(drawn)))
    assert _members(plan, encoder) == with_media
    for target in (m for m in plan.microbatches if m.tower == language):
        into = [e for e in plan.exchanges if e.target == target.index]
        for value in {e.target_name for e in into}:
            ranges = sorted(r for e in into if e.target_name == value for r in e.into)
            rows = next(link.shape[0] for link in target.links if link.name == value)
            assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])] and ranges[-1][1] == rows
        sent = {s for e in into for s in plan.microbatches[e.source].samples}
        assert sent.issuperset(s for s in target.samples if s in with_media)


def test_a_lag_is_a_microbatch_of_its_own() -> None:
    plan = _planner("llava", Dealt()).plan(1, _family("llava")[-1]).plan
    late = [m for m in plan.microbatches if m.lag]
    assert late and all(m.number == m.slot + m.lag * MICROBATCHES for m in plan.microbatches)
    keys = [(m.tower, m.replica, m.number) for m in plan.microbatches]
    assert len(set(keys)) == len(keys)


def test_same_samples_same_bytes_once_their_programs_are_captured() -> None:
    drawn = _family("llava")[-1]
    _family("llava")[1].warm_up(_planner("llava", balancer("auto")).microbatches(drawn))
    _planner("llava", balancer("auto")).plan(6, drawn)
    plans = [_planner("llava", balancer("auto")).plan(7, drawn).plan for _ in range(2)]
    assert msgspec.msgpack.encode(plans[0]) == msgspec.msgpack.encode(plans[1])


@pytest.mark.slow
def test_what_the_model_refuses_is_run_in_arrival_order_and_said() -> None:
    with_images, without = (samples(ALL["mllama"], 2, dtype=torch.float64, seed=2, media=(n,)) for n in (1, 0))
    placement = replace(_family("mllama")[2], num_replicas=(1, 1))
    planned = _planner("mllama", Dealt(), placement).plan(1, [*with_images, *without])
    assert planned.balance.startswith("arrival: dealt would need what the model refuses (")
    assert [m.samples for m in planned.plan.microbatches if m.tower == "language_model"] == [(0, 1), (2, 3)]


@pytest.mark.slow
def test_media_are_padded_alike_where_no_order_will_do_and_it_is_said() -> None:
    planned = _planner("mllama", balancer("arrival")).plan(1, _family("mllama")[-1])
    assert planned.balance.startswith("media padded to the largest of the step: ")
    assert "would need what the model refuses (" in planned.balance


def test_errors_call_samples_by_their_place_in_the_step() -> None:
    drawn = [dict(sample) for sample in _family("llava")[-1]]
    labels = drawn[3]["labels"]
    assert isinstance(labels, torch.Tensor)
    drawn[3]["labels"] = labels.to(torch.int32)
    with pytest.raises(BatchError, match=r"'labels' of sample 3 has shape"):
        _planner("llava", balancer("arrival")).plan(1, drawn)


def test_a_step_needs_samples() -> None:
    with pytest.raises(BatchError, match="at least one sample"):
        _planner("llava", balancer("arrival")).plan(1, [])


def test_towers_need_costs() -> None:
    _, patterns, placement, _ = _family("llava")
    with pytest.raises(PlanError, match="need the costs of samples"):
        StepPlanner(placement, patterns, collate=_collate, balancer=balancer("arrival"))
