"""What tests of balancers compare with: optima by trying everything, random steps, and LPT as one would write it down."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np

from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts
from mmcompile.data.synthetic import synthetic


@cache
def partitions(num_samples: int, num_bins: int) -> np.ndarray:
    """All partitions of samples into alike bins, int64 [partitions, samples]: bin i + 1 is not used before bin i."""
    rows = (
        (0, *rest)
        for rest in product(range(num_bins), repeat=num_samples - 1)
        if all(value <= max((0, *rest[:index])) + 1 for index, value in enumerate(rest))
    )
    return np.array(list(rows), dtype=np.int64)


def optimum(weights: np.ndarray, num_bins: int) -> float:
    """Least largest load over all partitions; of several components, of any.

    Args:
        weights: [components, samples], or [samples] for one.
    """
    weights = np.atleast_2d(weights)
    bins = partitions(weights.shape[1], num_bins)
    member = bins[:, None] == np.arange(num_bins)[:, None]  # [partitions, bins, samples]
    return float((member @ weights.T.astype(np.float64)).max(axis=(1, 2)).min())


def largest(weights: np.ndarray, bins: np.ndarray, num_bins: int) -> float:
    """Largest load of an assignment; of several components, of any."""
    return max(float(np.bincount(bins, weights=row, minlength=num_bins).max()) for row in np.atleast_2d(weights))


def naive_lpt(weights: np.ndarray, num_bins: int, start: np.ndarray | None = None) -> list[int]:
    """Longest processing time first, one sample at a time, ties to the first."""
    loads = [0.0] * num_bins if start is None else [float(load) for load in start]
    bins = [0] * len(weights)
    for sample in sorted(range(len(weights)), key=lambda sample: -weights[sample]):
        bins[sample] = min(range(num_bins), key=loads.__getitem__)
        loads[bins[sample]] += float(weights[sample])
    return bins


def random_costs(seed: int, num_samples: int | None = None, num_components: int | None = None) -> SampleCosts:
    """A step of one of several kinds: even, heavy-tailed, one giant, whole numbers, samples without some component."""
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, 40)) if num_samples is None else num_samples
    components = int(rng.integers(1, 4)) if num_components is None else num_components
    spread = rng.choice([0.05, 0.5, 1.5])
    costs = rng.lognormal(0, spread, (components, samples))
    if rng.random() < 0.25:
        costs[:, 0] = costs.sum()
    if rng.random() < 0.3:
        costs = np.ceil(costs * 3)
    missing = rng.random((components, samples)) < rng.choice([0.0, 0.3, 0.9])
    missing[-1] = False
    costs[missing] = 0
    lengths = np.ceil(costs * 10).astype(np.int64)
    names = tuple(f"encoder{index}" for index in range(components - 1)) + ("language_model",)
    return SampleCosts(components=names, costs=costs, lengths=lengths)


def mixed_step(name: str, count: int, seed: int = 0) -> SampleCosts:
    """Encoder work in proportion to patches, a language model with attention, as much of the one as of the other."""
    shapes = list(synthetic(name, count, seed))
    patches = np.array([shape.patches + shape.frames for shape in shapes], dtype=np.float64)
    tokens = np.array([shape.text_tokens for shape in shapes]) + patches / 4
    language = tokens + tokens**2 / 20_000
    return SampleCosts(
        components=("vision", "language_model"),
        costs=np.stack([patches / patches.sum(), language / language.sum()]),
    )


def assignment_in(values: dict[str, Any]) -> Assignment:
    """Return the assignment whose `to_json` gave these JSON values."""
    return Assignment(
        components=tuple(values["components"]),
        grid=Grid(num_replicas=tuple(values["num_replicas"]), num_microbatches=values["num_microbatches"]),
        replica=np.array(values["replica"]),
        microbatch=np.array(values["microbatch"]),
    )


def phased(assignment: Assignment, costs: SampleCosts) -> float:
    """Return the time if all replicas run the components one after the other, microbatch by microbatch (OrchMLLM §6)."""
    return sum(float(loads.max(axis=0).sum()) for loads in assignment.loads(costs).values())


def rearranged(assignment: Assignment, component: int, microbatch: int, rank: np.ndarray) -> Assignment:
    """Return the assignment with batches of one component's microbatch on other replicas: batch j on replica `rank[j]`."""
    replica = assignment.replica.copy()
    here = (assignment.microbatch[component] == microbatch) & (replica[component] != ABSENT)
    replica[component, here] = rank[replica[component, here]]
    return Assignment(
        components=assignment.components, grid=assignment.grid, replica=replica, microbatch=assignment.microbatch
    )
