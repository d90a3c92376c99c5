"""LPT: the vectorised one is the naive one, bit for bit, and keeps Graham's bounds."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import largest, naive_lpt, optimum

from mmcompile.batching.balance.lpt import lpt, place_in_order


def weights_of(kind: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return {
        "lognormal": lambda: rng.lognormal(0, 1, count),
        "heavy": lambda: rng.pareto(1.1, count),
        "whole": lambda: rng.integers(0, 5, count).astype(np.float64),
        "equal": lambda: np.ones(count),
        "harmonic": lambda: 1 / np.arange(1, count + 1),
        "giant": lambda: np.append(np.ones(count - 1), count),
    }[kind]()


@pytest.mark.parametrize("kind", ["lognormal", "heavy", "whole", "equal", "harmonic", "giant"])
@pytest.mark.parametrize(("count", "num_bins"), [(1, 1), (5, 8), (100, 7), (700, 130), (3000, 200)])
def test_equals_one_sample_at_a_time(kind: str, count: int, num_bins: int) -> None:
    weights = weights_of(kind, count, seed=count)
    assert lpt(weights, num_bins).tolist() == naive_lpt(weights, num_bins)


def test_starts_from_loads_that_are_there() -> None:
    for num_bins in (4, 150):
        start = weights_of("lognormal", num_bins, seed=1)
        weights = weights_of("heavy", 5 * num_bins, seed=2)
        kept = start.copy()
        order = np.argsort(-weights, kind="stable")
        assert place_in_order(weights, order, num_bins, start).tolist() == naive_lpt(weights, num_bins, start)
        assert np.array_equal(start, kept), "the caller's loads are the caller's"


def test_samples_not_in_the_order_have_no_bin() -> None:
    assert place_in_order(np.array([3.0, 1.0, 2.0]), np.array([1, 2]), 2).tolist() == [-1, 0, 1]
    assert len(lpt(np.empty(0), 3)) == 0


@pytest.mark.parametrize("num_bins", [2, 3])
def test_bounds_of_lpt_and_of_any_order(num_bins: int) -> None:
    for seed in range(100):
        weights = weights_of(["lognormal", "heavy", "whole"][seed % 3], 8, seed) + 0.01
        best = optimum(weights, num_bins)
        assert largest(weights, lpt(weights, num_bins), num_bins) <= (4 / 3 - 1 / (3 * num_bins)) * best * (1 + 1e-12)
        any_order = place_in_order(weights, np.random.default_rng(seed).permutation(8), num_bins)
        assert largest(weights, any_order, num_bins) <= (2 - 1 / num_bins) * best * (1 + 1e-12)


def test_the_worst_case_of_lpt_is_as_published() -> None:
    """Graham's instance for 2 bins: 7/6 of the optimum."""
    weights = np.array([3.0, 3.0, 2.0, 2.0, 2.0])
    assert largest(weights, lpt(weights, 2), 2) == 7 and optimum(weights, 2) == 6
