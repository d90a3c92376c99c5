"""A step in several calls: the gradients of one step on all samples, whatever the calls, the reduction and the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.plans.hand_replicas import PLACEMENTS
from support.processes.local_ranks import LocalRanks
from torch import Tensor

from mmcompile.batching.accumulation import NOTHING, AccumulatedStep, unit_of
from mmcompile.batching.step_plan import StepPlan
from mmcompile.config import Reduction
from mmcompile.errors import BatchError, CheckpointError, ConfigError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.optimizer import OptimizerSpec

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
SAMPLES = hand_samples(6, images=(0, 3), seed=3)
SPLITS = ((6,), (2, 3, 1), (2, 4))
"""The first calls of some have images that the last has not: ranks then give sums that they computed in earlier calls only."""


def train(
    placement: Placement, split: Sequence[int], reduction: Reduction = "fast", *, shard: bool = False
) -> tuple[dict[str, Tensor], list[float], list[float | None]]:
    """Weights after two equal steps, the mean loss of each step, and squared norms of all calls."""
    torch.manual_seed(0)
    source = HandSource(HandModel(tied=True))
    losses: list[float] = []
    norms: list[float | None] = []
    spec = OptimizerSpec.of(ADAMW)
    with LocalRanks(placement, source, spec, clip_norm=0.3, reduction=reduction, shard_optimizer=shard) as ranks:
        for _ in range(2):
            before = ranks.weights() if losses else {}
            first, total, weight, unit = 0, 0.0, 0.0, 0.0
            for number, count in enumerate(split, 1):
                totals = ranks.step(SAMPLES[first : first + count], update=number == len(split))
                first += count
                norms.append(totals.squared_norm)
                plan, _ = ranks.controller.worker.last or (None, None)
                assert plan is not None
                unit = unit or (plan.num_tokens if len(split) == 1 else unit_of(plan.num_tokens))
                assert plan.total_weight == plan.num_tokens / unit
                total, weight = total + totals.loss, weight + plan.total_weight
                if number < len(split):
                    now = ranks.weights()
                    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())
            losses.append(total / weight)
        return ranks.weights(), losses, norms


@pytest.mark.parametrize(
    ("name", "reduction"), [("crossed", "fast"), ("crossed", "fp64"), ("crossed", "fixed"), ("stacked", "fast")]
)
def test_equals_one_step_on_all_samples(name: str, reduction: Reduction) -> None:
    wanted, losses, norms = train(PLACEMENTS[name], SPLITS[0], reduction)
    for split in SPLITS[1:]:
        got, got_losses, got_norms = train(PLACEMENTS[name], split, reduction, shard=split is SPLITS[2])
        assert got_losses == pytest.approx(losses, rel=1e-12)
        calls = len(split)
        assert [norm for norm in got_norms if norm is not None] == pytest.approx(norms, rel=1e-9)
        assert [norm is None for norm in got_norms] == [*[True] * (calls - 1), False] * 2
        for parameter, tensor in wanted.items():
            torch.testing.assert_close(got[parameter], tensor, rtol=0, atol=1e-11)


ONE_RANK = hand_plan(4, vision=0, audio=0, lm0=0, lm1=0, lm2=0)
DROPOUT = "x = functional.dropout(x, 0.3)"


def one_rank(accumulate: int = 1, model: HandModel | None = None) -> Engine:
    torch.manual_seed(1)
    model = model or HandModel()
    torch.manual_seed(2)
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    source = HandSource(model, fault=DROPOUT)
    return Engine(
        ONE_RANK, source, model=model, optimizer=ADAMW, scheduler=schedule, clip_norm=0.1, accumulate=accumulate
    )


def test_random_numbers_are_those_of_one_step() -> None:
    """One sample a microbatch in both, so that the same samples share a dropout mask."""
    samples = hand_samples(4, images=(1,), seed=5)
    with one_rank() as engine:
        whole = engine.step(samples)
        wanted = engine.state_dict()
    with one_rank() as engine:
        parts = [engine.step(samples[:1], update=False), engine.step(samples[1:])]
        got = engine.state_dict()
    assert [(part.step, part.updated, part.num_samples) for part in parts] == [(1, False, 1), (1, True, 3)]
    mean = sum(part.loss * part.num_tokens for part in parts) / whole.num_tokens
    assert mean == pytest.approx(whole.loss, rel=1e-12)
    assert parts[0].grad_norm is None and parts[1].grad_norm == pytest.approx(whole.grad_norm, rel=1e-12)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-11)


def test_train_updates_every_nth_call_and_at_the_end() -> None:
    batches = [hand_samples(2 + number % 2, seed=number) for number in range(5)]
    with one_rank(accumulate=2) as engine:
        rates, done = [], []
        for metrics in engine.train(batches):
            done.append(metrics)
            rates.append(engine.learning_rate)
        ahead = engine.state_dict()
        assert engine.num_steps == 3
    assert [(metrics.step, metrics.updated) for metrics in done] == [
        (1, False), (1, True), (2, False), (2, True), (3, True),
    ]  # fmt: skip
    assert rates == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 2, 1e-2 / 3, 1e-2 / 4])
    with one_rank(accumulate=2) as engine:
        for batch in batches[:4]:
            engine.step(batch)
        engine.step(batches[4], update=True)
        assert all(torch.equal(tensor, ahead[name]) for name, tensor in engine.state_dict().items())


def test_one_call_a_step_is_as_without(tmp_path: Path) -> None:
    """Not a bit differs where a step is one call, though the engine accumulates otherwise."""
    with one_rank() as plain, one_rank(accumulate=3) as other:
        for seed in range(2):
            samples = hand_samples(4, seed=seed)
            assert plain.step(samples).loss == other.step(samples, update=True).loss
        wanted = plain.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in other.state_dict().items())


def test_no_checkpoint_in_the_middle_and_a_load_starts_anew(tmp_path: Path) -> None:
    samples = [hand_samples(4, seed=seed) for seed in range(3)]
    with one_rank() as engine:
        engine.step(samples[0])
        engine.save(tmp_path / "one")
        engine.step(samples[1], update=False)
        with pytest.raises(CheckpointError, match="in the middle of a step: gradients of 1 calls wait"):
            engine.save(tmp_path / "no")
        assert not (tmp_path / "no").exists()
        engine.step(samples[2], update=True)
        engine.load(tmp_path / "one")
        engine.step(samples[1], update=False)
        engine.load(tmp_path / "one")
        engine.step(samples[2])
        dropped = engine.state_dict()
        engine.load(tmp_path / "one")
        engine.step(samples[2])
        assert all(torch.equal(tensor, dropped[name]) for name, tensor in engine.state_dict().items())


def test_samples_that_do_not_fit_leave_the_sums() -> None:
    samples = hand_samples(4, seed=1)
    with one_rank() as engine, one_rank() as same:
        for one in (engine, same):
            one.step(samples[:2], update=False)
            if one is engine:
                with pytest.raises(BatchError, match="at least one sample"):
                    one.step([], update=False)
            one.step(samples[2:])
        wanted = same.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in engine.state_dict().items())


def test_a_number_of_calls_is_needed() -> None:
    with pytest.raises(ConfigError, match="accumulate is 0; wanted the number of calls to an update"):
        one_rank(accumulate=0)


class TestAccumulated:
    PLAN = StepPlan(step=1, num_samples=5, microbatches=(), num_tokens=70, update=False)

    def test_sums_up_and_ends_with_an_update(self) -> None:
        once = NOTHING.with_part(self.PLAN)
        assert once == AccumulatedStep(num_parts=1, num_samples=5, unit=64.0, per_token=True)
        per_sample = StepPlan(step=1, num_samples=3, microbatches=(), update=False)
        assert NOTHING.with_part(per_sample) == AccumulatedStep(num_parts=1, num_samples=3, unit=2.0, per_token=False)
        assert once.with_part(self.PLAN) == AccumulatedStep(num_parts=2, num_samples=10, unit=64.0, per_token=True)
        assert once.with_part(StepPlan(step=1, num_samples=3, microbatches=())) == NOTHING

    def test_means_over_unlike_things_have_no_mean(self) -> None:
        NOTHING.check({True})
        once = NOTHING.with_part(self.PLAN)
        once.check({True})
        for before, kinds in ((once, {False}), (NOTHING, {True, False})):
            with pytest.raises(BatchError, match=r"means over tokens, those of others means over samples"):
                before.check(kinds)

    def test_units_are_powers_of_two(self) -> None:
        assert [unit_of(count) for count in (1, 2, 3, 4, 1000, 1024)] == [1, 2, 2, 4, 512, 1024]


def test_samples_are_split_unevenly() -> None:
    """What the equality of losses relies on: means of means would differ."""
    tokens = [int((sample["labels"] != -100).sum()) for sample in SAMPLES if isinstance(sample["labels"], Tensor)]
    per_call = [sum(tokens[:2]), sum(tokens[2:5]), sum(tokens[5:])]
    assert len(set(per_call)) == 3
