"""Settings by component: the groups of a torch optimizer, chosen by patterns, on whatever ranks their parameters are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.models.grouped_adamw import ADAMW, GROUPS, scheduled
from support.oracles.one_process import RETURNED, OneProcess
from support.plans.hand_replicas import replicas
from torch import nn

from mmcompile.errors import CheckpointError, ConfigError
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.optimizer import OptimizerSpec, RankOptimizer
from mmcompile.runtime.optim.param_groups import ParameterGroup, check_matches, group_of

ONE_RANK = hand_plan(2, lm0=0, lm1=0, lm2=0)


def plain_process(model: HandModel) -> OneProcess:
    """Return a process with torch's own groups, scheduler and clipping, and one sample a microbatch."""
    model = copy.deepcopy(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: p for name, p in named.items() if name.startswith("vision.")}
    second = {n: p for n, p in named.items() if (n.endswith(".bias") or n == "embed.weight") and n not in first}
    rest = [p for name, p in named.items() if name not in first and name not in second]
    groups: list[dict[str, Any]] = [
        {"params": list(first.values()), "lr": 1e-3, "betas": (0.8, 0.9)},
        {"params": list(second.values()), "weight_decay": 0.0},
        {"params": rest},
    ]
    optimizer = ADAMW(groups)
    return OneProcess(model=model, optimizer=optimizer, scheduler=scheduled(optimizer), clip_norm=0.2, loss=RETURNED)


def check(plain: OneProcess, engine: Engine) -> None:
    """Parameters and learning rates are equal."""
    state = engine.state_dict()
    for name, tensor in plain.model.named_parameters():
        torch.testing.assert_close(state[name], tensor.detach(), rtol=0, atol=1e-9)
    assert engine.learning_rates == pytest.approx([group["lr"] for group in plain.optimizer.param_groups])


def test_all_at_once_in_real_processes(tmp_path: Path) -> None:
    """Groups with a rate of their own each, clipping, two calls a step, a sharded optimizer, and a checkpoint in between."""
    torch.manual_seed(0)
    model = HandModel(tied=True)
    model.vision.body.requires_grad_(False)
    plain = plain_process(model)
    placement = replicas(3, (0, 0, 0, 1), (1, 1, 0, 1))
    batches = [
        hand_samples(4, images=images, seed=seed) for seed, images in enumerate([(0,), (), (1, 2), (), (3,), ()])
    ]

    def engine() -> Engine:
        return Engine(
            placement,
            HandSource(model),
            model=model,
            optimizer=ADAMW,
            groups=GROUPS,
            scheduler=scheduled,
            clip_norm=0.2,
            accumulate=2,
            shard_optimizer=True,
        )

    with engine() as first:
        norms = [metrics.grad_norm for metrics in first.train(batches[:4])]
        wanted = [plain.step([*batches[0], *batches[1]]).norm, plain.step([*batches[2], *batches[3]]).norm]
        assert norms[::2] == [None, None]
        assert [norm for norm in norms[1::2] if norm is not None] == pytest.approx(wanted, rel=1e-9)
        check(plain, first)
        first.save(tmp_path)
    with engine() as second:
        second.load(tmp_path)
        assert second.num_steps == 2
        for samples in batches[4:]:
            second.step(samples)
        plain.step([*batches[4], *batches[5]])
        check(plain, second)


def test_learning_rates_by_hand() -> None:
    with Engine(ONE_RANK, HandSource(HandModel()), optimizer=ADAMW, groups=GROUPS) as engine:
        assert engine.learning_rates == (1e-3, 1e-2, 1e-2) and engine.learning_rate == 1e-2
        engine.learning_rate = 0.0
        assert engine.learning_rates == (1e-3, 1e-2, 0.0)
        before = engine.state_dict()
        engine.step(hand_samples(2))
        moved = {name for name, tensor in engine.state_dict().items() if not torch.equal(tensor, before[name])}
        assert moved == {"embed.weight", *(f"blocks.{i}.{part}.bias" for i in range(3) for part in ("up", "down"))}
        engine.learning_rates = (0.0, 0.0, 1.0)
        assert engine.learning_rate == 1.0
        with pytest.raises(ConfigError, match="got 1 learning rates; wanted one for each of the 3 groups"):
            engine.learning_rates = (1.0,)


