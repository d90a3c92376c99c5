"""OrchMLLM's algorithms by length: what a batch costs, the exact padded one, and the print's slips."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import largest, naive_lpt, optimum, partitions
from support.oracles.batch_costs import BatchKind, batch_costs

from mmcompile.batching.balance.lengths import convolution, padded, quadratic
from mmcompile.batching.balance.lpt import lpt
from mmcompile.errors import ConfigError

ALGORITHMS = (lpt, padded, quadratic, convolution)


def random_lengths(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.maximum(1, rng.lognormal(3, rng.choice([0.2, 1.0, 1.5]), count)).astype(np.int64)


def best_over_partitions(lengths: np.ndarray, num_bins: int, kind: BatchKind) -> float:
    return min(float(batch_costs(lengths, bins, num_bins, kind).max()) for bins in partitions(len(lengths), num_bins))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchKind.PACKED, [2 * (5 + 3) + 10 * (25 + 9), 2 * 4 + 10 * 16, 0]),
        (BatchKind.PADDED, [2 * 2 * 5 + 10 * (2 * 5) ** 2 / 2, 2 * 4 + 10 * 16, 0]),
        (BatchKind.CONVOLUTION, [2 * (5 + 3) + 10 * 2 * 25, 2 * 4 + 10 * 16, 0]),
    ],
)
def test_what_a_batch_costs(kind: BatchKind, expected: list[float]) -> None:
    found = batch_costs(np.array([5, 4, 3, 9]), np.array([0, 1, 0, -1]), 3, kind, alpha=2, beta=10)
    assert found.tolist() == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("count", "num_bins"), [(0, 2), (1, 1), (1, 4), (3, 7), (40, 5), (1000, 130)])
def test_every_sample_is_in_one_bin(algorithm: object, count: int, num_bins: int) -> None:
    lengths = random_lengths(count, count)
    bins = algorithm(lengths, num_bins)  # type: ignore[operator]
    assert bins.shape == (count,) and ((bins >= 0) & (bins < num_bins)).all()
    assert np.array_equal(bins, algorithm(lengths, num_bins))  # type: ignore[operator]


def test_packed_is_lpt() -> None:
    lengths = random_lengths(0, 50)
    assert lpt(lengths, 6).tolist() == naive_lpt(lengths, 6)


@pytest.mark.parametrize("num_bins", [2, 3, 4])
def test_padded_is_optimal(num_bins: int) -> None:
    for seed in range(25):
        lengths = random_lengths(seed, 7)
        found = batch_costs(lengths, padded(lengths, num_bins), num_bins, BatchKind.PADDED).max()
        assert found == best_over_partitions(lengths, num_bins, BatchKind.PADDED)


def test_padded_of_equal_lengths_is_equal_counts() -> None:
    assert np.bincount(padded(np.full(12, 7), 4)).tolist() == [3, 3, 3, 3]


def test_quadratic_follows_squares_where_sums_are_alike() -> None:
    lengths = np.array([8, 4, 4, 4])
    plain, found = lpt(lengths, 2), quadratic(lengths, 2, tolerance=9)
    assert plain.tolist() == [0, 1, 1, 0], "by sums alone, the bins are at 8 and 8 and the first takes the last"
    assert found.tolist() == [0, 1, 1, 1], "sums of 8 and 8 are alike, and 8^2 is more than 2 * 4^2"


def test_quadratic_with_a_narrow_tolerance_is_lpt() -> None:
    lengths = np.arange(1, 60)
    assert largest(lengths, quadratic(lengths, 5, 1e-3), 5) == largest(lengths, lpt(lengths, 5), 5)


def test_quadratic_refuses_no_tolerance() -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        quadratic(np.array([1, 2]), 2, tolerance=0)


def test_convolution_keeps_full_batches_to_the_bound_of_packed() -> None:
    """Its sums stay near those of Algorithm 1, and its padded attention is lower."""
    worse = []
    for seed in range(20):
        lengths = random_lengths(seed, 400)
        first, second = lpt(lengths, 8), convolution(lengths, 8)
        sums = [batch_costs(lengths, bins, 8, BatchKind.PACKED).max() for bins in (first, second)]
        attention = [
            batch_costs(lengths, bins, 8, BatchKind.CONVOLUTION, alpha=0, beta=1).max() for bins in (first, second)
        ]
        assert sums[1] <= sums[0] + lengths.max()
        worse.append(attention[1] / attention[0])
    assert np.median(worse) < 0.9


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_of_lengths_within_a_bound_of_the_optimum(algorithm: object) -> None:
    for seed in range(40):
        lengths = random_lengths(seed, 8)
        found = largest(lengths, algorithm(lengths, 3), 3)  # type: ignore[operator]
        limit = {"lpt": 4 / 3 - 1 / 9, "convolution": 2.0}.get(algorithm.__name__)  # type: ignore[attr-defined]
        assert limit is None or found <= limit * optimum(lengths, 3) * (1 + 1e-12)
