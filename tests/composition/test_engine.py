"""A composed model over real processes trains as in one: a step with pictures, one without, and the weights loaded again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.models.compose_models import LANGUAGE_MODELS, VISION_ENCODERS
from support.oracles.one_process import ADAMW, train
from torch import Tensor

import mmcompile as mm
from mmcompile.data.collate import collate

TOLERANCE = 1e-9


def _samples(model: mm.ComposedModel, count: int, *, images: int) -> list[dict[str, Tensor]]:
    batch = mm.example_batch(model, batch_size=count, text_tokens=12, images=images)
    return [{name: value[i : i + 1] for name, value in batch.items()} for i in range(count)]


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    clip = VISION_ENCODERS["clip"]
    model = mm.compose(
        {"vision": mm.Encoder(clip.build(), **clip.options)}, LANGUAGE_MODELS["llama"].build(), projectors="mlp"
    )
    model.freeze("vision")
    steps = [_samples(model, 4, images=1), _samples(model, 2, images=0)]
    wanted = train(copy.deepcopy(model), steps, num_microbatches=2)
    with mm.parallelize(model, collate(steps[0][:2]), num_microbatches=2, optimizer=ADAMW) as engine:
        metrics = [engine.step(step) for step in steps]
        for _ in range(2):  # the second replaces the first
            engine.export(tmp_path / "exported")
        engine.pull()
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    got = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.allclose(got[name], value, rtol=0, atol=TOLERANCE) for name, value in wanted.parameters.items())
    model.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        again = mm.ComposedModel.from_pretrained(folder)
        assert all(torch.equal(value, got[name]) for name, value in again.named_parameters(remove_duplicate=False))
