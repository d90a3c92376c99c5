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

RESOLUTION = 4096
"""Units into which the work of an overloaded microbatch is rounded, unless it is a whole number that is smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An overloaded microbatch, the underloaded one that runs after it, and the samples it hands over."""

    overloaded: int
    underloaded: int
    deferred: tuple[int, ...]
    """Positions in the overloaded microbatch's samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferral:
    """Deferral of all microbatches of a replica."""

    pairs: tuple[Pair, ...]
    alone: tuple[int, ...]
    """The middle microbatch of an odd number: it runs last, with its own samples."""
    threshold: float
    """Smallest time within which every overloaded microbatch can end."""

    @property
    def order(self) -> list[int]:
        """ol_0, ul_0, ol_1, ul_1, ..."""
        return [index for pair in self.pairs for index in (pair.overloaded, pair.underloaded)] + list(self.alone)


def pairwise_deferral(
    microbatches: Sequence[np.ndarray], resolution: int = RESOLUTION, *, everywhere: bool = False
) -> Deferral:
    """Pair microbatches and choose what each pair defers, so that the longest of them is shortest.

    Args:
        microbatches: of each, the language-model work of its samples, float64 [samples].
        resolution: units of the discretised subset sums.
        everywhere: pairs that end in time without deferral defer too, and of all pairings with the same longest microbatch the
            one with the least squares is taken: evener, for more activations that wait.
    """
    work = np.array([samples.sum() for samples in microbatches])
    half = len(work) // 2
    by_work = np.argsort(-work, kind="stable")
    over, under = by_work[:half], by_work[len(work) - half :]
    choices = [
        subsets_nearest(microbatches[index], (work[index] - work[under]) / 2, resolution) for index in over.tolist()
    ]
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
    """Column of each row, int64 [rows], so that all keep to the threshold and the squares of all times are least."""
    rows, columns = over[:, None] - handed, under + handed
    late = np.maximum(rows, columns) > threshold
    squares = rows**2 + columns**2
    _, partner = linear_sum_assignment(np.where(late, squares.sum() + 1.0, squares))
    return partner


def subsets_nearest(work: np.ndarray, targets: np.ndarray, resolution: int = RESOLUTION) -> list[tuple[int, ...]]:
    """Return, for each target, the positions of the samples whose total is nearest to it.

    Totals are exact for whole numbers below the resolution. Sums that can be reached are bits of one integer, kept for each
    sample to walk back.

    Args:
        work: float64 [samples], none negative.
        targets: float64 [targets], each at least 0. Of two totals as near, the smaller is taken.
        resolution: whole numbers that the total of `work` is rounded to.
    """
    total = float(work.sum())
    whole = total <= resolution and bool((work == np.rint(work)).all())
    scale = 1.0 if whole or total == 0 else resolution / total
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
    """The smallest T for which every row over T alone can have a column of its own with which it is at most T.

    Args:
        paired: float64 [rows, rows]: time of a row with a column.
        alone: float64 [rows]: time of a row without one.

    Returns:
        T, one of the numbers given (0 without rows), and the column of each row, int64 [rows]: critical rows as matched, the
        others what is left, in order.
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
    """Column of each critical row and -1 for the others; None if they cannot all have one (Hopcroft-Karp)."""
    critical = np.flatnonzero(alone > threshold)
    partner = np.full(len(alone), -1, dtype=np.int64)
    if len(critical):
        graph = csr_array((paired[critical] <= threshold).astype(np.int8))
        partner[critical] = maximum_bipartite_matching(graph, perm_type="column")
        if (partner[critical] < 0).any():
            return None
    return partner
