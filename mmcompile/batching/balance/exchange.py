"""`exchanged`: what moves between the replicas of two components, or of one component in two assignments."""

from __future__ import annotations

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment


def exchanged(before: Assignment, source: int, after: Assignment, target: int, rows: np.ndarray) -> np.ndarray:
    """Return the rows that each source replica sends to each target replica, int64 [sources, targets].

    Rows go straight from where a component computes a sample to where another one does, wherever the sample arrived:
    OrchMLLM's rearrangement composition (section 6). Samples without work in one of the two move nothing.

    Args:
        before, source: assignment, and index of the component in it, whose replicas send.
        after, target: assignment of the same samples, and index of the component in it, whose replicas receive.
        rows: int [samples]: rows, bytes or tokens of a sample.
    """
    senders, receivers = before.replica[source], after.replica[target]
    both = (senders != ABSENT) & (receivers != ABSENT)
    shape = before.grid.num_replicas[source], after.grid.num_replicas[target]
    pairs = senders[both].astype(np.int64) * shape[1] + receivers[both]
    sent = np.bincount(pairs, weights=rows[both], minlength=shape[0] * shape[1])
    return sent.astype(np.int64).reshape(shape)
