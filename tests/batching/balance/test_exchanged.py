"""Exchanges: rows are conserved, go where samples are computed, and come back."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles.balance_oracle import random_costs

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Grid, exchanged
from mmcompile.batching.balance.post_balance import PostBalance


@pytest.mark.parametrize("seed", range(30))
def test_rows_go_from_where_a_sample_is_computed_to_where_it_is_computed_next(seed: int) -> None:
    costs = random_costs(seed, num_samples=50, num_components=3)
    grid = Grid(num_replicas=(1 + seed % 4, 3, 2), num_microbatches=1 + seed % 2)
    found, rows = PostBalance().assign(costs, grid), np.arange(50) + 1
    for encoder in (0, 1):
        volume = exchanged(found, encoder, found, 2, rows)
        wanted = np.zeros((grid.num_replicas[encoder], 2), dtype=np.int64)
        for sample in np.flatnonzero(costs.takes_part[[encoder, 2]].all(axis=0)):
            wanted[found.replica[encoder, sample], found.replica[2, sample]] += rows[sample]
        assert volume.dtype == np.int64 and np.array_equal(volume, wanted)
        assert np.array_equal(exchanged(found, 2, found, encoder, rows), volume.T)


def test_rows_leave_where_samples_arrived() -> None:
    costs = random_costs(7, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(3, 2))
    arrival, found = Arrival().assign(costs, grid), PostBalance().assign(costs, grid)
    rows = np.arange(30) + 1
    volume = exchanged(arrival, -1, found, 0, rows)
    assert volume.shape == (2, 3) and volume.sum() == rows[costs.takes_part.all(axis=0)].sum()
    stays = exchanged(arrival, -1, arrival, -1, rows)
    assert np.array_equal(stays, np.diag(np.diag(stays)))
