"""Families that no other parity test has: two steps of the engine in two processes against two of eager, in float64.

Most models of transformers compute their loss in float32 whatever they are given, which would round it and its gradient to 1e-7:
here `Tensor.float` keeps the numbers of float64, in eager and while the model is captured.
"""

from __future__ import annotations

import functools

import pytest
import torch
from support.processes.time_limit import time_limit
from zoo import ALL

import mmcompile as mm

SGD = functools.partial(torch.optim.SGD, lr=0.05)
TOLERANCE = 1e-9
QUICK = ("deepseek_vl_hybrid",)
ONE_COMPONENT = ("wav2vec2", "layoutlm")
FAMILIES = (
    *QUICK,
    *ONE_COMPONENT,
    "llava_next_video",
    "musicgen",
    "t5gemma2",
    "udop",
    "pix2struct",
    "seamless_m4t",
    "speecht5",
    "siglip",
    "granite_speech_plus",
    "glm46v",
    "hunyuan_vl",
)


@pytest.fixture(autouse=True)
def _wide_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_two_processes_train_as_one_does(name: str) -> None:
    family = ALL[name]
    batches = [family.batch(torch.float64), family.draw(family.first, seed=7, dtype=torch.float64)]
    alone = family.build(torch.float64)
    optimizer, losses = SGD(alone.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = alone(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = family.build(torch.float64)
    stages = {"language_model": 2} if name in ONE_COMPONENT else None
    plan = mm.plan(model, batches[0], num_microbatches=1, stages=stages, allow_unused=True)
    assert len({rank for stage in plan.stages for rank in stage.ranks}) > 1
    with time_limit(300), mm.parallelize(model, batches[0], plan, allow_unused=True, optimizer=SGD) as engine:
        got = [engine.step([batch]).loss for batch in batches]
        engine.pull()
    assert got == pytest.approx(losses, rel=TOLERANCE, abs=0)
    trained = dict(model.named_parameters())
    for parameter, wanted in alone.named_parameters():
        torch.testing.assert_close(trained[parameter], wanted, rtol=TOLERANCE, atol=TOLERANCE)
