"""What is set to train and gets no gradient is said by a plan, and refused before training starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmcompile as mm
from mmcompile.data.sample import SampleShape
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
BATCH = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 4), "labels": IDS}
TEXT = {"input_ids": IDS, "labels": IDS}


def _blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)))


class Seeing(nn.Module):
    """An encoder whose last block the language model does not read, as LLaVA's."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = _blocks(3), nn.Linear(4, 4)
        self.words, self.blocks, self.head = nn.Embedding(8, 4), _blocks(2), nn.Linear(4, 8)

    def encoded(self, pixels: Tensor) -> Tensor:
        return self.vision[:2](pixels)

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        if pixel_values is not None:
            hidden = torch.cat([self.projector(self.encoded(pixel_values)), hidden], 1)
        logits = self.head(self.blocks(hidden))[:, -3:]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Blind(Seeing):
    """Its encoder's result is cut off the loss."""

    def encoded(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels).detach()


def _frozen() -> nn.Module:
    model = Seeing()
    return model.requires_grad_(False)


CASES = [
    pytest.param(
        Seeing, BATCH, "2 trainable parameters get no gradient: vision.2.0.bias, vision.2.0.weight", id="unused layer"
    ),
    pytest.param(Blind, BATCH, "vision is set to train, but no gradient reaches any of its 6 parameters", id="cut off"),
    pytest.param(
        Seeing, TEXT, "8 trainable parameters get no gradient: projector.bias, projector.weight, vision.0.0", id="text"
    ),
    pytest.param(_frozen, BATCH, "nothing trains: every parameter is frozen", id="all frozen"),
]


@pytest.mark.parametrize(("model", "batch", "told"), CASES)
def test_a_plan_says_so_and_training_does_not_start(
    model: Callable[[], nn.Module], batch: dict[str, Tensor], told: str
) -> None:
    plan = mm.plan(model(), batch)
    assert sum(told in note for note in plan.notes) == 1
    for given in (None, plan):
        with pytest.raises(ConfigError, match="(?s)would not train.*" + told + ".*allow_unused"):
            mm.parallelize(model(), batch, given)
    assert not any(told in note for note in mm.plan(model(), batch, allow_unused=True).notes)


def test_the_others_train_where_that_is_allowed_or_the_unused_are_frozen() -> None:
    torch.manual_seed(0)
    for allowed in (True, False):
        model = Seeing()
        if not allowed:
            model.vision[2].requires_grad_(False)
        with mm.parallelize(model, BATCH, num_microbatches=1, allow_unused=allowed) as engine:
            before = engine.state_dict()
            engine.step([{name: value[:1] for name, value in BATCH.items()}])
            after = engine.state_dict()
        assert torch.equal(before["vision.2.0.weight"], after["vision.2.0.weight"])
        assert not torch.equal(before["vision.1.0.weight"], after["vision.1.0.weight"])


def test_elastic_training_does_not_start_either(tmp_path: Path) -> None:
    plan = mm.plan(Seeing(), BATCH, cluster="2x1xcpu", num_microbatches=2, fault_tolerance=0)
    samples = [{name: value[:1] for name, value in BATCH.items()}] * 8
    with pytest.raises(ConfigError, match="2 trainable parameters get no gradient: vision.2.0.bias"):
        mm.elastic(Seeing(), BATCH, plan, data=mm.MapBatches(samples, 4, 0), num_steps=1, folder=tmp_path / "run")


def test_a_dataset_without_images_is_told_where_the_encoder_trains() -> None:
    texts = DatasetStats.of((SampleShape(name=str(i), text_tokens=3) for i in range(8)), name="texts")
    noted = mm.plan(Seeing(), BATCH, cluster="1x2xH100", global_batch=8, stats=texts).notes
    assert any(
        "no sample of texts has anything for vision, whose 4 parameters are set to train" in note for note in noted
    )
