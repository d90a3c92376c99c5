"""Microbatches that all differ in number, sizes and places of media: processes train as one does, and soon capture no more."""

from __future__ import annotations

import functools

import pytest
import torch
from support.processes.time_limit import time_limit
from zoo import ALL
from zoo.free_sizes import free_batch

import mmcompile as mm

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
TOLERANCE = 1e-9
MEDIA = (2, 3, 2, 4, 1, 3, 2, 4)
LEARNED = 3
"""Captures, all in the first `LEARNED` steps: of one batch, of sizes, and of all batches."""
QUICK = ("qwen2_5_vl",)
FAMILIES = (*QUICK, "glm4v", "kimi_k25", "pixtral", "mistral3", "llava_next", "lfm2_vl", "qwen2_audio")


@pytest.fixture(autouse=True)
def _wide_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_two_processes_train_as_one_does_on_batches_of_free_sizes(name: str) -> None:
    family = ALL[name]
    batches = [free_batch(name, 50 + index, media, torch.float64) for index, media in enumerate(MEDIA)]
    alone = family.build(torch.float64)
    optimizer, losses = ADAMW(alone.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = alone(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = family.build(torch.float64)
    plan = mm.plan(model, batches[0], num_microbatches=1)
    assert len({rank for stage in plan.stages for rank in stage.ranks}) > 1
    captured: list[int] = []
    done: list[int] = []
    with (
        time_limit(500),
        mm.parallelize(
            model, batches[0], plan, optimizer=ADAMW, on_capture=lambda *_: captured.append(len(done))
        ) as engine,
    ):
        for batch, wanted in zip(batches, losses, strict=True):
            assert engine.step([batch]).loss == pytest.approx(wanted, rel=TOLERANCE, abs=0)
            done.append(1)
        engine.pull()
    assert captured and max(captured) < LEARNED, captured
    trained = dict(model.named_parameters())
    for parameter, wanted in alone.named_parameters():
        torch.testing.assert_close(trained[parameter], wanted, rtol=1e-6, atol=1e-9)
