"""A rank that shares tokens dies inside a step: the engine names it, and nobody hangs in the exchange of keys and values."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from zoo import ALL, samples

import mmcompile as mm
from mmcompile.errors import EngineError
from mmcompile.step.collate import collate


def _process_of_rank(rank: int) -> int:
    """The worker of this process that was started as `rank`, by its command line."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            order = (path / "cmdline").read_bytes().split(b"\0")[-2]
        except (OSError, IndexError):  # It ended while we looked.
            continue
        if parent == os.getpid() and order.startswith(b"{") and json.loads(order)["rank"] == rank:
            return int(path.name)
    raise AssertionError(f"no process of rank {rank}")


def test_a_killed_shard_ends_the_run_and_is_named() -> None:
    batches = samples(ALL["llava"], 4, seed=1)
    model, batch = ALL["llava"].build(), collate(batches[:2])
    plan = mm.plan(
        model, batch, num_microbatches=2, stages={"vision_tower": 1, "language_model": 1}, context_parallel=2
    )
    with mm.parallelize(model, batch, plan) as engine:
        engine.step(batches)
        victim = _process_of_rank(2)
        threading.Timer(0.05, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"rank 2 \(stage language_model\.0@1\) died with signal 9"):
            for _ in range(1000):
                engine.step(batches)
    assert time.monotonic() - began < 60
