"""Checkpoints are whole or not there, are read by torch and under any plan, and resume bit by bit."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from mmcompile.errors import CheckpointError
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.checkpoint.trainer_state import Stored, fingerprint
from mmcompile.runtime.checkpoint.whole_checkpoint import Checkpoint, TrainerState
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.optim.optimizer import OptimizerSpec

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
        engine.save(tmp_path / "one", data={"epoch": 2, "order": torch.arange(3)})
        losses, state = run(engine, 1)
        # The same engine, whose ranks hold later weights and optimizer state by now.
        resumed = engine.load(tmp_path / "one")
        assert (engine.num_steps, engine.num_samples) == (resumed.num_steps, resumed.num_samples) == (1, 4)
        assert resumed.data["epoch"] == 2 and resumed.data["order"].tolist() == [0, 1, 2]
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
    with new_engine(other) as resumed_engine:
        resumed_engine.load(tmp_path / "one")
        assert run(resumed_engine, 1)[0] == losses
        resumed_engine.load(tmp_path / "three")
        assert resumed_engine.learning_rate == learning_rate
        resumed_engine.step(STEPS[0])
        assert_same(resumed_engine.state_dict(), last)
        resumed_engine.pull()
    assert_same(other.state_dict(), last)


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine that did three steps or more."""
    torch.manual_seed(0)
    with new_engine(new_model()) as engine:
        run(engine, 0)
        yield engine


def test_state_of_parameters_that_nobody_holds_stays_in_the_checkpoint(shared: Engine, tmp_path: Path) -> None:
    """It is written again by a save before anybody holds them, to another folder or over the one it is read from."""
    shared.save(tmp_path / "all")
    shared.step(STEPS[0])
    losses, state = run(shared, 1)
    with new_engine(new_model()) as engine:
        engine.load(tmp_path / "all")
        # No rank holds anything now; then the language model; then all.
        engine.save(tmp_path / "again")
        engine.step(STEPS[0])
        (tmp_path / "all").rename(tmp_path / "gone")
        engine.save(tmp_path / "again", wait=False)
        assert run(engine, 1)[0] == losses
        assert_same(engine.state_dict(), state)
        engine.load(tmp_path / "again")
        assert run(engine, 1)[0] == losses


def test_torch_reads_it(shared: Engine, tmp_path: Path) -> None:
    """With names as torch's own state dicts have them, a tied one under both."""
    shared.save(tmp_path / "saved")
    trained = shared.state_dict()
    twin = new_model()
    optimizer = torch.optim.AdamW(twin.parameters())
    names = {name: index for index, (name, _) in enumerate(twin.named_parameters())}
    state = {name: {key: torch.zeros(()) for key in ("step",)} for name in names}
    for name, parameter in twin.named_parameters():
        state[name] |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    weights = {name: torch.zeros_like(tensor) for name, tensor in twin.state_dict().items() if name != "scale"}
    whole = {"model": weights, "optimizer": {"state": state}}
    with pytest.warns(UserWarning, match="single process"):
        torch_load(whole, checkpoint_id=tmp_path / "saved")
    assert "head.weight" in weights
    assert_same({name: tensor for name, tensor in trained.items() if name != "scale"}, weights)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {names[name]: state[name] for name in names}, "param_groups": groups})
    twin.load_state_dict(weights, strict=False)
    ours = checkpoint.read(tmp_path / "saved")
    for name, parameter in twin.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            assert torch.equal(tensor, ours.optimizer[f"{key}/{name}"])
        assert torch.equal(parameter, ours.weights[name])
    assert {tensor.item() for path, tensor in ours.optimizer.items() if path == "step/embed.weight"} == {
        shared.num_steps
    }

    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    nested = torch.load(tmp_path / "saved.pt")
    assert nested.keys() == {"model", "optimizer"}
    assert torch.equal(nested["optimizer"]["state"]["embed.weight"]["exp_avg"], ours.optimizer["exp_avg/embed.weight"])


