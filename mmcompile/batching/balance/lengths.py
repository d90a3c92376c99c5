"""Batches of sequences by length, one batch a bin: OrchMLLM's algorithms for what a batch costs in different models.

With L the number of tokens of a batch that are computed, b that of its sequences, l their lengths, and constants alpha and beta,
a batch costs alpha L plus an attention term (OrchMLLM Eq. 2 and Appendix A):

    packed       L = sum l      beta sum l^2        Algorithm 1 (`lpt`); 4 if l^2 is not negligible
    padded       L = b max l    beta L^2 / b        Algorithm 2
    convolution  L = sum l      beta b (max l)^2    Algorithm 5: only the attention is padded
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import pairwise

import numpy as np

from mmcompile.batching.balance.lpt import lpt, place_in_order
from mmcompile.errors import ConfigError


def padded(lengths: np.ndarray, num_bins: int) -> np.ndarray:
    """Minimize the padded tokens of the largest bin, exactly; return the bin of each sample, int64 [samples].

    Source: OrchMLLM Algorithm 2. In an optimum, batches are runs of the sequences sorted by length. Each run, from the
    shortest sequence on, is as long as a bound on its padded tokens allows. Bisection finds the smallest bound that needs at most
    `num_bins` batches. Algorithm 2 as printed adds a sequence only when it opens a batch, and starts the search at the shortest
    sequence.

    Args:
        lengths: int [samples] in tokens, at least 1.
    """
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order].tolist()
    if not ascending:
        return np.empty(0, dtype=np.int64)
    low = ascending[-1]
    high = low * -(-len(ascending) // num_bins)
    while low < high:
        middle = (low + high) // 2
        if _least_batches(ascending, middle, num_bins) is None:
            low = middle + 1
        else:
            high = middle
    ends = _least_batches(ascending, low, num_bins)
    assert ends is not None, "equal runs keep to the first upper bound"
    return _spread_runs(order, [0, *ends])


def _least_batches(ascending: list[int], bound: int, most: int) -> list[int] | None:
    """Cut ascending lengths into runs, each the longest with at most `bound` padded tokens: number of sequences * largest length.

    Returns:
        End index of each run; None if there are more than `most` runs.
    """
    count = len(ascending)
    size = bisect_right(range(1, count + 1), bound, key=lambda size: size * ascending[size - 1])
    ends: list[int] = []
    start = 0
    while start < count:
        if len(ends) == most:
            return None
        # A later run has longer sequences and so never more of them: the search starts at the size before.
        size = min(size, count - start)
        while size * ascending[start + size - 1] > bound:
            size -= 1
        start += size
        ends.append(start)
    return ends


def quadratic(lengths: np.ndarray, num_bins: int, tolerance: float | None = None) -> np.ndarray:
    """Balance sums of lengths, and sums of squares among similar sums; return the bin of each sample, int64 [samples].

    Source: OrchMLLM Algorithm 4. As printed, two sums are similar if they differ by less than the tolerance; this is not
    transitive, so the result depends on the order in the heap. This function calls sums similar if they fall into the same
    interval of that width.

    Args:
        lengths: [samples] in tokens.
        tolerance: width of the interval in tokens; the mean length if not given.
    """
    if tolerance is None:
        tolerance = float(lengths.mean()) if len(lengths) else 1.0
    if tolerance <= 0:
        raise ConfigError(f"a tolerance of {tolerance} tokens; wanted more than 0")
    order = np.argsort(-lengths, kind="stable")
    heap = [(0, 0, index, 0) for index in range(num_bins)]
    chosen: list[int] = []
    for length in lengths[order].tolist():
        _, squares, index, total = heap[0]
        chosen.append(index)
        total += length
        heapq.heapreplace(heap, (int(total // tolerance), squares + length * length, index, total))
    bins = np.empty(len(lengths), dtype=np.int64)
    bins[order] = chosen
    return bins


def convolution(lengths: np.ndarray, num_bins: int) -> np.ndarray:
    """Fill batches of similar lengths up to a bound, the rest by LPT; return the bin of each sample, int64 [samples].

    Source: OrchMLLM Algorithm 5. The bound is the largest sum of lengths in a bin that Algorithm 1 gives. As printed, the padded
    length of a batch is computed from its last and shortest sequence; here it is computed from the first and longest.

    Args:
        lengths: int [samples] in tokens, at least 1.
    """
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
    bound = int(np.bincount(lpt(lengths, num_bins), weights=lengths).max())
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    ends = [0]
    while len(ends) <= num_bins and ends[-1] < len(order):
        ends.append(min(len(order), ends[-1] + bound // int(descending[ends[-1]])))
    bins = _spread_runs(order, ends)
    here = bins >= 0
    start = np.bincount(bins[here], weights=lengths[here], minlength=num_bins)
    rest = place_in_order(lengths, order[ends[-1] :], num_bins, start)
    return np.where(here, bins, rest)


def _spread_runs(order: np.ndarray, ends: list[int]) -> np.ndarray:
    """Return the bin of each sample, int64 [samples]: i for samples `order[ends[i] : ends[i + 1]]`, -1 for those in no bin."""
    bins = np.full(len(order), -1, dtype=np.int64)
    for index, (start, end) in enumerate(pairwise(ends)):
        bins[order[start:end]] = index
    return bins
