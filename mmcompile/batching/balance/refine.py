"""Local search over buckets: many pairs of a heavy and a light bucket at once exchange the two samples that help most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy.optimize import linear_sum_assignment

_SPARE = 3
"""Number of dummy samples of weight 0 in the bucket with most samples. Exchanging a sample for a dummy moves the sample."""
_LEAST_GAIN = 1e-12
_FAILED = 100.0
"""Height added to a pair of buckets of which no exchange helped, so that others are tried first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Limits of the local search, in rounds instead of seconds, so that results do not depend on the machine."""

    rounds: int = 80
    pairs: int = 16
    """Number of pairs of buckets in one round."""
    tolerance: float = 0.004
    """Relative excess over the lower bound at which the search ends."""


class Buckets:
    """Partition of samples into buckets, with loads (times / a lower bound on a bucket's largest time) kept up to date."""

    def __init__(self, shares: np.ndarray, bucket: np.ndarray, num_buckets: int) -> None:
        """Start from a partition.

        Args:
            shares: float64 [samples, columns]: each sample's times in the components / a lower bound on the slowest bucket.
            bucket: bucket of each sample at the start, int [samples].
        """
        self._nothing = len(shares)
        # Columns come first: they are few, and reductions over a short last axis are slow.
        self._shares = np.hstack([shares.T, np.zeros((shares.shape[1], 1))])
        counts = np.bincount(bucket, minlength=num_buckets)
        order = np.argsort(bucket, kind="stable")
        place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._samples = np.full((num_buckets, counts.max(initial=0) + _SPARE), self._nothing)
        self._samples[bucket[order], place] = order
        self._loads = self._shares[:, self._samples].sum(axis=2)

    @property
    def bucket(self) -> np.ndarray:
        """Bucket of each sample, int64 [samples]."""
        found = np.empty(self._nothing + 1, dtype=np.int64)
        found[self._samples] = np.arange(len(self._samples))[:, None]
        return found[:-1]

    @property
    def height(self) -> float:
        """Largest time of a component in a bucket / the lower bound."""
        return float(_largest(self._loads).max(initial=0.0))

    def refine(self, effort: Effort) -> None:
        """Lower the highest buckets until all are within the tolerance, no exchange helps, or the rounds are used up."""
        num_buckets = len(self._samples)
        failed = np.zeros((num_buckets, num_buckets))
        for _ in range(effort.rounds):
            heights = _largest(self._loads)
            order = np.argsort(-heights, kind="stable")
            if heights[order[0]] <= 1 + effort.tolerance or num_buckets == 1:
                return
            heavy = order[: max(1, min(effort.pairs, num_buckets // 2))]
            heavy, light = self._partners(heavy, order[len(heavy) :], failed)
            helped = self._exchange(heavy, light, heights)
            failed[heavy[~helped], light[~helped]] = _FAILED
            for changed in (heavy[helped], light[helped]):
                failed[changed] = failed[:, changed] = 0.0
            if not helped.any() and (failed[order[0], order[1:]] > 0).all():
                return

    def _partners(self, heavy: np.ndarray, others: np.ndarray, failed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        halves = (self._loads[:, heavy, None] + self._loads[:, None, others]) / 2
        rows, columns = linear_sum_assignment(_largest(halves) + failed[np.ix_(heavy, others)])
        return heavy[rows], others[columns]

    def _exchange(self, heavy: np.ndarray, light: np.ndarray, heights: np.ndarray) -> np.ndarray:
        """Exchange a sample of buckets heavy[i] and light[i] if both end below heights[heavy[i]]; return where, bool [pairs]."""
        given, taken = self._shares[:, self._samples[heavy]], self._shares[:, self._samples[light]]
        change = given[..., None] - taken[:, :, None]
        after = np.maximum(
            _largest(self._loads[:, heavy, None, None] - change), _largest(self._loads[:, light, None, None] + change)
        ).reshape(len(heavy), -1)
        best = after.argmin(axis=1)
        helped = after[np.arange(len(heavy)), best] < heights[heavy] - _LEAST_GAIN
        left, right = np.divmod(best[helped], self._samples.shape[1])
        heavy, light = heavy[helped], light[helped]
        moved = self._samples[heavy, left]
        self._samples[heavy, left] = self._samples[light, right]
        self._samples[light, right] = moved
        for changed in (heavy, light):
            self._loads[:, changed] = self._shares[:, self._samples[changed]].sum(axis=2)
        return helped


def _largest(columns: np.ndarray) -> np.ndarray:
    # Several times as fast as columns.max(axis=0) where there are few columns.
    return reduce(np.maximum, columns)
