"""`Exchange`: which rows go from which replica to which between two components; composition and transpose.

If Pi_E moves samples from where they arrived to where encoder E computes them, and Pi_M to where the language model does, then
what the encoder made goes by Pi_M o Pi_E^-1, in one exchange. The backward uses the transpose.

Source: OrchMLLM §6 (rearrangement composition).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment
from mmcompile.errors import VerifyError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Samples that move between two components, ascending, with their places in each."""

    samples: np.ndarray
    """Indices of the samples that move, int64 [moved], ascending."""
    source: np.ndarray
    """Replica and microbatch where each sample is before, int32 [moved, 2]."""
    target: np.ndarray
    """Replica and microbatch where each sample is after, int32 [moved, 2]."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exchange) and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.samples, other.samples),
                (self.source, other.source),
                (self.target, other.target),
            )
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def transpose(self) -> Exchange:
        """The reverse exchange, for gradients: source and target swapped."""
        return Exchange(samples=self.samples, source=self.target, target=self.source)

    def then(self, other: Exchange) -> Exchange:
        """Return the composition of this exchange and then `other`, for the samples that are in both.

        Raises:
            VerifyError: a sample's source in `other` is not its target here.
        """
        samples, mine, theirs = np.intersect1d(self.samples, other.samples, assume_unique=True, return_indices=True)
        apart = (self.target[mine] != other.source[theirs]).any(axis=1)
        if apart.any():
            sample = int(samples[np.flatnonzero(apart)[0]])
            raise VerifyError(f"sample {sample} ends in one place and starts the next exchange in another")
        return Exchange(samples=samples, source=self.source[mine], target=other.target[theirs])

    def volume(self, rows: np.ndarray, num_sources: int, num_targets: int) -> np.ndarray:
        """Return the rows that each source replica sends to each target replica, int64 [sources, targets].

        Args:
            rows: int [all samples]: rows, bytes or tokens of a sample.
        """
        pairs = self.source[:, 0].astype(np.int64) * num_targets + self.target[:, 0]
        sent = np.bincount(pairs, weights=rows[self.samples], minlength=num_sources * num_targets)
        return sent.astype(np.int64).reshape(num_sources, num_targets)


def exchange(assignment: Assignment, source: int, target: int) -> Exchange:
    """Return the exchange of all samples with work in both components.

    It leads from the places of component `source` to those of component `target` (indices).
    """
    both = (assignment.replica[source] != ABSENT) & (assignment.replica[target] != ABSENT)
    samples = np.flatnonzero(both)
    return Exchange(
        samples=samples, source=_places(assignment, source, samples), target=_places(assignment, target, samples)
    )


def from_arrival(assignment: Assignment, arrival: Assignment, component: int) -> Exchange:
    """Return the exchange of a component's samples from their places in `arrival` (of the last component) to `assignment`."""
    samples = np.flatnonzero((assignment.replica[component] != ABSENT) & (arrival.replica[-1] != ABSENT))
    source = _places(arrival, len(arrival.components) - 1, samples)
    return Exchange(samples=samples, source=source, target=_places(assignment, component, samples))


def _places(assignment: Assignment, component: int, samples: np.ndarray) -> np.ndarray:
    return np.stack([assignment.replica[component, samples], assignment.microbatch[component, samples]], axis=1)
