"""`benchmarks/stability.py`: the smallest stable batch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from support.paths import BENCHMARKS

from mmcompile.errors import ConfigError

sys.path.insert(0, str(BENCHMARKS))
stability: Any = import_module("stability")
Stability, num_trials, stable_batch = stability.Stability, stability.num_trials, stability.stable_batch


def test_trials() -> None:
    assert num_trials(0.05, 0.05) == 59
    assert num_trials(0.01, 0.05) == 90
    assert all(
        (1 - p) ** num_trials(a, p) <= a < (1 - p) ** (num_trials(a, p) - 1) for a in (0.1, 0.01) for p in (0.1, 0.02)
    )
    with pytest.raises(ConfigError, match="both lie between 0 and 1"):
        num_trials(0.0, 0.05)


def mix(share: float, spread: float, count: int = 4000) -> np.ndarray:
    """Work [samples, 2] with a mean share of the first component."""
    generator = np.random.default_rng(1)
    first = np.exp(spread * generator.standard_normal(count) - spread**2 / 2) * share
    second = np.exp(spread * generator.standard_normal(count) - spread**2 / 2) * (1 - share)
    return np.stack([first, second], axis=1)


def test_small_batches_are_unstable_and_large_ones_agree() -> None:
    found = stable_batch(mix(0.5, 0.4), ("encoder", "language_model"), 16)
    assert found.num_trials == 59 and found.stable_size in (64, 128, 256) and found.allocations == ((8, 8),)
    assert len(found.trials[0].seen) > 4
    spreads = [trial.share_std[0] for trial in found.trials]
    assert all(later < earlier for earlier, later in zip(spreads, spreads[1:], strict=False))
    assert all(sum(seen.batches for seen in trial.seen) == 60 for trial in found.trials)


def test_less_spread_needs_a_smaller_batch() -> None:
    sizes = [stable_batch(mix(0.5, spread), ("a", "b"), 16).stable_size for spread in (0.05, 0.2, 0.8)]
    assert all(size is not None for size in sizes) and sizes == sorted(sizes, key=lambda size: size or 0)
    assert sizes[0] != sizes[-1]


def test_on_a_rounding_boundary_both_allocations_are_reported() -> None:
    found = stable_batch(mix(7.5 / 16, 0.4), ("encoder", "language_model"), 16, cap=1024)
    assert found.stable_size is None and found.trials[-1].size == 1024
    assert set(found.allocations) == {(7, 9), (8, 8)}
    assert "not stable at 1024 samples" in str(found)
    assert "7:9" in str(found).splitlines()[-1] and "8:8" in str(found).splitlines()[-1]


def test_work_that_is_no_sum_over_samples() -> None:
    lengths = np.random.default_rng(3).integers(10, 100, size=500)

    def padded(drawn: np.ndarray) -> np.ndarray:
        return np.stack(
            [np.full(len(drawn), drawn.shape[1] * 60.0), lengths[drawn].max(axis=1) * drawn.shape[1]], axis=1
        )

    found = stable_batch(padded, ("encoder", "language_model"), 10, num_samples=500, start=4, cap=256)
    assert found.trials[-1].share_mean[0] < found.trials[0].share_mean[0]  # more padding in larger batches


def test_the_same_seed_gives_the_same_report_and_json_round_trips() -> None:
    found = stable_batch(mix(0.6, 0.3), ("a", "b"), 16, seed=5)
    assert found == stable_batch(mix(0.6, 0.3), ("a", "b"), 16, seed=5)
    assert Stability.from_json(found.to_json()) == found


def test_text() -> None:
    text = str(stable_batch(mix(0.5, 0.05), ("encoder", "language_model"), 2))
    assert text.splitlines()[0] == "59 batches a size (alpha 0.05, p_error 0.05), 2 devices, encoder : language_model"
    assert "1:1 x60" in text and text.endswith("batches of 1 samples or more give 1:1")


def test_going_on_after_the_first_stable_size() -> None:
    found = stable_batch(mix(0.5, 0.05), ("a", "b"), 2, factor=4, cap=256, stop=False)
    assert [trial.size for trial in found.trials] == [1, 4, 16, 64, 256] and found.stable_size == 1


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 samples, batch sizes from 1 to 4096"):
        stable_batch(np.zeros((0, 2)), ("a", "b"), 4)
