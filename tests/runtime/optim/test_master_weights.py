"""bfloat16 parameters with float32 masters: every number is what a plain loop over the same microbatches gives."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.plans.hand_replicas import replicas
from support.processes.local_ranks import LocalRanks
from torch import Tensor, nn

from mmcompile.config import Reduction
from mmcompile.data.collate import Sample, collate
from mmcompile.errors import ConfigError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.master_weights import given_masters
from mmcompile.runtime.optim.optimizer import OptimizerSpec, RankOptimizer

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
SPEC = OptimizerSpec.of(ADAMW, master_weights=True)
STEPS = [[{**sample} for sample in hand_samples(6, seed=seed)] for seed in range(4)]
STEPS[1] = [
    {**sample, "pixel_values": torch.randn(2, 6, generator=torch.Generator().manual_seed(n)).bfloat16()}
    for n, sample in enumerate(STEPS[1])
]


def half_model() -> tuple[HandModel, dict[str, Tensor]]:
    """A bfloat16 model, and the float32 values that it was rounded from."""
    torch.manual_seed(0)
    model = HandModel(dtype=torch.float32)
    wide = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(torch.bfloat16)
    model.vision.body.requires_grad_(False)
    return model, wide


def reference(
    ranks: Sequence[Sequence[int]], clip: float | None, wide: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Masters, parameters and norms of a loop in one process: forward and backward in bfloat16, all else in float32.

    Args:
        ranks: samples of each rank, one a microbatch; sums of ranks are added up in their order.
        wide: where masters start; empty to start from the parameters.
    """
    model, _ = half_model()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(wide.get(name, p).detach().clone().float()) for name, p in parameters.items()}
    optimizer = ADAMW(masters.values())
    norms: list[float] = []
    for samples in STEPS:
        count = sum(int((labels != -100).sum()) for sample in samples if isinstance(labels := sample["labels"], Tensor))
        of_ranks: list[dict[str, Tensor]] = []
        for own in ranks:
            sums: dict[str, Tensor] = {}
            for index in own:
                loss, _ = model(collate([samples[index]]))
                loss.backward(torch.full_like(loss, 1 / count))
                for name, parameter in parameters.items():
                    if parameter.grad is not None:
                        sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.float()
                        parameter.grad = None
            of_ranks.append(sums)
        for sums in of_ranks:
            for name, total in sums.items():
                known = masters[name].grad
                masters[name].grad = total if known is None else known + total
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(masters.values(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    return {n: m.detach() for n, m in masters.items()}, {n: p.detach() for n, p in parameters.items()}, norms


def trained(
    placement: Placement,
    *,
    clip: float | None = None,
    reduction: Reduction = "fast",
    shard: bool = False,
    wide: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float | None], int]:
    """Masters, parameters, squared norms, and how many masters all ranks have."""
    model, _ = half_model()
    with LocalRanks(
        placement, HandSource(model), SPEC, clip_norm=clip, reduction=reduction, shard_optimizer=shard
    ) as ranks:
        ranks.controller.await_holders({f"master/{name}": tensor for name, tensor in (wide or {}).items()})
        norms = [ranks.step(samples).squared_norm for samples in STEPS]
        weights = ranks.weights()
        masters: dict[str, Tensor] = {}
        num_masters = 0
        for rank in ranks.ranks:
            mine = rank.state.optimizer.masters or {}
            num_masters += len(mine)
            for name, master in mine.items():
                assert master.dtype == torch.float32
                assert torch.equal(masters.setdefault(name, master.detach()), master), name
                assert torch.equal(master.bfloat16(), rank.state.parameters[name]), name
    return masters, weights, norms, num_masters


def check_bits(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    trains = {name for name in wanted if not name.startswith("audio")}
    assert got.keys() == trains
    assert [name for name in trains if not torch.equal(got[name], wanted[name])] == []


TWO = replicas(3, (0, 0, 0, 0), (1, 1, 1, 1))
DEALT = ((0, 2, 4), (1, 3, 5))
"""Samples of the replicas in arrival order."""


@pytest.mark.parametrize("start", ["parameters", "given"])
def test_bit_for_bit_on_one_rank(start: str) -> None:
    wide = half_model()[1] if start == "given" else {}
    masters, parameters, _ = reference([range(6)], None, wide)
    got_masters, weights, _, num_masters = trained(
        hand_plan(6, vision=0, lm0=0, lm1=0, lm2=0), wide={n: t for n, t in wide.items() if n in masters}
    )
    assert num_masters == len(got_masters)
    check_bits(got_masters, masters)
    check_bits(weights, parameters)
    # Updates are smaller than what bfloat16 resolves: without masters many would be lost.
    start_values = dict(half_model()[0].named_parameters())
    lost = sum(int((parameters[n] == start_values[n]).sum()) for n in got_masters)
    moved = sum(int((masters[n] != start_values[n].float()).sum()) for n in got_masters)
    assert lost > 50 and moved > 100


@pytest.mark.parametrize("shard", [False, True])
def test_bit_for_bit_on_replicas(shard: bool) -> None:
    """Sums of replicas are added up in float32, too, and state is on one rank if asked for, also what is given."""
    wide = half_model()[1] if shard else {}
    masters, parameters, _ = reference(DEALT, None, wide)
    given = {name: tensor for name, tensor in wide.items() if name in masters}
    got_masters, weights, _, num_masters = trained(TWO, shard=shard, wide=given)
    check_bits(got_masters, masters)
    check_bits(weights, parameters)
    assert num_masters == len(got_masters) * (1 if shard else 2)


def test_clipping_is_that_of_the_float32_gradients() -> None:
    """torch adds squares up in float32, the engine in float64."""
    masters, _, norms = reference(DEALT, 0.1, {})
    got_masters, _, squares, _ = trained(TWO, clip=0.1, shard=True)
    assert [square**0.5 for square in squares if square is not None] == pytest.approx(norms, rel=1e-6)
    assert min(norms) > 0.1
    for name, master in got_masters.items():
        torch.testing.assert_close(master, masters[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reduction", ["fp64", "fixed"])
def test_exact_sums_are_rounded_to_float32(reduction: Reduction) -> None:
    """Of six bfloat16 terms, the sum in float32 is off by a few bits, and Adam's first steps are near its sign."""
    masters, _, _ = reference(DEALT, None, {})
    got_masters, _, _, _ = trained(TWO, reduction=reduction)
    close = [torch.isclose(got_masters[n], masters[n], rtol=0, atol=1e-6).double().mean() for n in got_masters]
    assert min(float(share) for share in close) > 0.9


def test_accumulated_over_calls() -> None:
    """Other loss weights than in one call, so bfloat16 gradients are rounded otherwise where a weight is no power of two."""
    model, _ = half_model()
    states: list[dict[str, Tensor]] = []
    for split in ((6,), (2, 4)):
        with LocalRanks(TWO, HandSource(model), SPEC) as ranks:
            first = 0
            for number, count in enumerate(split, 1):
                ranks.step(STEPS[0][first : first + count], update=number == len(split))
                first += count
            states.append(
                {name: m.detach() for name, m in (ranks.controller.worker.state.optimizer.masters or {}).items()}
            )
    for name, master in states[0].items():
        same = torch.isclose(states[1][name], master, rtol=0, atol=1e-5)
        assert float(same.double().mean()) > 0.9, name


def test_state_travels_and_starts_anew() -> None:
    """Master and moments go to another rank as one; without them it starts from the parameter."""
    parameters = [nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2)]
    ranks = [RankOptimizer(SPEC) for _ in range(2)]
    for rank, parameter in zip(ranks, parameters, strict=True):
        rank.add("x", parameter)
        assert rank.state(["x"]).keys() == {"master/x"}

    def update(index: int, value: float) -> None:
        ranks[index].updated["x"].grad = torch.full((5,), value)
        ranks[index].step()

    update(0, 1.0)
    state = ranks[0].state(["x"])
    assert state.keys() == {"master/x", "step/x", "exp_avg/x", "exp_avg_sq/x"}
    assert not torch.equal(state["master/x"], parameters[0].float())
    with torch.no_grad():
        parameters[1].copy_(parameters[0])
    ranks[1].load_state(state)
    for index in range(2):
        update(index, -2.0)
    assert torch.equal(ranks[0].updated["x"], ranks[1].updated["x"])
    assert torch.equal(parameters[0], parameters[1])
    ranks[1].forget(["x"])
    assert ranks[1].state(["x"]).keys() == {"master/x"}
    assert torch.equal(ranks[1].updated["x"], parameters[1].float())
    ranks[1].remove(["x"])
    assert not ranks[1].updated and ranks[1].masters == {}


ONE_RANK = hand_plan(2, lm0=0, lm1=0, lm2=0)


def test_masters_without_half_precision_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no parameter that trains is bfloat16 or float16 \(they are torch.float64\)"
    ):
        Engine(ONE_RANK, HandSource(HandModel()), master_weights=True)


def test_given_masters_must_fit() -> None:
    model, wide = half_model()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert given_masters(trainable, wide.keys(), True) == {}
    assert given_masters(trainable, wide.keys(), wide).keys() == trainable.keys()
    for change, message in (
        ({"novel": torch.ones(1)}, "has novel, which the model does not have"),
        ({"head.weight": wide["head.weight"].double()}, "has head.weight as torch.float64 .* wanted float32"),
        (
            {"head.weight": wide["head.weight"][:2]},
            r"has head.weight as torch.float32 \(2, 8\); wanted float32 \(17, 8\)",
        ),
        ({"head.weight": wide["head.weight"] * 2}, "value of head.weight in master_weights does not round to"),
    ):
        with pytest.raises(ConfigError, match=message):
            given_masters(trainable, wide.keys(), {**wide, **change})


def test_an_engine_starts_from_given_masters() -> None:
    """Those that are closer to a boundary get over it first."""
    model, wide = half_model()
    samples: Sequence[Sample] = STEPS[0]
    optimizer = functools.partial(torch.optim.SGD, lr=2e-3)
    states: list[dict[str, Tensor]] = []
    for masters in (wide, True):
        with Engine(ONE_RANK, HandSource(model), optimizer=optimizer, master_weights=masters) as engine:
            for _ in range(3):
                engine.step(samples)
            states.append(engine.state_dict())
    assert any(not torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
