"""`Assignment`: for every component of a step, which replica computes a sample, and in which microbatch.

Systems that balance data differ only in how they fill this one value. Microbatches are numbered in the order in which they
run. A sample whose language-model microbatch is later than its encoder microbatch is *deferred*: its activations wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mmcompile.errors import ConfigError, VerifyError

ABSENT = -1
"""Replica and microbatch of a sample in a component that has no work for it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleCosts:
    """Cost of each sample of a step in each component, in seconds or another common unit. Arrays are read-only."""

    components: tuple[str, ...]
    """Component names: encoders first; the last one (the language model) consumes the encoders' results."""
    costs: np.ndarray
    """float64 [components, samples]: seconds on one replica, or any unit common to all components.

    A sample has work in a component if its cost there is above 0.
    """
    lengths: np.ndarray | None = None
    """Tokens, int64 [components, samples]; the last component counts the whole interleaved sequence (OrchMLLM §6)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", _frozen(self.costs, np.float64))
        shape = self.costs.shape
        if self.costs.ndim != 2 or shape[0] != len(self.components) or not self.components:
            raise ConfigError(f"costs have shape {shape}; wanted [{len(self.components)} components, samples]")
        if not np.isfinite(self.costs).all() or (self.costs < 0).any():
            raise ConfigError("a cost is negative or not finite; wanted seconds, 0 for a sample that takes no part")
        if self.lengths is not None:
            object.__setattr__(self, "lengths", _frozen(self.lengths, np.int64))
            if self.lengths.shape != shape or (self.lengths < 0).any():
                raise ConfigError(
                    f"lengths have shape {self.lengths.shape}; wanted {shape}, like costs, and none negative"
                )

    @property
    def num_samples(self) -> int:
        """Number of samples of the step."""
        return self.costs.shape[1]

    @property
    def takes_part(self) -> np.ndarray:
        """Mask of samples that have work in a component (cost above 0): bool [components, samples]."""
        return self.costs > 0

    def tokens(self, algorithm: str) -> np.ndarray:
        """Return `lengths`. Raises ConfigError, which names `algorithm`, if they are None."""
        if self.lengths is None:
            raise ConfigError(
                f"{algorithm} balances tokens and these costs have no lengths; give lengths, or balance seconds"
            )
        return self.lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Number of replicas of each component, and of microbatches of a replica: the places samples are assigned to."""

    num_replicas: tuple[int, ...]
    """Number of replicas of each component, in the order of `SampleCosts.components`."""
    num_microbatches: int = 1

    def __post_init__(self) -> None:
        if not self.num_replicas or min(*self.num_replicas, self.num_microbatches) < 1:
            raise ConfigError(
                f"{self.num_microbatches} microbatches on {self.num_replicas} replicas; wanted at least 1 of each"
            )

    @property
    def num_buckets(self) -> int:
        """Number of (replica, microbatch) pairs of the last component."""
        return self.num_replicas[-1] * self.num_microbatches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assignment:
    """Replica and microbatch of every sample of a step. Assignments are equal if components, grid and all places are."""

    components: tuple[str, ...]
    grid: Grid
    replica: np.ndarray
    """Replica of each sample, int32 [components, samples]; -1 where a sample has no work in a component."""
    microbatch: np.ndarray
    """Microbatch of each sample, int32 [components, samples], numbered in run order; -1 where a sample has no work."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica", _frozen(self.replica, np.int32))
        object.__setattr__(self, "microbatch", _frozen(self.microbatch, np.int32))
        wanted = len(self.components)
        if self.replica.ndim != 2 or self.replica.shape != self.microbatch.shape or len(self.replica) != wanted:
            raise VerifyError(
                f"replicas {self.replica.shape} and microbatches {self.microbatch.shape}; wanted both [{wanted}, samples]"
            )
        if len(self.grid.num_replicas) != wanted:
            raise VerifyError(f"replicas of {len(self.grid.num_replicas)} components; wanted {wanted}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assignment) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return components, grid and places as bytes: equal bytes mean equal assignments."""
        header = repr((self.components, self.grid, self.replica.shape)).encode()
        return header + self.replica.tobytes() + self.microbatch.tobytes()

    @property
    def num_samples(self) -> int:
        """Number of samples of the step."""
        return self.replica.shape[1]

    def buckets(self, component: int) -> np.ndarray:
        """Return the bucket of each sample: int64 [samples], replica * num_microbatches + microbatch; -1 if it has no work."""
        flat = self.replica[component].astype(np.int64) * self.grid.num_microbatches + self.microbatch[component]
        return np.where(self.replica[component] == ABSENT, ABSENT, flat)

    def loads(self, costs: SampleCosts) -> dict[str, np.ndarray]:
        """Return component name -> cost of every microbatch, float64 [replicas, microbatches]."""
        return {name: self.sums(row, costs.costs[row]) for row, name in enumerate(self.components)}

    def sums(self, component: int, values: np.ndarray) -> np.ndarray:
        """Return `values` [samples] summed by microbatch of a component: float64 [replicas, microbatches]."""
        shape = (self.grid.num_replicas[component], self.grid.num_microbatches)
        buckets = self.buckets(component)
        here = buckets != ABSENT
        return np.bincount(buckets[here], weights=values[here], minlength=shape[0] * shape[1]).reshape(shape)

    def deferred(self, component: int) -> np.ndarray:
        """Return whether the last component computes a sample in a later microbatch than `component`: bool [samples]."""
        takes_part = (self.microbatch[component] != ABSENT) & (self.microbatch[-1] != ABSENT)
        return takes_part & (self.microbatch[-1] > self.microbatch[component])

    def check(self, costs: SampleCosts) -> None:
        """Check that every sample is computed once by every component with work for it, and by no other.

        Raises:
            VerifyError: naming the first sample and component for which this does not hold, or the sample that the last
                component computes before an encoder has.
        """
        if self.components != costs.components or self.num_samples != costs.num_samples:
            raise VerifyError(
                f"an assignment of {self.num_samples} samples to {self.components}; the step has {costs.num_samples} samples "
                f"of {costs.components}"
            )
        for row, name in enumerate(self.components):
            limits = (self.grid.num_replicas[row], self.grid.num_microbatches)
            _check_component(name, self.replica[row], self.microbatch[row], costs.takes_part[row], limits)
        self.check_order()

    def check_order(self) -> None:
        """Raise VerifyError if the last component computes a sample in an earlier microbatch than an encoder."""
        last = self.microbatch[-1]
        early = np.argwhere((last != ABSENT) & (last < self.microbatch))
        if len(early):
            row, sample = early[0].tolist()
            raise VerifyError(
                f"sample {sample} is in microbatch {last[sample]} of {self.components[-1]} and in the later "
                f"{self.microbatch[row, sample]} of {self.components[row]}, which must come first"
            )

    def __str__(self) -> str:
        """Return text with one line for every microbatch that has samples: `replica.microbatch: samples`, ranges as `3-7`."""
        lines = [f"assignment samples={self.num_samples} microbatches={self.grid.num_microbatches}"]
        for row, name in enumerate(self.components):
            lines.append(f"{name} replicas={self.grid.num_replicas[row]}")
            for bucket, samples in groups(self.buckets(row)):
                replica, microbatch = divmod(bucket, self.grid.num_microbatches)
                lines.append(f"  {replica}.{microbatch}: {_ranges(samples)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return components, grid and places as JSON values; replicas and microbatches are lists [components][samples]."""
        return {
            "components": self.components,
            "num_replicas": self.grid.num_replicas,
            "num_microbatches": self.grid.num_microbatches,
            "replica": self.replica.tolist(),
            "microbatch": self.microbatch.tolist(),
        }


def assignment_of(
    costs: SampleCosts,
    grid: Grid,
    replica: ArrayLike | Sequence[np.ndarray],
    microbatch: ArrayLike | Sequence[np.ndarray],
) -> Assignment:
    """Return an assignment from replicas and microbatches; entries of samples without work in a component are ignored.

    Args:
        replica, microbatch: int [components, samples], or [samples] for all components.
    """
    shape = costs.costs.shape
    return Assignment(
        components=costs.components,
        grid=grid,
        replica=np.where(costs.takes_part, np.broadcast_to(np.asarray(replica), shape), ABSENT),
        microbatch=np.where(costs.takes_part, np.broadcast_to(np.asarray(microbatch), shape), ABSENT),
    )


def groups(keys: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (key, indices with that key) pairs, ascending by key and by index; negative keys are left out."""
    order = np.argsort(keys, kind="stable")
    order = order[np.searchsorted(keys[order], 0) :]
    if not len(order):
        return []
    found, starts = np.unique(keys[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, starts[1:]), strict=True))


def _frozen(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    array = np.array(values, dtype=dtype, order="C")
    array.setflags(write=False)
    return array


def _check_component(
    name: str, replica: np.ndarray, microbatch: np.ndarray, takes_part: np.ndarray, limits: tuple[int, int]
) -> None:
    present = (replica != ABSENT) | (microbatch != ABSENT)
    for wrong, words in (
        (takes_part & ~present, "takes part in {name} and is in none of its microbatches"),
        (present & ~takes_part, "takes no part in {name} and is in replica {replica}, microbatch {microbatch} of it"),
        (
            takes_part & ((replica < 0) | (replica >= limits[0]) | (microbatch < 0) | (microbatch >= limits[1])),
            "is in replica {replica}, microbatch {microbatch} of {name}, which has {limits[0]} replicas of {limits[1]}",
        ),
    ):
        if wrong.any():
            sample = int(np.flatnonzero(wrong)[0])
            place = {"replica": replica[sample], "microbatch": microbatch[sample]}
            raise VerifyError(f"sample {sample} " + words.format(name=name, limits=limits, **place))


def _ranges(samples: np.ndarray) -> str:
    breaks = np.flatnonzero(np.diff(samples) != 1) + 1
    runs = ((int(run[0]), int(run[-1])) for run in np.split(samples, breaks))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


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
