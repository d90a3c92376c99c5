"""Checkpoints are whole or not there, load with the usual tools, and resume bit by bit."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hand_stages import HandModel, HandSource, hand_plan, hand_samples
from safetensors.torch import load_file
from torch import Tensor

from mmcompile.errors import CheckpointError
from mmcompile.runtime import checkpoint
from mmcompile.runtime.checkpoint import Checkpoint, TrainerState
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optimizer import OptimizerSpec

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
STEPS = [
    hand_samples(4, seed=0),
    hand_samples(4, images=(1, 2), seed=1),
    hand_samples(4, images=(0,), sounds=(3,), seed=2),
]
PLAN = hand_plan(2, vision=1, audio=0, lm0=0, lm1=1, lm2=1)


def new_engine(model: HandModel) -> Engine:
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    source = HandSource(model, fault="x = functional.dropout(x, 0.2)")
    return Engine(PLAN, source, model=model, optimizer=ADAMW, scheduler=scheduler, clip_norm=1.0)


def new_model() -> HandModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return HandModel(tied=True)


def run(engine: Engine, first: int) -> tuple[list[float], Mapping[str, Tensor]]:
    return [engine.step(samples).loss for samples in STEPS[first:]], engine.state_dict()


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_resume_goes_on_bit_by_bit(tmp_path: Path) -> None:
    # The images arrive after the checkpoint, so their encoder is first placed by the resumed run.
    with new_engine(new_model()) as engine:
        engine.step(STEPS[0])
        engine.save(tmp_path / "one")
        losses, state = run(engine, 1)
        # The same engine, whose ranks hold later weights and optimizer state by now.
        engine.load(tmp_path / "one")
        assert engine.num_steps == 1
        again, state_again = run(engine, 1)
        engine.save(tmp_path / "three")
        learning_rate = engine.learning_rate
        engine.step(STEPS[0])
        last = engine.state_dict()
    assert again == losses
    assert_same(state, state_again)

    torch.manual_seed(5)
    other = new_model()
    torch.nn.init.zeros_(other.embed.weight)
    with new_engine(other) as resumed:
        resumed.load(tmp_path / "one")
        assert run(resumed, 1)[0] == losses
        resumed.load(tmp_path / "three")
        assert resumed.learning_rate == learning_rate
        resumed.step(STEPS[0])
        assert_same(resumed.state_dict(), last)
        resumed.pull()
    assert_same(other.state_dict(), last)


@pytest.fixture
def content() -> Checkpoint:
    trainer = TrainerState(step=3, optimizer=OptimizerSpec.of(ADAMW), hyper={"lr": 0.1}, seed=0)
    return Checkpoint(
        trainer=trainer, weights={"embed.weight": torch.ones(2000)}, optimizer={"step/embed.weight": torch.tensor(3.0)}
    )


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writing beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size_bytes", [0, 100, 5000])
def test_full_disk_leaves_the_old_checkpoint(tmp_path: Path, content: Checkpoint, size_bytes: int) -> None:
    model = new_model()
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, model, model.state_dict())
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with file_size_limit(size_bytes), pytest.raises(CheckpointError, match="cannot write a checkpoint .* is untouched"):
        checkpoint.write(target, content, model, {name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_interruption_between_the_renames_loses_nothing(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, None, {"a": torch.ones(1)})
    target.rename(tmp_path / "checkpoint.previous")
    assert checkpoint.read(target).trainer.step == 3
    checkpoint.write(target, content, None, {"a": torch.zeros(1)})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
    assert checkpoint.read(target).weights.keys() == {"embed.weight"}


def test_files_of_the_user_stay_and_files_of_the_old_checkpoint_go(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, None, {"a": torch.ones(1)})
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    (target / "notes").mkdir()
    (target / "notes" / "README").write_text("mine")
    trainer = (target / "trainer.json").read_text().replace("model.safetensors", "model-00001-of-00002.safetensors")
    (target / "trainer.json").write_text(trainer)
    checkpoint.write(target, content, None, {"a": torch.zeros(1)})
    assert sorted(os.listdir(target)) == ["model.safetensors", "notes", "trainer.json", "trainer.safetensors"]
    assert (target / "notes" / "README").read_text() == "mine"
    assert load_file(target / "model.safetensors")["a"] == 0


def test_damaged_and_missing_checkpoints_are_refused(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    with pytest.raises(CheckpointError, match="no checkpoint at .*: wanted a folder with trainer.json"):
        checkpoint.read(target)
    checkpoint.write(target, content, None, {"a": torch.ones(1)})
    text = (target / "trainer.json").read_text()
    (target / "trainer.json").write_text(text.replace('"version": 1', '"version": 7'))
    with pytest.raises(CheckpointError, match="has version 7; this mmcompile reads version 1"):
        checkpoint.read(target)
    (target / "trainer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(target)
    (target / "trainer.json").write_text(text)
    (target / "trainer.safetensors").write_bytes((target / "trainer.safetensors").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(target)


def test_other_models_and_optimizers_are_refused(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, None, {"a": torch.ones(1)})
    one_rank = hand_plan(1, lm0=0, lm1=0, lm2=0)
    with (
        Engine(one_rank, HandSource(new_model()), optimizer=torch.optim.SGD) as engine,
        pytest.raises(CheckpointError, match="was saved with AdamW, this engine has SGD"),
    ):
        engine.load(target)
    message = r"has embed.weight as torch.float32 \(2000,\); this model has torch.float64"
    with (
        Engine(one_rank, HandSource(new_model()), optimizer=ADAMW) as engine,
        pytest.raises(CheckpointError, match=message),
    ):
        engine.load(target)
