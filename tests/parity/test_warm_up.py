"""A warm-up before step 1: all captures are made then, no step makes one, and processes train as one does."""

from __future__ import annotations

import functools

import pytest
import torch
from support.processes.time_limit import time_limit
from zoo import ALL
from zoo.free_sizes import free_batch

import mmcompile as mm

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
FAMILY = ALL["qwen2_5_vl"]
WARM = 3
MEDIA = (3, 2, 4, 2, 3, 2)


def test_no_step_captures_after_a_warm_up_with_the_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    batches = [free_batch("qwen2_5_vl", 50 + index, media, torch.float64) for index, media in enumerate(MEDIA)]
    alone = FAMILY.build(torch.float64)
    optimizer, losses = ADAMW(alone.parameters()), []
    for batch in batches[1:]:
        optimizer.zero_grad()
        loss = alone(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = FAMILY.build(torch.float64)
    plan = mm.plan(model, batches[0], num_microbatches=1)
    captured: list[str] = []
    with (
        time_limit(400),
        mm.parallelize(
            model, batches[0], plan, optimizer=ADAMW, on_capture=lambda _, reason: captured.append(reason)
        ) as engine,
    ):
        before = engine.state_dict()
        told: list[tuple[int, int, str]] = []
        reasons = engine.warm_up(
            ([batch] for batch in batches[1 : 1 + WARM]), on_capture=lambda *event: told.append(event)
        )
        assert [(number, about) for number, about, _ in told] == [(2, 2)]
        assert reasons == (told[0][2],)
        assert engine.num_steps == 0
        after = engine.state_dict()
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
        for metrics, wanted in zip(engine.train([batch] for batch in batches[1:]), losses, strict=True):
            assert metrics.loss == pytest.approx(wanted, rel=1e-9, abs=0)
    assert captured == []