def test_a_checkpoint_of_other_groups_is_refused(tmp_path: Path) -> None:
    model = HandModel()
    with Engine(ONE_RANK, HandSource(model), model=model, optimizer=ADAMW, groups=GROUPS) as engine:
        engine.step(hand_samples(2))
        engine.save(tmp_path)
    with (
        Engine(ONE_RANK, HandSource(model), model=model, optimizer=ADAMW) as other,
        pytest.raises(CheckpointError, match=r"saved with parameter groups \['vision', .*\], this engine has none"),
    ):
        other.load(tmp_path)


def test_the_first_group_has_it() -> None:
    names = {"vision.body.bias": 0, "vision.body.weight": 0, "embed.weight": 1, "head.bias": 1, "head.weight": 2}
    assert {name: group_of(name, GROUPS) for name in names} == names
    assert group_of("anything", ()) == 0
    # A part that one of several ranks holds belongs where the whole does.
    assert (
        group_of("head.bias@3", GROUPS) == 1
        and group_of("head.weight@0", (ParameterGroup(match="*.weight", lr=1),)) == 0
    )


def test_parameters_join_their_groups_and_leave_them() -> None:
    rank = RankOptimizer(OptimizerSpec.of(ADAMW, GROUPS))
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("vision.a", "embed.weight", "head.weight")}
    for name, parameter in parameters.items():
        rank.add(name, parameter)
    groups = rank.optimizer.param_groups
    assert [group["params"][-1] for group in groups] == list(parameters.values())
    assert [(group["lr"], group["weight_decay"], group["betas"]) for group in groups] == [
        (1e-3, 0.1, (0.8, 0.9)), (1e-2, 0.0, (0.9, 0.999)), (1e-2, 0.1, (0.9, 0.999)),
    ]  # fmt: skip
    rank.remove(["embed.weight"])
    assert [len(group["params"]) for group in groups] == [2, 1, 2]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (ParameterGroup(match="visoin", lr=1.0), "pattern 'visoin' .* matches no parameter; .* one of: .*vision"),
        (ParameterGroup(match="vision.body", lr=1.0), "pattern 'vision.body' .* means frozen parameters only"),
        (ParameterGroup(match=("head", "nowhere.*"), lr=1.0), "pattern 'nowhere.*' .* matches no parameter"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(group: ParameterGroup, message: str) -> None:
    model = HandModel()
    model.vision.body.requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        Engine(ONE_RANK, HandSource(model), optimizer=ADAMW, groups=[group])


def test_a_group_that_comes_too_late_is_refused() -> None:
    groups = [ParameterGroup(match="all", lr=1.0), ParameterGroup(match="head", lr=2.0)]
    with pytest.raises(ConfigError, match="group 'head' gets no parameter, since groups before it have them all"):
        check_matches(groups, ["head.weight", "embed.weight"], [])
    check_matches(groups[::-1], ["head.weight", "embed.weight"], [])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (ParameterGroup(match="head"), "group 'head' has no settings, and no effect"),
        (
            ParameterGroup(match="head", settings={"beta": 1}),
            "sets beta, which AdamW does not have; choose among .*betas",
        ),
        (ParameterGroup(match="head", settings={"lr": 1.0}), "has lr among its settings: give it as lr="),
        (ParameterGroup(match="head", settings={"lr_": torch.ones(1)}), "must be plain numbers, flags and text"),
    ],
)
def test_settings_that_do_nothing_are_refused(group: ParameterGroup, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerSpec.of(ADAMW, [group])
