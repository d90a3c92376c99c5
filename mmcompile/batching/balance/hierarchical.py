"""Hierarchical assignment: replicas, then microbatches balanced by encoder work, then language-model work deferred.

Source: Entrain (thesis §4.5, Algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.balancer import Balancer, check_grid, shared
from mmcompile.batching.balance.lpt import place_in_order
from mmcompile.batching.balance.sample_deferral import pairwise_deferral


class Defer(StrEnum):
    """Choice of the microbatches that defer language-model work to the next microbatch (§4.5.2)."""

    NONE = "none"
    """No deferral: every component computes a sample in the same microbatch."""
    CRITICAL = "critical"
    """Only microbatches with more language-model work than `Deferral.threshold` leave that of some samples to the next one."""
    ALL = "all"
    """The half of the microbatches with the most language-model work leaves that of some samples to the next one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchical(Balancer):
    """Balancer of Entrain's hierarchical microbatch assignment. All encoders count as one with the sum of their work.

    Two cases are not in the thesis. Samples without encoder work are placed last, by language-model work; otherwise all would be
    in the microbatch whose encoder ends first. "High" language-model work is defined as above the median of the replica's
    samples.
    """

    name: ClassVar[str] = "hierarchical"

    defer: Defer = Defer.CRITICAL

    @property
    def title(self) -> str:
        """Balancer name, followed by the value of `defer` if it is not the default: `hierarchical`, `hierarchical-all`."""
        return self.name if self.defer is Defer.CRITICAL else f"{self.name}-{self.defer}"

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign samples to replicas, then to microbatches by encoder work; move some language-model work to the next one."""
        check_grid(costs, grid)
        encoder, language = costs.costs[:-1].sum(axis=0), costs.costs[-1]
        replica = replicas_of(encoder, language, grid.num_replicas[-1])
        early = np.zeros(costs.num_samples, dtype=np.int64)
        late = np.zeros(costs.num_samples, dtype=np.int64)
        for index in range(grid.num_replicas[-1]):
            mine = np.flatnonzero(replica == index)
            if len(mine):
                early[mine], late[mine] = self._replica(encoder[mine], language[mine], grid.num_microbatches)
        last = len(costs.components) - 1
        replicas = [
            replica if count == grid.num_replicas[-1] else shared(costs, row, late if row == last else early, count)
            for row, count in enumerate(grid.num_replicas)
        ]
        return assignment_of(costs, grid, replicas, [*[early] * last, late])

    def _replica(self, encoder: np.ndarray, language: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Assign the samples of one replica to microbatches, numbered in run order.

        Args:
            encoder, language: work of each sample in the encoders and in the language model, float64 [samples].
            most: maximum number of microbatches.

        Returns:
            (microbatch of each sample in the encoders, in the language model), int64 [samples] each.
        """
        count = effective_microbatches(encoder, most)
        early = stratified(encoder, language, count)
        if self.defer is Defer.NONE:
            return early, early
        members = [np.flatnonzero(early == index) for index in range(count)]
        work = [language[samples] for samples in members]
        deferral = pairwise_deferral(work, everywhere=self.defer is Defer.ALL)
        position = np.argsort(deferral.order)
        late = early.copy()
        for pair in deferral.pairs:
            late[members[pair.overloaded][list(pair.deferred)]] = pair.underloaded
        return position[early], position[late]


def replicas_of(encoder: np.ndarray, language: np.ndarray, num_replicas: int) -> np.ndarray:
    """Assign samples by descending encoder work to the replica with least language-model work; return it, int64 [samples]."""
    return place_in_order(language, np.lexsort((-language, -encoder)), num_replicas)


def effective_microbatches(encoder: np.ndarray, most: int) -> int:
    """Return the number of microbatches to fill, K_eff (§4.5.1): min(most, floor(sum / max of encoder work)); `most` if all 0."""
    heaviest = float(encoder.max(initial=0.0))
    return most if heaviest == 0 else min(most, int(float(encoder.sum()) / heaviest * (1 + 1e-12)))


def stratified(encoder: np.ndarray, language: np.ndarray, count: int) -> np.ndarray:
    """Return the microbatch of each sample, int64 [samples], balanced by encoder work within 2 - 1/count of the optimum.

    Samples of high language-model work are placed before the rest, so that every microbatch gets some of little work. Each of
    the two sets is taken by descending encoder work, each sample to the microbatch with the least encoder work.
    """
    coarse = language > np.median(language)
    order = np.lexsort((-encoder, ~coarse))
    seen = encoder[order] > 0
    microbatch = place_in_order(encoder, order[seen], count)
    rest = order[~seen]
    if len(rest):
        placed = microbatch >= 0
        start = np.bincount(microbatch[placed], weights=language[placed], minlength=count)
        by_language = rest[np.argsort(-language[rest], kind="stable")]
        microbatch[rest] = place_in_order(language, by_language, count, start)[rest]
    return microbatch
