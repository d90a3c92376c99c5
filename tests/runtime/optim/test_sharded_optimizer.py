"""Optimizer state held once: the same bits as when every holder has it, and one copy of it in all."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.graphs.hand_stages import LANGUAGE, HandModel, HandSource, hand_plan, hand_samples
from support.oracles import one_process
from support.plans.hand_replicas import PLACEMENTS, replicas
from support.processes.local_ranks import LocalRanks
from torch import Tensor, nn

from mmcompile.codegen.program import PreparedMicrobatch
from mmcompile.config import Reduction
from mmcompile.data.collate import Value
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.optimizer import OptimizerSpec
from mmcompile.runtime.optim.sharded_optimizer import assign_updaters

CLIP = 0.3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2),
}


STEPS = [hand_samples(6, images=images, seed=seed) for seed, images in enumerate([(0, 1), (), (5,), (0, 3, 4)])]


def model_with_a_frozen_part() -> HandModel:
    torch.manual_seed(0)
    model = HandModel(tied=True)
    model.vision.body.requires_grad_(False)
    return model


def train(
    placement: Placement, optimizer: str, *, shard: bool, reduction: Reduction = "fast"
) -> tuple[dict[str, Tensor], list[float], list[dict[str, int]]]:
    """Weights and squared norms after four steps; and for each rank, bytes of optimizer state by parameter."""
    spec = OptimizerSpec.of(OPTIMIZERS[optimizer])
    source = HandSource(model_with_a_frozen_part())
    with LocalRanks(placement, source, spec, clip_norm=CLIP, reduction=reduction, shard_optimizer=shard) as ranks:
        norms = [ranks.step(samples).squared_norm or 0.0 for samples in STEPS]
        weights = ranks.weights()
        state = [state_bytes(rank.state.optimizer.updated, rank.state.optimizer.optimizer) for rank in ranks.ranks]
        held = [rank.state for rank in ranks.ranks]
    for one in held:
        assert all(parameter.grad is None for parameter in one.parameters.values())
        assert not any(name.startswith("vision.body") for name in one.optimizer.updated)
        for name, parameter in one.trainable.items():
            # After the weights were asked for, new values have arrived everywhere.
            assert torch.equal(parameter, weights[name]), name
    return weights, norms, state


def state_bytes(updated: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {
        name: sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        for name, parameter in updated.items()
        if (state := optimizer.state.get(parameter))
    }


@pytest.mark.parametrize(
    ("name", "optimizer"), [*(("crossed", optimizer) for optimizer in OPTIMIZERS), ("stacked", "adamw")]
)
def test_state_is_held_once_and_nothing_else_changes(name: str, optimizer: str) -> None:
    whole, norms, state = train(PLACEMENTS[name], optimizer, shard=False)
    weights, sharded_norms, sharded_state = train(PLACEMENTS[name], optimizer, shard=True)
    assert sharded_norms == norms
    assert weights.keys() == whole.keys()
    for parameter, tensor in weights.items():
        assert torch.equal(tensor, whole[parameter]), parameter
    copies = Counter(parameter for mine in state for parameter in mine)
    assert max(copies.values()) == (4 if name == "crossed" else 3), "there is nothing to save"
    assert Counter(parameter for mine in sharded_state for parameter in mine) == dict.fromkeys(copies, 1)
    one_copy = {parameter: size for mine in state for parameter, size in mine.items()}
    assert sum(sum(mine.values()) for mine in sharded_state) == sum(one_copy.values())

    model = copy.deepcopy(model_with_a_frozen_part())
    wanted = one_process.train(model, STEPS, optimizer=OPTIMIZERS[optimizer], clip_norm=CLIP, loss=one_process.RETURNED)
    assert norms == pytest.approx([norm**2 for norm in wanted.norms], rel=1e-9)
    for parameter, tensor in model.named_parameters():
        if tensor.requires_grad and not parameter.startswith("audio"):
            torch.testing.assert_close(weights[parameter], tensor.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("reduction", ["fp64", "fixed"])
def test_with_other_reductions(reduction: Reduction) -> None:
    whole = train(PLACEMENTS["crossed"], "adamw", shard=False, reduction=reduction)
    sharded = train(PLACEMENTS["crossed"], "adamw", shard=True, reduction=reduction)
    assert sharded[1] == whole[1]
    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in sharded[0].items())


class LateHolder(HandSource):
    """Where there are images, the second stage of the language model reads the embedding, too."""

    def prepare(self, batch: Mapping[str, Value]) -> PreparedMicrobatch:
        found = super().prepare(batch)
        if "pixel_values" not in batch:
            return found
        programs = dict(found.programs.programs)
        embedding = next(spec for spec in programs[LANGUAGE[0]].parameters if spec.name == "embed.weight")
        late = programs[LANGUAGE[1]]
        programs[LANGUAGE[1]] = replace(late, parameters=(*late.parameters, embedding))
        return replace(found, programs=replace(found.programs, programs=programs))


def test_a_late_holder_gets_the_value_and_no_state() -> None:
    spec = OptimizerSpec.of(OPTIMIZERS["adamw"])
    weights: list[Mapping[str, Tensor]] = []
    for shard in (False, True):
        torch.manual_seed(0)
        source = LateHolder(HandModel())
        placement = hand_plan(6, vision=0, lm0=0, lm1=1, lm2=2)
        with LocalRanks(placement, source, spec, clip_norm=CLIP, shard_optimizer=shard) as ranks:
            ranks.step(STEPS[1])
            assert "embed.weight" not in ranks.ranks[1].state.parameters
            for samples in (STEPS[0], STEPS[3]):
                ranks.step(samples)
            weights.append(ranks.weights())
            first, second, _ = ranks.ranks
            assert torch.equal(second.state.parameters["embed.weight"], weights[-1]["embed.weight"])
            assert "embed.weight" in first.state.optimizer.updated
            assert ("embed.weight" in second.state.optimizer.updated) is not shard
    assert all(torch.equal(tensor, weights[0][name]) for name, tensor in weights[1].items())


class TestAssignUpdaters:
    def test_largest_first_to_the_owner_with_the_least(self) -> None:
        owners = {"alone": {1}, "big": {0, 1}, "mid": {0, 1}, "mid too": {0, 1}, "end": {0, 1, 2}}
        num_bytes = {"alone": 5, "big": 9, "mid": 6, "mid too": 6, "end": 1}
        assert assign_updaters(owners, num_bytes, {}) == {
            "alone": 1, "big": 0, "mid": 1, "mid too": 0, "end": 2,
        }  # fmt: skip

    def test_what_is_assigned_stays(self) -> None:
        owners = {"first": {0, 1}, "second": {0, 1}, "third": {0, 1}}
        num_bytes = {"first": 4, "second": 9, "third": 4}
        before = {"first": 1}
        assert assign_updaters(owners, num_bytes, before) == {"first": 1, "second": 0, "third": 1}
        assert before == {"first": 1}

    @pytest.mark.parametrize("seed", range(20))
    def test_close_to_the_best_and_the_same_in_any_order(self, seed: int) -> None:
        """Where all ranks hold all, the fullest has at most 4/3 of what it has at best (Graham 1969); all are tried."""
        draw = random.Random(seed)
        num_ranks = draw.randint(2, 3)
        num_bytes = {f"p{i}": draw.randint(1, 30) for i in range(draw.randint(1, 7))}
        owners = {name: range(num_ranks) for name in num_bytes}
        found = assign_updaters(owners, num_bytes, {})

        def fullest(ranks: Iterable[int]) -> int:
            loads: Counter[int] = Counter()
            for name, rank in zip(num_bytes, ranks, strict=True):
                loads[rank] += num_bytes[name]
            return max(loads.values())

        best = min(fullest(ranks) for ranks in product(range(num_ranks), repeat=len(num_bytes)))
        assert 3 * fullest(found[name] for name in num_bytes) <= 4 * best
        shuffled = draw.sample(sorted(owners), len(owners))
        assert assign_updaters({name: owners[name] for name in shuffled}, num_bytes, {}) == found


def test_one_rank_has_nothing_to_shard() -> None:
    with pytest.raises(ConfigError, match="shard_optimizer has no effect on one rank"):
        Engine(replicas(1, (0, 0, 0, 0)), HandSource(HandModel()), shard_optimizer=True)
