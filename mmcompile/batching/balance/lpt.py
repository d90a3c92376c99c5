"""Longest processing time first: the heaviest sample left goes to the lightest bin.

Within 4/3 - 1/(3 bins) of the optimal largest bin (Graham 1969). In O(n log n), fast for thousands of bins because of this:
with bins sorted by load and samples by weight, sample j goes to bin j for as long as no earlier bin, with what it has just
been given, is lighter than bin j. That many samples are placed at once; the result is that of one at a time, bit for bit.
"""

from __future__ import annotations

import heapq

import numpy as np

_MIN_ROUND = 96
"""Least number of samples to place at once for which NumPy operations are faster than one sample at a time."""


def lpt(weights: np.ndarray, num_bins: int) -> np.ndarray:
    """Assign samples to bins by LPT; return the bin of each sample, int64 [samples].

    Args:
        weights: [samples], none negative. Equal weights are taken in order of samples.
        num_bins: bins; of equally light ones the first is taken.
    """
    return place_in_order(weights, np.argsort(-weights, kind="stable"), num_bins)


def place_in_order(
    weights: np.ndarray, order: np.ndarray, num_bins: int, start: np.ndarray | None = None
) -> np.ndarray:
    """Assign samples in the given order, each to the lightest bin (list scheduling); return the bin of each, int64 [samples].

    Within 2 - 1/bins of the optimum for any order.

    Args:
        weights: [samples].
        order: int [taken]: samples to place, first to last; the others get bin -1.
        start: load of each bin beforehand, [bins]; zeros if not given.
    """
    loads = np.zeros(num_bins) if start is None else np.array(start, dtype=np.float64)
    sorted_weights = weights[order].astype(np.float64)
    bins = np.empty(len(order), dtype=np.int64)
    done = 0
    while done < len(order):
        placed = _round(loads, sorted_weights, bins, done) if num_bins > _MIN_ROUND else 0
        done += placed
        if placed < _MIN_ROUND:
            # Sorting bins costs as much as placing that many samples one by one, so do that for a while.
            until = min(len(order), done + max(num_bins, _MIN_ROUND)) if num_bins > _MIN_ROUND else len(order)
            _one_by_one(loads, sorted_weights, bins, done, until)
            done = until
    result = np.full(len(weights), -1, dtype=np.int64)
    result[order] = bins
    return result


def _round(loads: np.ndarray, weights: np.ndarray, bins: np.ndarray, done: int) -> int:
    """Place the next samples, at most one in each bin, for as long as that equals placing them one at a time.

    Args:
        loads: load of each bin, updated in place.
        weights: weights of all samples in order of placement, float64 [samples].
        bins: bin of each sample in this order, written in place.
        done: number of samples placed before.

    Returns:
        Number of samples placed.
    """
    lightest = np.argsort(loads, kind="stable")[: len(weights) - done]
    sums = loads[lightest]
    after = sums + weights[done : done + len(lightest)]
    behind = np.minimum.accumulate(after)[:-1] <= sums[1:]
    count = int(behind.argmax()) + 1 if behind.any() else len(lightest)
    bins[done : done + count] = lightest[:count]
    loads[lightest[:count]] = after[:count]
    return count


def _one_by_one(loads: np.ndarray, weights: np.ndarray, bins: np.ndarray, done: int, until: int) -> None:
    heap = [(load, index) for index, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    chosen: list[int] = []
    for weight in weights[done:until].tolist():
        load, index = heap[0]
        chosen.append(index)
        heapq.heapreplace(heap, (load + weight, index))
    bins[done:until] = chosen
    for load, index in heap:
        loads[index] = load
