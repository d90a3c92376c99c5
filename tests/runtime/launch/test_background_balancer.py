"""A balancer in a process of its own decides as the one here does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mmcompile.batching.balance.assignment import Grid, SampleCosts
from mmcompile.batching.balance.registry import balancer
from mmcompile.errors import ConfigError
from mmcompile.runtime.launch.background_balancer import BackgroundBalancer, Recipe

GRID = Grid(num_replicas=(2, 3), num_microbatches=4)
PACKED = "post-balance-packed"
RECIPE = Recipe(module=balancer.__module__, function=balancer.__name__, arguments=(PACKED,))
WITHIN_S = 60.0


@pytest.fixture
def aside() -> Iterator[BackgroundBalancer]:
    made = BackgroundBalancer(balancer(PACKED), RECIPE)
    made.start()
    yield made
    made.close()


def _costs(seed: int) -> SampleCosts:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 50, size=(2, 40))
    lengths[1] += 1
    return SampleCosts(components=("vision", "language_model"), costs=lengths * 1e-3, lengths=lengths)


def _wait(aside: BackgroundBalancer) -> None:
    end = time.monotonic() + WITHIN_S
    while not aside.is_up:
        assert time.monotonic() < end, "the process did not come up"
        time.sleep(0.01)


def test_the_process_decides_as_this_one_before_and_after_it_is_up(aside: BackgroundBalancer) -> None:
    wanted = [balancer(PACKED).explained(_costs(seed), GRID) for seed in range(3)]
    assert aside.explained(_costs(0), GRID) == wanted[0]
    _wait(aside)
    assert [aside.explained(_costs(seed), GRID) for seed in range(3)] == wanted
    without_lengths = SampleCosts(components=("vision", "language_model"), costs=np.ones((2, 4)))
    with pytest.raises(ConfigError, match="balances tokens and these costs have no lengths"):
        aside.assign(without_lengths, GRID)
    assert aside.explained(_costs(1), GRID) == wanted[1], "an error of one step must not end the next"


def test_a_process_that_is_killed_is_told_and_replaced_by_this_one(aside: BackgroundBalancer) -> None:
    _wait(aside)
    assert aside._process is not None
    os.kill(aside._process.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="steps are balanced in this process"):
        found = aside.explained(_costs(5), GRID)
    assert found == balancer(PACKED).explained(_costs(5), GRID)
    assert aside.explained(_costs(6), GRID) == balancer(PACKED).explained(_costs(6), GRID)


def test_it_ends_with_its_owner(aside: BackgroundBalancer) -> None:
    process = aside._process
    aside.close()
    aside.close()
    assert process is not None and process.returncode is not None
