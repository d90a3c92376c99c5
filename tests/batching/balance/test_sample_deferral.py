"""Pairwise deferral: subset sums, matching, and the thesis' worked example."""

from __future__ import annotations

from itertools import chain, combinations, permutations

import numpy as np
import pytest

from mmcompile.batching.balance.sample_deferral import bottleneck_match, pairwise_deferral, subsets_nearest


def test_worked_example() -> None:
    """Fig. 4.10: microbatches MB1..MB6 of together 36 units; after deferral all of them take 6."""
    microbatches = [np.array(samples, dtype=np.float64) for samples in ([2], [3], [6, 3], [6, 1], [5], [3, 4, 3])]
    for everywhere in (False, True):
        found = pairwise_deferral(microbatches, everywhere=everywhere)
        assert found.threshold == 6 and found.alone == ()
        work = [float(samples.sum()) for samples in microbatches]
        for pair in found.pairs:
            handed = float(microbatches[pair.overloaded][list(pair.deferred)].sum())
            work[pair.overloaded] -= handed
            work[pair.underloaded] += handed
        assert work == [6] * 6
        assert {(pair.overloaded + 1, pair.underloaded + 1) for pair in found.pairs} == {(3, 2), (4, 5), (6, 1)}
        assert found.order == [5, 0, 2, 1, 3, 4], "overloaded by work descending, each before its partner"


def test_printed_matrix_has_one_matching_at_six() -> None:
    """Fig. 4.10b and c: rows MB3, MB4, MB6; columns MB1, MB2, MB5."""
    printed = np.array([[(6, 5), (6, 6), (6, 8)], [(6, 3), (6, 4), (6, 6)], [(6, 6), (7, 6), (9, 6)]])
    threshold, partner = bottleneck_match(printed.max(axis=2), np.array([9.0, 7.0, 10.0]))
    assert threshold == 6 and partner.tolist() == [1, 2, 0]


@pytest.mark.parametrize("seed", range(60))
def test_nearest_subset_is_nearest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.integers(0, 30, rng.integers(1, 9)).astype(np.float64)
    target = float(rng.uniform(0, work.sum() / 2 + 1))
    (chosen,) = subsets_nearest(work, np.array([target]))
    subsets = chain.from_iterable(combinations(range(len(work)), size) for size in range(len(work) + 1))
    best = min(abs(work[list(subset)].sum() - target) for subset in subsets)
    assert len(set(chosen)) == len(chosen)
    assert abs(work[list(chosen)].sum() - target) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_rounded_work_is_near_to_the_resolution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.lognormal(0, 1, 9)
    target = float(work.sum() / 3)
    subsets = chain.from_iterable(combinations(range(9), size) for size in range(10))
    best = min(abs(work[list(subset)].sum() - target) for subset in subsets)
    (chosen,) = subsets_nearest(work, np.array([target]))
    found = abs(work[list(chosen)].sum() - target)
    assert found <= best + 10 * work.sum() / 4096


@pytest.mark.parametrize("seed", range(60))
def test_threshold_is_the_smallest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 5))
    paired, alone = rng.integers(1, 12, (count, count)).astype(float), rng.integers(1, 14, count).astype(float)
    threshold, partner = bottleneck_match(paired, alone)
    # Row by row the smaller of alone and paired, over every way to pair: what is longest in the best way.
    best = min(
        max((min(alone[row], paired[row, column]) for row, column in enumerate(columns)), default=0.0)
        for columns in permutations(range(count))
    )
    assert threshold == best
    assert sorted(partner.tolist()) == list(range(count))
    assert all(min(alone[row], paired[row, column]) <= threshold for row, column in enumerate(partner))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_nothing_gets_longer_and_nothing_is_lost(count: int, everywhere: bool) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        microbatches = [rng.lognormal(0, 1, rng.integers(0, 6)) for _ in range(count)]
        found = pairwise_deferral(microbatches, everywhere=everywhere)
        work = np.array([samples.sum() for samples in microbatches])
        after = work.copy()
        for pair in found.pairs:
            handed = microbatches[pair.overloaded][list(pair.deferred)].sum()
            after[pair.overloaded] -= handed
            after[pair.underloaded] += handed
        assert sorted(found.order) == list(range(count))
        assert after.max(initial=0) <= work.max(initial=0) + 1e-9
        assert (after[[pair.overloaded for pair in found.pairs]] <= found.threshold + 1e-9).all()


def test_everywhere_is_at_least_as_even() -> None:
    spreads = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        microbatches = [rng.lognormal(0, 0.6, 8) for _ in range(10)]
        row = []
        for everywhere in (False, True):
            work = np.array([samples.sum() for samples in microbatches])
            for pair in pairwise_deferral(microbatches, everywhere=everywhere).pairs:
                handed = microbatches[pair.overloaded][list(pair.deferred)].sum()
                work[pair.overloaded] -= handed
                work[pair.underloaded] += handed
            row.append(work.std())
        spreads.append(row)
    critical, all_pairs = np.mean(spreads, axis=0)
    assert all_pairs <= critical
