"""Buffers that a forward changes (BatchNorm statistics, a counter) are those of one process, in the model and in checkpoints."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import torch
from support.processes.time_limit import time_limit
from torch import Tensor, nn

import mmcompile as mm

VOCABULARY, WIDTH = 50, 16
SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, pixels: Tensor) -> Tensor:
        self.calls += 1
        return self.out(torch.relu(self.norm(self.conv(pixels))).flatten(2).mean(2))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        hidden = self.embed(ids) + features[:, None]
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language_model = Encoder(), Language()

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.language_model(input_ids, self.vision(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def sample(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (1, 9), generator=generator)
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8, generator=generator).double(), "labels": ids}


SAMPLES = [sample(seed) for seed in range(4)]
PAIRS = [{name: torch.cat([one[name] for one in pair]) for name in SAMPLES[0]} for pair in (SAMPLES[:2], SAMPLES[2:])]


def model() -> Model:
    torch.manual_seed(0)
    return Model().double().train()


def trained(reference: Model, num_steps: int) -> dict[str, Tensor]:
    """Train in this process, two samples a microbatch, and return all tensors of the model."""
    optimizer = SGD(reference.parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        for pair in PAIRS:
            (reference(**pair)["loss"] / 2).backward()
        optimizer.step()
    return copy.deepcopy(reference.state_dict())


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12)


def test_buffers_come_back_and_are_saved(tmp_path: Path) -> None:
    reference = model()
    after_two, after_three = trained(reference, 2), trained(reference, 1)
    assert after_three["vision.calls"] == 6 and after_three["vision.norm.num_batches_tracked"] == 6
    mine = model()
    options = {"num_microbatches": 2, "stages": {"language_model": 1}, "optimizer": SGD}
    with time_limit(200), mm.parallelize(mine, PAIRS[0], **options) as engine:
        for _ in range(2):
            engine.step(SAMPLES)
        assert_equal(engine.state_dict(), after_two)
        engine.save(tmp_path / "saved")
        engine.pull()
    assert_equal(mine.state_dict(), after_two)
    with time_limit(200), mm.parallelize(model(), PAIRS[0], **options) as engine:
        engine.load(tmp_path / "saved")
        engine.step(SAMPLES)
        assert_equal(engine.state_dict(), after_three)


def test_statistics_are_not_changed_twice_by_recomputation() -> None:
    """A layer that changes buffers keeps its activations."""
    wanted, mine = trained(model(), 1), model()
    with time_limit(200), mm.parallelize(mine, PAIRS[0], num_microbatches=2, recompute="full", optimizer=SGD) as engine:
        engine.step(SAMPLES)
        engine.pull()
    assert_equal(mine.state_dict(), wanted)


def test_statistics_in_eval_mode_do_not_change() -> None:
    mine = model()
    mine.vision.norm.eval()
    kept = mine.vision.norm.running_mean
    assert kept is not None
    kept = kept.clone()
    with time_limit(200), mm.parallelize(mine, PAIRS[0], num_microbatches=2, optimizer=SGD) as engine:
        engine.step(SAMPLES)
        engine.pull()
    now = mine.vision.norm.running_mean
    assert now is not None and torch.equal(now, kept)
    assert mine.vision.calls == 2
