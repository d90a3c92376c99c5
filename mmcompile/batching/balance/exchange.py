"""`Exchange`: which rows go from which replica to which between two components.

Rows go straight from the replica that makes them to the one that reads them (OrchMLLM §6, rearrangement composition); gradients
take the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Samples that move, in order of sample, and their places on both sides."""

    samples: np.ndarray
    """int64 [moved], ascending."""
    source: np.ndarray
    """int32 [moved, 2]: replica and microbatch."""
    target: np.ndarray
    """int32 [moved, 2]."""

    def volume(self, rows: np.ndarray, num_sources: int, num_targets: int) -> np.ndarray:
        """What each replica sends to each, int64 [sources, targets].

        Args:
            rows: int [all samples]: rows, bytes or tokens of a sample.
        """
        pairs = self.source[:, 0].astype(np.int64) * num_targets + self.target[:, 0]
        sent = np.bincount(pairs, weights=rows[self.samples], minlength=num_sources * num_targets)
        return sent.astype(np.int64).reshape(num_sources, num_targets)


def exchange(assignment: Assignment, source: int, target: int) -> Exchange:
    """What component `source` (an index) makes, to where component `target` needs it: samples that take part in both."""
    both = (assignment.replica[source] != ABSENT) & (assignment.replica[target] != ABSENT)
    samples = np.flatnonzero(both)
    return Exchange(
        samples=samples, source=_places(assignment, source, samples), target=_places(assignment, target, samples)
    )


def _places(assignment: Assignment, component: int, samples: np.ndarray) -> np.ndarray:
    return np.stack([assignment.replica[component, samples], assignment.microbatch[component, samples]], axis=1)
