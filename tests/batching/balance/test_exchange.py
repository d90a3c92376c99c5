"""Exchanges: composition is one after the other, the transpose undoes, volumes are conserved."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import random_costs

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Grid
from mmcompile.batching.balance.exchange import exchange, from_arrival
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.errors import VerifyError


@pytest.mark.parametrize("seed", range(30))
def test_composed_exchange_is_the_direct_one(seed: int) -> None:
    """Pi_M o Pi_E^-1: back to where samples arrived and on to the language model is one exchange."""
    costs = random_costs(seed, num_samples=50, num_components=3)
    grid = Grid(num_replicas=(1 + seed % 4, 3, 2))
    arrival, found = Arrival().assign(costs, grid), PostBalance().assign(costs, grid)
    to_language = from_arrival(found, arrival, 2)
    for encoder in (0, 1):
        to_encoder = from_arrival(found, arrival, encoder)
        direct = exchange(found, encoder, 2)
        assert to_encoder.transpose.then(to_language) == direct
        assert direct.transpose.transpose == direct and direct.transpose == exchange(found, 2, encoder)


def test_rows_follow_the_exchange_and_come_back() -> None:
    costs = random_costs(5, num_samples=40, num_components=2)
    grid = Grid(num_replicas=(3, 2), num_microbatches=2)
    found = PostBalance().assign(costs, grid)
    there = exchange(found, 0, 1)
    held = {(replica, microbatch): set() for replica in range(2) for microbatch in range(2)}
    for sample, (replica, microbatch) in zip(there.samples.tolist(), there.target.tolist(), strict=True):
        held[replica, microbatch].add(sample)
    both = costs.takes_part.all(axis=0)
    for (replica, microbatch), samples in held.items():
        assert samples == set(np.intersect1d(found.samples(1, replica, microbatch), np.flatnonzero(both)).tolist())
    back = there.then(there.transpose)
    assert np.array_equal(back.source, back.target)


def test_volume_counts_rows_by_pair() -> None:
    costs = random_costs(7, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(3, 2))
    there = exchange(PostBalance().assign(costs, grid), 0, 1)
    rows = np.arange(30) + 1
    volume = there.volume(rows, 3, 2)
    assert volume.shape == (3, 2) and volume.sum() == rows[there.samples].sum()
    assert np.array_equal(there.transpose.volume(rows, 2, 3), volume.T)


def test_exchanges_that_do_not_meet_are_refused() -> None:
    costs = random_costs(5, num_samples=40, num_components=2)
    there = exchange(PostBalance().assign(costs, Grid(num_replicas=(3, 3))), 0, 1)
    with pytest.raises(VerifyError, match="ends in one place"):
        there.then(there)
    assert there != "exchange"
