"""Microbatches that all differ in number, sizes and places of media: processes train as one does, and soon capture no more."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
import torch
from support.oracles.one_process import ADAMW
from support.parity.free_steps import compute_in_float64
from support.parity.three_steps import assert_same_parameters
from support.processes.time_limit import time_limit
from torch import nn
from zoo import ALL, Batch
from zoo.free_sizes import free_batch

import mmcompile as mm

TOLERANCE = 1e-9
MEDIA = (2, 3, 2, 4, 1, 3, 2, 4)
"""Pictures or clips of a step's only microbatch, in turn."""
LEARNED = 3
"""Steps in which all captures are made: of one batch, of sizes, and of all batches."""
LEARNED_LATER = {"llava_next": 5}
"""Families that are captured once more when another size differs for the first time: the number of tiles, in the fifth batch."""
QUICK = "qwen2_5_vl"
OTHERS = ("glm4v", "kimi_k25", "pixtral", "mistral3", "llava_next", "lfm2_vl", "qwen2_audio")
CASES = [
    pytest.param(QUICK, len(MEDIA)),
    pytest.param(QUICK, 50, marks=pytest.mark.slow),
    *(pytest.param(name, len(MEDIA), marks=pytest.mark.slow) for name in OTHERS),
]


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


@pytest.mark.parametrize(("name", "num_steps"), CASES)
def test_two_processes_train_as_one_does_on_batches_of_free_sizes(name: str, num_steps: int) -> None:
    media = islice(cycle(MEDIA), num_steps)
    batches = [free_batch(name, 50 + index, count, torch.float64) for index, count in enumerate(media)]
    alone = ALL[name].build(torch.float64)
    losses = _train(alone, batches)
    model = ALL[name].build(torch.float64)
    plan = mm.plan(model, batches[0], num_microbatches=1)
    assert len({rank for stage in plan.stages for rank in stage.ranks}) > 1
    captured: list[tuple[int, str]] = []
    done: list[int] = []
    with (
        time_limit(500),
        mm.parallelize(
            model,
            batches[0],
            plan,
            optimizer=ADAMW,
            allow_unused=True,
            on_capture=lambda _, reason: captured.append((len(done), reason)),
        ) as engine,
    ):
        for batch, wanted in zip(batches, losses, strict=True):
            assert engine.step([batch]).loss == pytest.approx(wanted, rel=TOLERANCE, abs=0)
            done.append(1)
        engine.pull()
    assert captured and captured[-1][0] < LEARNED_LATER.get(name, LEARNED), captured
    assert_same_parameters(model.state_dict(), alone.state_dict(), TOLERANCE)


def _train(model: nn.Module, batches: list[Batch]) -> list[float]:
    """Train a model in this process; return the loss of each step."""
    optimizer, losses = ADAMW(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
