"""Pairwise deferral: overloaded microbatches of the language model hand samples to the ones that run right after them.

Source: Entrain (thesis §4.5.2, Algorithm 4, Eq. 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

_RESOLUTION = 4096
"""Number of equal units that a microbatch's total work is divided into; work in fractions is rounded to these units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An overloaded microbatch, the underloaded one that runs after it, and the samples deferred from one to the other."""

    overloaded: int
    underloaded: int
    deferred: tuple[int, ...]
    """Positions of the deferred samples among the overloaded microbatch's samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferral:
    """Pairs of microbatches of one replica, the second of which does language-model work of the first one's samples."""

    pairs: tuple[Pair, ...]
    alone: tuple[int, ...]
    """The middle microbatch if their number is odd, else empty: it runs last and defers no samples."""
    threshold: float
    """Smallest possible language-model work of the longest paired microbatch after deferral, in the unit of given work."""

    @property
    def order(self) -> list[int]:
        """Microbatches in run order: overloaded 0, underloaded 0, overloaded 1, underloaded 1, ..."""
        return [index for pair in self.pairs for index in (pair.overloaded, pair.underloaded)] + list(self.alone)


def pairwise_deferral(microbatches: Sequence[np.ndarray], *, everywhere: bool = False) -> Deferral:
    """Pair microbatches of much and of little work, and choose samples whose work moves, to minimize the longest microbatch.

    Args:
        microbatches: language-model work of the samples of each microbatch, float64 [samples]; pairs are of indices in this list.
        everywhere: also move work in pairs that need no deferral to be within `Deferral.threshold`, and take the pairing with
            the least squares among those with the same longest microbatch. Times are more even, but more activations wait.
    """
    work = np.array([samples.sum() for samples in microbatches])
    half = len(work) // 2
    by_work = np.argsort(-work, kind="stable")
    over, under = by_work[:half], by_work[len(work) - half :]
    choices = [subsets_nearest(microbatches[index], (work[index] - work[under]) / 2) for index in over.tolist()]
    handed = np.zeros((half, half))
    for row, index in enumerate(over.tolist()):
        handed[row] = [microbatches[index][list(chosen)].sum() for chosen in choices[row]]
    paired = np.maximum(work[over][:, None] - handed, work[under] + handed)
    threshold, partner = bottleneck_match(paired, work[over])
    defers = np.broadcast_to(work[over][:, None] > threshold, paired.shape)
    if everywhere and half:
        defers = paired <= threshold
        partner = _least_squares(work[over], work[under], np.where(defers, handed, 0.0), threshold)
    pairs = [
        Pair(
            overloaded=int(over[row]),
            underloaded=int(under[column]),
            deferred=choices[row][column] if defers[row, column] else (),
        )
        for row, column in enumerate(partner)
    ]
    return Deferral(pairs=tuple(pairs), alone=tuple(by_work[half : len(work) - half].tolist()), threshold=threshold)


def _least_squares(over: np.ndarray, under: np.ndarray, handed: np.ndarray, threshold: float) -> np.ndarray:
    """Match overloaded microbatches (rows) to underloaded ones (columns) so that times after deferral are even: least squares.

    Args:
        over, under: work of the overloaded and of the underloaded microbatches, float64 [rows] and [columns].
        handed: work that a row would defer to a column, float64 [rows, columns].
        threshold: largest time allowed in a microbatch.

    Returns:
        Column of each row, int64 [rows].
    """
    rows, columns = over[:, None] - handed, under + handed
    late = np.maximum(rows, columns) > threshold
    squares = rows**2 + columns**2
    _, partner = linear_sum_assignment(np.where(late, squares.sum() + 1.0, squares))
    return partner


def subsets_nearest(work: np.ndarray, targets: np.ndarray) -> list[tuple[int, ...]]:
    """Return, for each target, the sample positions whose total work is nearest to it.

    Whole numbers of at most 4,096 in all are added exactly, other work is rounded to 4,096ths of its total. The reachable sums
    are the bits of one integer. This integer is kept after each sample, so that a sum's subset can be recovered.

    Args:
        work: float64 [samples], none negative.
        targets: float64 [targets], each at least 0. Of two equally near totals the smaller is taken.
    """
    total = float(work.sum())
    whole = total <= _RESOLUTION and bool((work == np.rint(work)).all())
    scale = 1.0 if whole or total == 0 else _RESOLUTION / total
    units = np.rint(work * scale).astype(int).tolist()
    reached = [1]
    for unit in units:
        reached.append(reached[-1] | reached[-1] << unit)
    return [_walk_back(units, reached, _nearest_bit(reached[-1], target * scale)) for target in targets.tolist()]


def _nearest_bit(bits: int, target: float) -> int:
    below = (bits & ((1 << (int(target) + 1)) - 1)).bit_length() - 1
    above = bits >> (below + 1)
    if not above:
        return below
    next_above = below + (above & -above).bit_length()
    return below if target - below <= next_above - target else next_above


def _walk_back(units: Sequence[int], reached: Sequence[int], total: int) -> tuple[int, ...]:
    chosen: list[int] = []
    for index in range(len(units) - 1, -1, -1):
        if not reached[index] >> total & 1:
            chosen.append(index)
            total -= units[index]
    return tuple(reversed(chosen))


def bottleneck_match(paired: np.ndarray, alone: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the smallest T such that all rows with `alone` > T can be matched to distinct columns with `paired` <= T.

    Args:
        paired: float64 [rows, rows]: time of a row with a column.
        alone: float64 [rows]: time of a row without one.

    Returns:
        T, one of the given times (0 without rows), and the column of each row, int64 [rows]: matched columns for critical rows
        (`alone` > T), the remaining columns in order for the rest.
    """
    candidates = np.unique(np.concatenate([paired.ravel(), alone]))
    if not len(candidates):
        return 0.0, np.empty(0, dtype=np.int64)
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _match(paired, alone, candidates[middle]) is None:
            low = middle + 1
        else:
            high = middle
    partner = _match(paired, alone, candidates[low])
    assert partner is not None, "at the largest candidate no row is critical"
    partner[partner < 0] = np.setdiff1d(np.arange(len(partner)), partner)
    return float(candidates[low]), partner


def _match(paired: np.ndarray, alone: np.ndarray, threshold: float) -> np.ndarray | None:
    """Match every critical row (`alone` above `threshold`) to a column of its own with which `paired` is at most `threshold`.

    Args:
        paired: time of the slower microbatch of an overloaded one (row) that defers samples to an underloaded one (column),
            float64 [rows, rows].
        alone: time of each overloaded microbatch if it defers no samples, float64 [rows].

    Returns:
        Column of each critical row, and -1 for the other rows, int64 [rows]; None if there is no such matching.
    """
    critical = np.flatnonzero(alone > threshold)
    partner = np.full(len(alone), -1, dtype=np.int64)
    if len(critical):
        graph = csr_array((paired[critical] <= threshold).astype(np.int8))
        partner[critical] = maximum_bipartite_matching(graph, perm_type="column")
        if (partner[critical] < 0).any():
            return None
    return partner
