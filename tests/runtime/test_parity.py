"""Training over real processes equals training in one, in float64 to 1e-12."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.oracles.one_process import RETURNED, train

from mmcompile.config import ScheduleKind
from mmcompile.data.collate import Sample
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9))
SCHEDULER = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.7)
SPREAD = {"vision": 1, "audio": 2, "lm0": 0, "lm1": 1, "lm2": 2}


def assert_parity(
    model: HandModel,
    plan: Placement,
    steps: Sequence[Sequence[Sample]],
    clip_norm: float | None = None,
    compiled: bool = False,
) -> None:
    reference = copy.deepcopy(model)
    wanted = train(
        reference,
        steps,
        num_microbatches=plan.num_microbatches,
        optimizer=OPTIMIZER,
        scheduler=SCHEDULER,
        clip_norm=clip_norm,
        loss=RETURNED,
    )
    with Engine(
        plan,
        HandSource(model),
        model=model,
        optimizer=OPTIMIZER,
        scheduler=SCHEDULER,
        clip_norm=clip_norm,
        compile=compiled,
    ) as engine:
        metrics = [engine.step(samples) for samples in steps]
        state = engine.state_dict()
        engine.pull()
    assert [m.loss for m in metrics] == pytest.approx(list(wanted.losses), rel=1e-12)
    assert [m.grad_norm for m in metrics] == (
        pytest.approx(list(wanted.norms), rel=1e-12) if clip_norm is not None else [None] * len(steps)
    )
    assert [m.num_samples for m in metrics] == [len(samples) for samples in steps]
    expected = reference.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(tensor, state[name])


def test_chain_of_three_with_tied_weights_and_clipping() -> None:
    steps = [hand_samples(6, seed=seed) for seed in range(3)]
    assert_parity(HandModel(tied=True), hand_plan(lm0=0, lm1=1, lm2=2), steps, clip_norm=0.3)


def test_two_encoders_with_branches_absent_in_microbatches_and_in_a_whole_step() -> None:
    steps = [
        hand_samples(8, images=(0, 1, 5), sounds=(2, 5), seed=0),
        hand_samples(5, seed=1),
        hand_samples(3, images=(0, 2), sounds=(0, 1), seed=2),
    ]
    assert_parity(HandModel(), hand_plan(**SPREAD), steps)


def test_frozen_first_stages_and_a_microbatch_without_labels() -> None:
    model = HandModel()
    for part in (model.vision, model.audio, model.embed, model.blocks[0]):
        part.requires_grad_(False)
    steps = [hand_samples(4, images=(0, 3), seed=seed) for seed in range(2)]
    for sample in steps[0][:1]:
        labels = sample["labels"]
        assert isinstance(labels, torch.Tensor)
        labels.fill_(-100)
    assert_parity(model, hand_plan(vision=1, lm0=1, lm1=0, lm2=1), steps)


@pytest.mark.parametrize("schedule", ["gpipe", "eager-1f1b"])
def test_other_schedules(schedule: ScheduleKind) -> None:
    steps = [hand_samples(12, images=(0, 1, 5), sounds=(2, 9), seed=0), hand_samples(9, seed=1)]
    plan = replace(hand_plan(9, **SPREAD), schedule=schedule)
    assert_parity(HandModel(tied=True), plan, steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [
        (),
        ("vision",),
        ("vision.body", "audio.body"),
        ("embed", "vision", "blocks.0"),
        ("embed", "audio", "blocks", "head"),
    ],
)
@pytest.mark.parametrize(
    "ranks",
    [
        {"vision": 0, "audio": 0, "lm0": 0, "lm1": 0, "lm2": 0},
        {"vision": 1, "audio": 1, "lm0": 0, "lm1": 0, "lm2": 1},
        {"vision": 0, "audio": 1, "lm0": 2, "lm1": 3, "lm2": 4},
        {"vision": 2, "audio": 2, "lm0": 1, "lm1": 0, "lm2": 2},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_layout_and_freeze_pattern(ranks: dict[str, int], frozen: tuple[str, ...], tied: bool) -> None:
    model = HandModel(tied=tied)
    for prefix in frozen:
        model.get_submodule(prefix).requires_grad_(False)
    steps = [
        hand_samples(9, images=(0, 1, 5), sounds=(2, 5), seed=0),
        hand_samples(2, seed=1),
        hand_samples(7, images=(6,)),
    ]
    assert_parity(model, hand_plan(**ranks), steps, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # and dynamo hides it
def test_compiled_stages() -> None:
    steps = [hand_samples(4, images=(0, 3), seed=seed) for seed in range(2)]
    assert_parity(HandModel(tied=True), hand_plan(2, vision=1, lm0=0, lm1=1, lm2=0), steps, compiled=True)
