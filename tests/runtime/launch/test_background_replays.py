"""Replays in a process of their own give what replays here give; they end with the engine, and steps go on without them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from zoo import ALL
from zoo.free_sizes import free_batch

from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import FlatBatch, completed
from mmcompile.ir.replay.hole_sites import HoleSites
from mmcompile.ir.replay.learned_capture import capture_learned
from mmcompile.ir.replay.learning import Learner, ReplayedHoles
from mmcompile.ir.stored.capture_store import LearnedRecord
from mmcompile.runtime.launch.background_replays import BackgroundReplays

NAME = "qwen2_5_vl"


def _learned(model: nn.Module) -> tuple[Learner, LearnedRecord, ReplayedHoles]:
    batches = [_batch(model, seed, media) for seed, media in ((1, 2), (2, 3), (3, 2))]
    learner = Learner(model)
    asked = [learner.see(batch) for batch in batches][-1]
    learned = learner.learned(asked)
    found = capture_learned(learner, learned, capture(model, batches[0]).graph.components)
    assert isinstance(found.holes, ReplayedHoles)
    return learner, LearnedRecord.of(learner, learned, asked, found, HoleSites(), kept=False), found.holes


def _batch(model: nn.Module, seed: int, media: int) -> FlatBatch:
    return completed(model, free_batch(NAME, seed, media))


def test_the_process_fills_what_this_one_fills_until_it_ends() -> None:
    model = ALL[NAME].build()
    learner, record, holes = _learned(model)
    replays = BackgroundReplays(model)
    assert replays.fill(learner, record, _batch(model, 10, 3)) is None
    replays.start()
    try:
        end = time.monotonic() + 200
        while (given := replays.fill(learner, record, _batch(model, 11, 3))) is None and time.monotonic() < end:
            time.sleep(0.2)
        assert given is not None, "the process was not ready in time"
        for seed, media in ((11, 3), (12, 4)):
            batch = _batch(model, seed, media)
            given, wanted = replays.fill(learner, record, batch), holes.fill(batch)
            assert given is not None and given.keys() == wanted.keys()
            # Numbers are lengths of tensors without values.
            valued = [name for name, value in wanted.items() if not value.is_floating_point()]
            assert valued and all(torch.equal(given[name], wanted[name]) for name in valued)
            assert all(given[name].shape == value.shape for name, value in wanted.items())
        assert replays.num_filled == 3
        ids = torch.ones(2, 8, dtype=torch.long)
        text = FlatBatch({"input_ids": ids, "labels": ids})
        assert replays.fill(learner, record, text) is None, "another family is for this process to refuse"
        process = replays._process  # pyright: ignore[reportPrivateUsage]
        assert process is not None
        process.kill()
        with pytest.warns(UserWarning, match="the process of replays ended"):
            assert replays.fill(learner, record, _batch(model, 13, 2)) is None
        assert replays.fill(learner, record, _batch(model, 13, 2)) is None
    finally:
        replays.close()
    replays.close()
