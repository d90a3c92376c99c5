"""What a batch of sequences costs in different models: OrchMLLM Eq. 2 and Appendix A, as in `balance.lengths`."""

from __future__ import annotations

from enum import StrEnum

import numpy as np


class BatchKind(StrEnum):
    """Layout of the sequences of a batch: packed, padded or convolution."""

    PACKED = "packed"
    PADDED = "padded"
    CONVOLUTION = "convolution"


def batch_costs(
    lengths: np.ndarray, bins: np.ndarray, num_bins: int, kind: BatchKind, *, alpha: float = 1.0, beta: float = 0.0
) -> np.ndarray:
    """Return the cost of every batch, float64 [bins]; 0 for an empty one.

    Args:
        lengths: int [samples], tokens.
        bins: int [samples]; -1 for a sample in no batch.
        alpha: cost of a computed token.
        beta: cost of a pair of tokens in attention.
    """
    here = bins >= 0
    lengths, bins = lengths[here].astype(np.float64), bins[here]
    total = np.bincount(bins, weights=lengths, minlength=num_bins)
    if kind is BatchKind.PACKED:
        return alpha * total + beta * np.bincount(bins, weights=lengths**2, minlength=num_bins)
    count = np.bincount(bins, minlength=num_bins)
    longest = np.zeros(num_bins)
    np.maximum.at(longest, bins, lengths)
    return alpha * (count * longest if kind is BatchKind.PADDED else total) + beta * count * longest**2
