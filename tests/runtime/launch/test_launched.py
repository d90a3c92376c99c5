"""The same script on every rank of torchrun: the calls take part together, and errors reach all."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.paths import TESTS

from mmcompile.runtime.engine import Engine

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

SCRIPT = """
import functools, sys
import torch
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from mmcompile.errors import BatchError, EngineError
from mmcompile.runtime.engine import Engine

torch.manual_seed(0)
model = HandModel(tied=True)
fault = "self.calls = getattr(self, 'calls', 0) + 1; self.calls < 11 or self.t['no such tensor']"
engine = Engine(
    hand_plan(4, vision=1, lm0=0, lm1=1, lm2=0), HandSource(model, fault), model=model,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), clip_norm=1.0,
)

def say(*words):
    # One write a line: both ranks write to the same pipe.
    sys.stdout.write(" ".join(map(str, (f"{engine.rank}:", *words))) + "\\n")
    sys.stdout.flush()

# Only rank 0's samples count.
mine = hand_samples(4, images=(1,)) if engine.rank == 0 else []
say("loss", engine.step(mine).loss)
engine.save(sys.argv[1])
say("loss", engine.step(mine, trace=True).loss)
say("events", len(engine.trace()) > 0, "state", len(engine.state_dict()) > 0)
engine.load(sys.argv[1])
try:
    engine.step([])
except BatchError as error:
    say("refused", error)
say("loss", engine.step(mine).loss, engine.num_steps)
try:
    engine.step(mine)
except EngineError as error:
    say("failed", str(error).partition(";")[0])
engine.close()
"""


def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
            tmp_path / "c",
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = HandModel(tied=True)
    plan = hand_plan(4, vision=0, lm0=0, lm1=0, lm2=0)
    with Engine(plan, HandSource(model), optimizer=SGD, clip_norm=1.0) as engine:
        losses = [engine.step(hand_samples(4, images=(1,))).loss for _ in range(2)]
    for rank in range(2):
        said = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(f"{rank}:")]
        assert len(said) == 6, done.stdout
        first, second, events, refused, third, failed = said
        assert float(first.split()[1]) == pytest.approx(losses[0], rel=1e-12)
        assert float(second.split()[1]) == pytest.approx(losses[1], rel=1e-12)
        assert third == f"{second} 2"
        assert events == ("events True state True" if rank == 0 else "events False state False")
        assert refused == "refused a step needs at least one sample, got an empty list"
        assert failed == "failed rank 1 (stage language_model.1) failed in step 3 while F2: KeyError: 'no such tensor'"
