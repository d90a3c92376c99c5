"""Copies: all that is missing and nothing else, balanced over sources, in the fewest rounds."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.plans.template_jobs import even_job

from mmcompile.planner.resilience.copies import busiest_bytes, plan_copies
from mmcompile.planner.resilience.job import Job


def random_case(rng: random.Random, *, equal: bool) -> tuple[Job, dict[int, np.ndarray], dict[int, np.ndarray]]:
    num_layers = rng.randint(2, 5)
    sizes = tuple(100 if equal else rng.randint(1, 100) for _ in range(num_layers))
    job = replace(even_job((1, 2), num_layers=num_layers), layer_bytes={"language_model": sizes})
    holders, takers = rng.randint(1, 4), rng.randint(1, 2)
    holdings = {node: np.array([rng.random() < 0.6 for _ in sizes]) for node in range(holders)}
    holdings[0] |= ~np.any([*holdings.values()], axis=0)
    needed = {node: np.array([rng.random() < 0.7 for _ in sizes]) for node in range(holders - 1, holders + takers)}
    return job, needed, holdings


def lightest(choices: list[tuple[int, int, tuple[int, ...]]]) -> int:
    """Least bytes of the busiest source, by trying everything."""
    best = sum(size for _, size, _ in choices)
    for picked in itertools.product(*(candidates for _, _, candidates in choices)):
        loads: Counter[int] = Counter()
        for source, (_, size, _) in zip(picked, choices, strict=True):
            loads[source] += size
        best = min(best, max(loads.values(), default=0))
    return best


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_copies(seed: int, equal: bool) -> None:
    job, needed, holdings = random_case(random.Random(seed), equal=equal)
    copies = plan_copies(job, needed, holdings)

    wanted = {
        (node, layer)
        for node, mask in needed.items()
        for layer in np.flatnonzero(mask)
        if node not in holdings or not holdings[node][layer]
    }
    assert len(copies) == len(wanted)
    assert {(copy.destination, copy.layer.index) for copy in copies} == wanted
    candidates = [tuple(node for node, held in holdings.items() if held[layer]) for layer in range(len(job.layers))]
    for copy in copies:
        assert copy.source in candidates[copy.layer.index]
        assert copy.num_bytes == job.layer_bytes["language_model"][copy.layer.index]

    ends = [[(copy.round, copy.source) for copy in copies], [(copy.round, copy.destination) for copy in copies]]
    assert all(len(set(end)) == len(end) for end in ends), "a node sends or receives twice in a round"
    degree = max((max(Counter(node for _, node in end).values()) for end in ends if end), default=0)
    assert {copy.round for copy in copies} == set(range(degree))

    sent: Counter[int] = Counter()
    for copy in copies:
        sent[copy.source] += copy.num_bytes
    best = lightest([(copy.destination, copy.num_bytes, candidates[copy.layer.index]) for copy in copies])
    slack = 0 if equal else max((copy.num_bytes for copy in copies), default=0)
    assert max(sent.values(), default=0) <= best + slack
    assert busiest_bytes(copies) >= max(sent.values(), default=0)


def test_layers_without_state_are_not_copied() -> None:
    job = replace(even_job((1,), num_layers=2), layer_bytes={"language_model": (0, 10)})
    everything = np.array([True, True])
    (copy,) = plan_copies(job, {1: everything}, {0: everything})
    assert str(copy.layer) == "language_model[1]"
