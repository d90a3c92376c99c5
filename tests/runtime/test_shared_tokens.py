"""A rank that shares tokens dies inside a step: the engine names it, and nobody hangs in the exchange of keys and values."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.processes.control_jobs import children
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.data.collate import collate
from mmcompile.errors import EngineError


def _process_of_rank(rank: int) -> int:
    """The worker of this process that was started as `rank`: one process forks them all, in order."""
    (parent,) = (pid for pid in children(os.getpid()) if "runtime.worker" in Path(f"/proc/{pid}/cmdline").read_text())
    return children(parent)[rank - 1]


@pytest.mark.slow
def test_a_killed_shard_ends_the_run_and_is_named() -> None:
    batches = samples(ALL["llava"], 4, seed=1)
    model, batch = ALL["llava"].build(), collate(batches[:2])
    plan = mm.plan(
        model, batch, num_microbatches=2, stages={"vision_tower": 1, "language_model": 1}, context_parallel=2
    )
    with mm.parallelize(model, batch, plan, allow_unused=True) as engine:
        engine.step(batches)
        victim = _process_of_rank(2)
        threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"rank 2 \(stage language_model\.0@1\) died with signal 9"):
            for _ in range(1000):
                engine.step(batches)
    assert time.monotonic() - began < 60
