"""Training with replicas equals training in one process: gradients of all are summed, tied ones too, and counted once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.graphs.hand_stages import LANGUAGE, HandModel, HandSource, hand_samples
from support.oracles.one_process import ADAMW, RETURNED, OneProcess, train
from support.plans.hand_replicas import PLACEMENTS, replicas
from torch import Tensor
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.errors import EngineError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.engine import Engine

OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-2)
NAMES = ("vision.0", *LANGUAGE)
CLIP = 0.3


def check_same(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("placement", PLACEMENTS.values())
def test_replicas_with_tied_weights_frozen_parts_and_images_on_some(placement: Placement, tmp_path: Path) -> None:
    model = HandModel(tied=True)
    model.vision.body.requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = OPTIMIZER(parameter for parameter in reference.parameters() if parameter.requires_grad)
    plain = OneProcess(model=reference, optimizer=optimizer, clip_norm=CLIP, loss=RETURNED)
    steps = [hand_samples(6, images=images, seed=seed) for seed, images in enumerate([(0, 1), (), (5,), (0, 3, 4)])]
    with Engine(placement, HandSource(model), model=model, optimizer=OPTIMIZER, clip_norm=CLIP) as engine:
        for samples in steps:
            wanted = plain.step(samples)
            metrics = engine.step(samples)
            assert metrics.loss == pytest.approx(wanted.loss, rel=1e-12)
            assert metrics.grad_norm == pytest.approx(wanted.norm, rel=1e-12)
            assert all(busy > 0 for busy in metrics.busy_s)
        state = engine.state_dict()
        check_same(state, reference.state_dict())
        frozen = model.vision.body.weight
        assert torch.equal(state["vision.body.weight"], frozen)
        engine.save(tmp_path)
    # Ranks that get a parameter later get the trained value and the optimizer's state.
    with Engine(placement, HandSource(model), model=model, optimizer=OPTIMIZER, clip_norm=CLIP) as engine:
        engine.step(hand_samples(6, seed=9))
        engine.load(tmp_path)
        samples = hand_samples(6, images=(1, 5), seed=10)
        plain.step(samples)
        engine.step(samples)
        check_same(engine.state_dict(), reference.state_dict())


def test_an_error_names_the_replica() -> None:
    fault = "import torch; torch.distributed.no_such_function()"
    with (
        Engine(replicas(1, (0, 0, 1, 0), (0, 0, 0, 0)), HandSource(HandModel(), fault)) as engine,
        pytest.raises(EngineError, match=r"rank [01] \(stage language_model\.1#[01]\) failed in step 1 while F0"),
    ):
        engine.step(hand_samples(2))


@pytest.mark.slow
def test_replicas_that_share_tokens_and_encoders_on_ranks_of_the_language_model() -> None:
    model = ALL["llava"].build(torch.float64)
    batch = collate(samples(ALL["llava"], 2, seed=1, dtype=torch.float64))
    plan = mm.plan(
        model,
        batch,
        num_microbatches=2,
        stages={"vision_tower": 1, "language_model": 1},
        attention="bitfield",
        context_parallel=2,
        replicas=2,
    )
    vision, language = plan.chains
    assert [(chain.dp, chain.cp) for chain in plan.chains] == [(2, 1), (2, 2)]
    # Replica 0 of the encoder with a shard of replica 1 of the language model, and the other way round.
    together = replace(
        plan,
        chains=(
            replace(vision, stages=(replace(vision.stages[0], ranks=(2, 1)),)),
            replace(language, stages=(replace(language.stages[0], ranks=(0, 1, 2, 3)),)),
        ),
    )
    steps = [samples(ALL["llava"], 4, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    with mm.parallelize(model, batch, together, allow_unused=True, optimizer=ADAMW) as engine:
        losses = [engine.step(step).loss for step in steps]
        state = engine.state_dict()
    wanted = train(ALL["llava"].build(torch.float64), steps, num_microbatches=4)
    assert losses == pytest.approx(wanted.losses, rel=1e-9)
    for name, tensor in wanted.parameters.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