def test_the_model_is_exported(shared: Engine, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README").write_text("mine")
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("of a larger model")
    shared.export(tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == ["README", "model.safetensors"]
    other = new_model()
    other.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert_same(other.state_dict(), shared.state_dict())


@pytest.fixture
def content() -> Checkpoint:
    trainer = TrainerState(step=3, optimizer=OptimizerSpec.of(ADAMW), hyper=[{"lr": 0.1}], seed=0)
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
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, {})
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with file_size_limit(size_bytes), pytest.raises(CheckpointError, match=r"cannot write to .* is untouched"):
        checkpoint.write(target, content, {})
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_full_disk_while_training(shared: Engine, tmp_path: Path) -> None:
    """Training goes on, and the error comes with the next call; the checkpoint before stays."""
    shared.save(tmp_path / "saved")
    first = shared.num_steps
    shared.step(STEPS[0])
    with file_size_limit(2000):
        saving = shared.save(tmp_path / "saved", wait=False)
        saving.settle()
    with pytest.raises(CheckpointError, match=r"cannot write to .*saved: rank 0 failed with OSError"):
        shared.step(STEPS[1])
    assert shared.step(STEPS[1]).step == first + 2
    assert checkpoint.read(tmp_path / "saved").trainer.step == first
    assert os.listdir(tmp_path) == ["saved"]
    shared.save(tmp_path / "saved")
    assert checkpoint.read(tmp_path / "saved").trainer.step == first + 2


def test_an_interruption_between_the_renames_loses_nothing(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, {})
    (target / "README").write_text("mine")
    target.rename(tmp_path / "checkpoint.previous")
    (tmp_path / "checkpoint.tmp-0123").mkdir()
    assert checkpoint.read(target).trainer.step == 3
    checkpoint.write(target, content, {})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint"]
    assert checkpoint.read(target).weights.keys() == {"embed.weight"}
    assert (target / "README").read_text() == "mine"


def test_files_of_the_user_stay_and_files_of_the_old_checkpoint_go(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, {})
    (target / "__0_0.distcp").rename(target / "__7_0.distcp")
    (target / "notes").mkdir()
    (target / "notes" / "README").write_text("mine")
    trainer = (target / "trainer.json").read_text().replace("__0_0.distcp", "__7_0.distcp")
    (target / "trainer.json").write_text(trainer)
    checkpoint.write(target, content, {})
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", "index.json", "notes", "trainer.json"]
    assert (target / "notes" / "README").read_text() == "mine"
    assert torch.equal(checkpoint.read(target).weights["embed.weight"], torch.ones(2000))


def test_damaged_and_missing_checkpoints_are_refused(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*: wanted a folder with trainer.json"):
        checkpoint.read(target)
    checkpoint.write(target, content, {})
    text = (target / "trainer.json").read_text()
    (target / "trainer.json").write_text(text.replace('"version": 2', '"version": 7'))
    with pytest.raises(CheckpointError, match="has version 7; this mmcompile reads version 2"):
        checkpoint.read(target)
    (target / "trainer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(target)
    (target / "trainer.json").write_text(text.replace('"lr": 0.1', '"lr": 0.3'))
    with pytest.raises(CheckpointError, match=r"trainer.json is not as it was written"):
        checkpoint.read(target)
    (target / "trainer.json").write_text(text)
    index = (target / "index.json").read_text()
    (target / "index.json").write_text(index.replace("[2000]", "[1000]"))
    with pytest.raises(CheckpointError, match=r"index.json is not as it was written"):
        checkpoint.read(target)
    (target / "index.json").write_text(index)
    data = (target / "__0_0.distcp").read_bytes()
    (target / "__0_0.distcp").write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read(target)
    place = data.index(torch.ones(2000).numpy().tobytes()) + 4000
    (target / "__0_0.distcp").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(CheckpointError, match=r"bytes .* of __0_0.distcp, of model.embed.weight, are not as written"):
        checkpoint.read(target)


def test_other_models_and_optimizers_are_refused(tmp_path: Path, content: Checkpoint) -> None:
    target = tmp_path / "checkpoint"
    checkpoint.write(target, content, {})
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


def test_other_parts_of_a_model_are_refused(tmp_path: Path) -> None:
    one_rank = hand_plan(1, lm0=0, lm1=0, lm2=0)
    partly = new_model()
    partly.blocks[1].requires_grad_(False)
    with Engine(one_rank, HandSource(partly), optimizer=ADAMW) as engine:
        engine.save(tmp_path / "partly")
    with Engine(one_rank, HandSource(new_model()), optimizer=ADAMW) as engine:
        engine.save(tmp_path / "all")
        with pytest.raises(
            CheckpointError, match=r"this model trains blocks.1.down.bias and 3 others that .*partly does"
        ):
            engine.load(tmp_path / "partly")
    with (
        Engine(one_rank, HandSource(partly), optimizer=ADAMW) as engine,
        pytest.raises(CheckpointError, match=r"all trains blocks.1.\w+.\w+, which this model has frozen"),
    ):
        engine.load(tmp_path / "all")


def test_other_frozen_weights_are_refused(tmp_path: Path) -> None:
    """They are not in the checkpoint; what trained upon others would go on upon them and never be noticed."""
    one_rank = hand_plan(1, lm0=0, lm1=0, lm2=0)
    partly = new_model()
    partly.blocks[1].requires_grad_(False)
    with Engine(one_rank, HandSource(partly), optimizer=ADAMW) as engine:
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
    assert checkpoint.read(tmp_path / "saved").trainer.frozen.keys() == {
        f"blocks.1.{name}" for name, _ in partly.blocks[1].named_parameters()
    }
    with torch.no_grad():
        partly.get_parameter("blocks.1.up.weight").add_(1.0)
    with (
        Engine(one_rank, HandSource(partly), optimizer=ADAMW) as engine,
        pytest.raises(
            CheckpointError, match=r"trained with other weights that do not train: blocks.1.up.weight and 0 more"
        ),
    ):
        engine.load(tmp_path / "saved")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_fingerprints_tell_tensors_apart(dtype: torch.dtype) -> None:
    first = torch.randint(0, 100, (300, 40), generator=torch.Generator().manual_seed(0)).to(dtype)
    other = torch.randint(0, 100, (300, 40), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert fingerprint(first) == fingerprint(first.t().contiguous().t())
    assert (
        len({fingerprint(tensor) for tensor in (first, other, first.float(), first.t(), first[:1], first[0, 0])}) == 6
    )
    assert fingerprint(first[:0])


def test_data_must_be_plain(tmp_path: Path) -> None:
    with Engine(hand_plan(1, lm0=0, lm1=0, lm2=0), HandSource(new_model()), optimizer=ADAMW) as engine:
        with pytest.raises(CheckpointError, match="numbers, text, lists, dicts and tensors, got OptimizerSpec"):
            engine.save(tmp_path / "saved", data=OptimizerSpec.of(ADAMW))
        engine.save(tmp_path / "saved", data=[1, "two"])
    assert Stored.find(tmp_path / "saved").data() == [1, "two"]
