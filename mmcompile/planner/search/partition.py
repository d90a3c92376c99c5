"""Exact split of a chain of layers into contiguous stages that minimises the slowest stage.

With layers `i..N-1` still to place, `k` stages left, and a cost for a stage made of layers `i..j-1`:

    E(i, 1) = cost(i, N, 1)
    E(i, k) = min over i < j <= N-k+1 of max(cost(i, j, k), E(j, k-1))

    cost(i, j, k) = sum of forward+backward seconds of layers i..j-1
                    + the gradient sent back over the cut at i + the output sent over the cut at j,
                    infinite if the stage needs more memory than a device has.

The recurrence runs from the loss backwards because a stage's memory depends on its distance from the loss: stage
k-from-last holds `min(tail + k, microbatches)` microbatches of activations under 1F1B. So one table answers every
stage count. Times are integers (picoseconds) inside: sums are exact, and ties are ties on every machine.

Source: dissertation of Oobleck / Cornstarch / Entrain, Eq. 3.5 and 4.1 (there without cuts and memory, prefix first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mmcompile.errors import PlanError

_PER_SECOND = 10**12
_INFINITE = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionLayer:
    """One layer, for one microbatch."""

    seconds: float
    """Forward and backward."""
    fixed_bytes: int = 0
    """Parameters, gradients and optimizer state."""
    saved_bytes: int = 0
    """Activations kept for the backward of one microbatch."""
    begin_fixed_bytes: int = 0
    """Beside `fixed_bytes`, of the stage that begins with this layer."""
    begin_saved_bytes: int = 0
    """Beside `saved_bytes`, of the stage that begins with this layer: what earlier layers read and keep too."""
    working_bytes: int = 0
    """Held while this layer alone runs; a stage needs the largest of its layers'."""
    send_s: float = 0.0
    """Sending its output on; paid by the stage that ends with this layer."""
    return_s: float = 0.0
    """Sending the gradient of its output back; paid by the stage that begins right after this layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Stages of a chain: stage k is layers `boundaries[k]` (included) to `boundaries[k+1]` (excluded)."""

    boundaries: tuple[int, ...]
    bottleneck_s: float
    """Seconds of the slowest stage, its sends included."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise(self.boundaries))


def partition(
    layers: Sequence[PartitionLayer],
    max_stages: int,
    *,
    memory_bytes: int | None = None,
    tail: int = 0,
    num_microbatches: int | None = None,
) -> tuple[Split | None, ...]:
    """Split a chain optimally into 1, 2, ..., `max_stages` stages.

    Args:
        layers: the chain, first to last.
        max_stages: at most `len(layers)`; a stage has at least one layer.
        memory_bytes: limit of one stage; None means no limit.
        tail: stages between the end of the chain and the loss, the loss stage included (0: the chain ends in the loss).
        num_microbatches: bounds the microbatches in flight; None means many.

    Returns:
        One entry a stage count; None where no split fits the memory. Of equal optima, the one whose first boundary is
        earliest, then the second, and so on (each with the rest of the chain split optimally).

    Raises:
        PlanError: fewer than one stage, or more stages than layers.
    """
    if not 1 <= max_stages <= len(layers):
        raise PlanError(f"cannot split {len(layers)} layers into {max_stages} stages; use 1 to {len(layers)} stages")
    problem = _Problem.of(layers, memory_bytes, tail, num_microbatches)
    best = [problem.cost(1)[:, -1]]
    cuts: list[NDArray[np.int64]] = []
    for stages_left in range(2, max_stages + 1):
        candidates = np.maximum(problem.cost(stages_left), best[-1][None, :])
        cut = np.argmin(candidates, axis=1)
        best.append(candidates[np.arange(len(candidates)), cut])
        cuts.append(cut)
    return tuple(_split(best[k][0], cuts[:k], len(layers)) for k in range(max_stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    time: NDArray[np.int64]
    """[N+1, N+1]: picoseconds of a stage from layer i to layer j (excluded), infinite unless i < j."""
    fixed: NDArray[np.int64]
    """[N+1]: fixed bytes of the first i layers."""
    saved: NDArray[np.int64]
    begin_fixed: NDArray[np.int64]
    """[N+1]: fixed bytes of a stage that begins with layer i, beside those of its layers."""
    begin_saved: NDArray[np.int64]
    working: NDArray[np.int64] | None
    """[N+1, N+1]: the largest working bytes of layers i..j-1; None where no layer has any."""
    memory_bytes: int | None
    tail: int
    num_microbatches: int | None

    @classmethod
    def of(
        cls, layers: Sequence[PartitionLayer], memory_bytes: int | None, tail: int, num_microbatches: int | None
    ) -> _Problem:
        total = _prefix([_picoseconds(layer.seconds) for layer in layers])
        send = np.array([0, *(_picoseconds(layer.send_s) for layer in layers)])
        back = np.array([0, *(_picoseconds(layer.return_s) for layer in layers)])
        time = (total + send)[None, :] - (total - back)[:, None]
        index = np.arange(len(layers) + 1)
        time[index[:, None] >= index[None, :]] = _INFINITE
        return cls(
            time=time,
            fixed=_prefix([layer.fixed_bytes for layer in layers]),
            saved=_prefix([layer.saved_bytes for layer in layers]),
            begin_fixed=np.array([*(layer.begin_fixed_bytes for layer in layers), 0], dtype=np.int64),
            begin_saved=np.array([*(layer.begin_saved_bytes for layer in layers), 0], dtype=np.int64),
            working=_largest([layer.working_bytes for layer in layers]),
            memory_bytes=memory_bytes,
            tail=tail,
            num_microbatches=num_microbatches,
        )

    def cost(self, stages_left: int) -> NDArray[np.int64]:
        """[N+1, N+1]: cost of layers i..j-1 as the `stages_left`-th stage from the chain's end."""
        if self.memory_bytes is None:
            return self.time
        in_flight = self.tail + stages_left
        if self.num_microbatches is not None:
            in_flight = min(in_flight, self.num_microbatches)
        needed = self.fixed + in_flight * self.saved
        free = self.memory_bytes - self.begin_fixed - in_flight * self.begin_saved
        if self.working is not None:
            fits = needed[None, :] - needed[:, None] + self.working <= free[:, None]
            return np.where(fits, self.time, _INFINITE)
        # Memory grows with j, so each row has one last j that fits.
        last = np.searchsorted(needed, needed + free, side="right") - 1
        return np.where(np.arange(len(needed))[None, :] <= last[:, None], self.time, _INFINITE)


def _picoseconds(seconds: float) -> int:
    return round(seconds * _PER_SECOND)


def _prefix(values: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum(np.array([0, *values], dtype=np.int64))


def _largest(values: Sequence[int]) -> NDArray[np.int64] | None:
    """[N+1, N+1]: the largest of values i..j-1, 0 of none; None if all are 0."""
    if not any(values):
        return None
    size = len(values) + 1
    table = np.zeros((size, size), dtype=np.int64)
    table[:, 1:] = values
    return np.maximum.accumulate(np.triu(table, k=1), axis=1)


def _split(best: np.int64, cuts: Sequence[NDArray[np.int64]], num_layers: int) -> Split | None:
    if best == _INFINITE:
        return None
    boundaries = [0]
    for cut in reversed(cuts):
        boundaries.append(int(cut[boundaries[-1]]))
    return Split(boundaries=(*boundaries, num_layers), bottleneck_s=int(best) / _PER_SECOND)
