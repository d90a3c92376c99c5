"""Ranks write together while training goes on, die while they do, and load under other plans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support.graphs.hand_stages import hand_plan
from support.paths import TESTS
from support.plans.hand_replicas import replicas
from support.processes.checkpointed_run import batch_of, new_engine
from torch import Tensor

from mmcompile.data.collate import Sample
from mmcompile.errors import EngineError
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.monitoring.fail_points import VARIABLE


class Data:
    """Batches that say where they are, as torchdata's StatefulDataLoader does."""

    def __init__(self, num_batches: int) -> None:
        self.next = 0
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Sequence[Sample]]:
        while self.next < self._num_batches:
            self.next += 1
            yield batch_of(self.next - 1)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}


# Microbatches are the same in all: what the model computes for a sample depends on the others of its microbatch.
PLANS = {
    1: hand_plan(4, vision=0, lm0=0, lm1=0, lm2=0),
    2: replicas(2, (0, 0, 0, 0), (1, 1, 1, 1)),
    3: hand_plan(4, vision=2, lm0=0, lm1=1, lm2=1),
    4: replicas(2, (0, 0, 1, 1), (2, 2, 3, 3)),
    6: replicas(2, (2, 0, 1, 1), (5, 3, 4, 3)),
}
NUM_STEPS = 6
SAVED_AFTER = 3


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def goes_on(folder: Path, num_ranks: int, options: Mapping[str, object]) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses after a checkpoint, and the weights at the end; the data goes on where the checkpoint says it was."""
    with new_engine(PLANS[num_ranks], **options) as engine:
        data = Data(NUM_STEPS)
        resumed = engine.load(folder)
        assert (resumed.num_steps, resumed.num_samples, resumed.data) == (SAVED_AFTER, 4 * SAVED_AFTER, {"next": 3})
        data.next = resumed.data["next"]
        return [metrics.loss for metrics in engine.train(data)], engine.state_dict()


def trained(folder: Path, num_ranks: int, options: Mapping[str, object]) -> tuple[list[float], Mapping[str, Tensor]]:
    """Losses after a checkpoint is saved in the middle of training, and the weights at the end."""
    with new_engine(PLANS[num_ranks], **options) as engine:
        losses: list[float] = []
        for metrics in engine.train(Data(NUM_STEPS)):
            losses.append(metrics.loss)
            if metrics.step == SAVED_AFTER:
                # The next batch is read by now; the checkpoint does not count it.
                engine.save(folder, wait=False)
        return losses[SAVED_AFTER:], engine.state_dict()


def test_saved_by_three_loaded_by_one_and_the_other_way(tmp_path: Path) -> None:
    ours, weights = trained(tmp_path / "three", 3, {})
    alone, weights_alone = goes_on(tmp_path / "three", 1, {})
    assert alone == pytest.approx(ours, rel=1e-9)
    same(weights_alone, weights)
    trained(tmp_path / "one", 1, {})
    left, right = checkpoint.read(tmp_path / "three"), checkpoint.read(tmp_path / "one")
    same(left.weights, right.weights)
    same(left.optimizer, right.optimizer)
    assert len(list((tmp_path / "three").glob("*.distcp"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["plain", "zero1"])
def test_saved_by_four_loaded_by_any_number(tmp_path: Path, options: Mapping[str, object]) -> None:
    ours, weights = trained(tmp_path / "four", 4, options)
    for num_ranks in (1, 2, 6):
        losses, found = goes_on(tmp_path / "four", num_ranks, options if num_ranks > 1 else {})
        assert losses == pytest.approx(ours, rel=1e-9)
        same(found, weights)


def test_training_goes_on_while_a_save_is_written_until_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, struck, target = tmp_path / "held", tmp_path / "struck", tmp_path / "saved"
    strikes = [
        {"point": "checkpoint-writing", "action": "hold", "rank": 1, "step": 2, "marker": str(held)},
        {"point": "checkpoint-written", "action": "kill", "rank": 1, "step": 4, "marker": str(struck)},
    ]
    monkeypatch.setenv(VARIABLE, json.dumps(strikes))
    with new_engine(hand_plan(2, vision=1, lm0=0, lm1=1, lm2=0)) as engine:
        for step in range(2):
            engine.step(batch_of(step))
        after_two = engine.state_dict()
        saving = engine.save(target, wait=False)
        while not held.exists():
            assert not saving.done
        for step in range(2, 4):
            engine.step(batch_of(step))
        assert engine.num_steps == 4 and not saving.done and not target.exists()
        held.unlink()
        saving.wait()
        assert engine.saving is saving and saving.done
        found = checkpoint.read(target)
        assert found.trainer.step == 2
        assert {
            name: tensor for name, tensor in after_two.items() if name in found.weights
        }.keys() == found.weights.keys()
        assert [name for name, tensor in found.weights.items() if not torch.equal(tensor, after_two[name])] == []

        with pytest.raises(EngineError, match=r"rank 1 .* died with signal 9 \(SIGKILL\)"):
            engine.save(target)
    assert struck.exists()
    assert checkpoint.read(target).trainer.step == 2


SCRIPT = """
import sys
from support.processes.checkpointed_run import batch_of, hand_plan, new_engine, set_strike

with new_engine(hand_plan(2, vision=1, lm0=0, lm1=1, lm2=0)) as engine:
    engine.step(batch_of(0))
    engine.save(sys.argv[1])
    engine.step(batch_of(1))
    engine.save(sys.argv[1], wait=False)
    engine.step(batch_of(2))
"""
KILLS = [
    ("checkpoint-writing", 1, 1),
    ("checkpoint-written", 1, 1),
    ("checkpoint-writing", 0, 1),
    ("checkpoint-written", 0, 1),
    ("checkpoint-joining", 0, 1),
    ("checkpoint-swapping", 0, 1),
    ("checkpoint-saved", 0, 2),
]
"""Where which rank is killed during the save of step 2, and the step of the last whole checkpoint then."""


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank", "last"), KILLS)
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(tmp_path: Path, point: str, rank: int, last: int) -> None:
    marker = tmp_path / "struck"
    # Swaps are not told apart by step; the first has nothing to swap with.
    step = None if point == "checkpoint-swapping" else 2
    strike = {
        "point": point,
        "action": "kill",
        "rank": None if step is None else rank,
        "step": step,
        "marker": str(marker),
    }
    script = SCRIPT
    if point == "checkpoint-swapping":
        script = script.replace("engine.step(batch_of(1))", f"engine.step(batch_of(1)); set_strike({strike!r})")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    if step is not None:
        environment[VARIABLE] = json.dumps([strike])
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, tmp_path / "saved"], env=environment, capture_output=True, text=True
    )
    assert marker.exists(), done.stderr
    if rank == 0:
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        assert "died with signal 9 (SIGKILL)" in done.stderr
    found = checkpoint.read(tmp_path / "saved")
    assert found.trainer.step == last
    # A run that goes on writes over what is left, and clears it away.
    with new_engine(PLANS[1]) as engine:
        assert engine.load(tmp_path / "saved").num_steps == last
        engine.step(batch_of(2))
        engine.save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == ["saved", "struck"]
