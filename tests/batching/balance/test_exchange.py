"""Exchanges: rows follow samples, volumes are conserved."""

from __future__ import annotations

import numpy as np
from support.oracles.balance_oracle import random_costs

from mmcompile.batching.balance.assignment import Grid
from mmcompile.batching.balance.exchange import exchange
from mmcompile.batching.balance.post_balance import PostBalance


def test_rows_follow_the_exchange() -> None:
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


def test_volume_counts_rows_by_pair() -> None:
    costs = random_costs(7, num_samples=30, num_components=2)
    grid = Grid(num_replicas=(3, 2))
    there = exchange(PostBalance().assign(costs, grid), 0, 1)
    rows = np.arange(30) + 1
    volume = there.volume(rows, 3, 2)
    assert volume.shape == (3, 2) and volume.sum() == rows[there.samples].sum()
