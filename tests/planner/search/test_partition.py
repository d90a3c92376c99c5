"""The split of a chain: brute force, Z3, parametric search, ties, memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
import z3

from mmcompile.errors import PlanError
from mmcompile.planner.search.partition import PartitionLayer, Split, partition

PER_SECOND = 10**12


def layers_of(rng: random.Random, count: int, *, cuts: bool = True, working: bool = False) -> list[PartitionLayer]:
    """Random layers whose times are whole milliseconds, so that ties are frequent."""
    return [
        PartitionLayer(
            seconds=rng.randint(0, 20) * 1e-3,
            fixed_bytes=rng.randint(0, 10),
            saved_bytes=rng.randint(0, 3),
            begin_fixed_bytes=rng.randint(0, 2),
            begin_saved_bytes=rng.randint(0, 2),
            working_bytes=rng.randint(0, 8) if working else 0,
            send_s=rng.randint(0, 4) * 1e-3 if cuts else 0.0,
            return_s=rng.randint(0, 4) * 1e-3 if cuts else 0.0,
        )
        for _ in range(count)
    ]


def stage_cost(
    layers: Sequence[PartitionLayer], first: int, last: int, in_flight: int, memory_bytes: int | None
) -> float:
    """Picoseconds of one stage, from the definition."""
    part = layers[first:last]
    needed = sum(layer.fixed_bytes + in_flight * layer.saved_bytes for layer in part)
    needed += part[0].begin_fixed_bytes + in_flight * part[0].begin_saved_bytes
    needed += max(layer.working_bytes for layer in part)
    if memory_bytes is not None and needed > memory_bytes:
        return float("inf")
    seconds = sum(layer.seconds for layer in part) + part[-1].send_s + (layers[first - 1].return_s if first else 0.0)
    return round(seconds * PER_SECOND)


def brute_force(
    layers: Sequence[PartitionLayer], count: int, memory_bytes: int | None, tail: int, microbatches: int
) -> float:
    """The best bottleneck [ps] over all ways to cut."""
    in_flight = [min(tail + count - k, microbatches) for k in range(count)]
    costs = {
        (first, last, held): stage_cost(layers, first, last, held, memory_bytes)
        for held in set(in_flight)
        for first, last in combinations(range(len(layers) + 1), 2)
    }
    return min(
        max(
            costs[first, last, held]
            for (first, last), held in zip(pairwise((0, *cuts, len(layers))), in_flight, strict=True)
        )
        for cuts in combinations(range(1, len(layers)), count - 1)
    )


def bottleneck_of(split: Split | None) -> float:
    return float("inf") if split is None else round(split.bottleneck_s * PER_SECOND)


@pytest.mark.parametrize("block", range(20))
def test_equals_brute_force_on_a_thousand_chains_with_cuts_and_memory(block: int) -> None:
    for number in range(50):
        equals_brute_force(random.Random(50 * block + number), working=block % 2 == 1)


def equals_brute_force(rng: random.Random, *, working: bool) -> None:
    """Every stage count of a random chain."""
    layers = layers_of(rng, rng.randint(1, 8), working=working)
    memory_bytes = rng.choice([None, 20, 40, 80])
    tail, microbatches = rng.randint(0, 4), rng.randint(1, 6)
    splits = partition(layers, len(layers), memory_bytes=memory_bytes, tail=tail, num_microbatches=microbatches)
    for count, split in enumerate(splits, 1):
        assert bottleneck_of(split) == brute_force(layers, count, memory_bytes, tail, microbatches)
        if split is not None:
            assert split.boundaries[0] == 0 and split.boundaries[-1] == len(layers)
            assert all(first < last for first, last in split.ranges)
            flight = [min(tail + count - k, microbatches) for k in range(count)]
            costs = [stage_cost(layers, *ends, n, memory_bytes) for ends, n in zip(split.ranges, flight, strict=True)]
            assert max(costs) == bottleneck_of(split)


@pytest.mark.parametrize("seed", range(4))
def test_z3_finds_no_better_split(seed: int) -> None:
    rng = random.Random(100 + seed)
    layers = layers_of(rng, 9, cuts=False)
    times = [round(layer.seconds * 1e3) for layer in layers]
    prefix = [sum(times[:i]) for i in range(len(times) + 1)]
    for count in (2, 3, 4):
        optimizer = z3.Optimize()
        cuts = [z3.Int(f"cut{k}") for k in range(count + 1)]
        sums = [z3.Int(f"sum{k}") for k in range(count + 1)]
        bottleneck = z3.Int("bottleneck")
        optimizer.add(cuts[0] == 0, cuts[count] == len(times))
        for k in range(count):
            optimizer.add(cuts[k] < cuts[k + 1], sums[k + 1] - sums[k] <= bottleneck)
        for cut, total in zip(cuts, sums, strict=True):
            optimizer.add(z3.Or([z3.And(cut == i, total == prefix[i]) for i in range(len(prefix))]))
        optimizer.minimize(bottleneck)
        assert optimizer.check() == z3.sat
        found = optimizer.model().eval(bottleneck)
        assert isinstance(found, z3.IntNumRef)
        split = partition(layers, count)[-1]
        assert split is not None
        assert round(split.bottleneck_s * 1e3) == found.as_long()


def fewest_stages(times: Sequence[int], limit: int) -> int:
    """Greedy: stages needed if none may take longer than `limit`."""
    stages, current = 1, 0
    for duration in times:
        if current + duration > limit:
            stages, current = stages + 1, 0
        current += duration
    return stages


def smallest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


@pytest.mark.parametrize("seed", range(3))
def test_parametric_search_agrees_on_a_thousand_layers_in_two_seconds(seed: int) -> None:
    rng = random.Random(200 + seed)
    times = [rng.randint(1, 10**6) for _ in range(1000)]
    layers = [PartitionLayer(seconds=duration / PER_SECOND, fixed_bytes=1, saved_bytes=1) for duration in times]
    start = time.process_time()
    splits = partition(layers, 64, memory_bytes=10**9, num_microbatches=100)
    assert time.process_time() - start < 2.0
    for count in (1, 2, 3, 7, 16, 33, 64):
        best = smallest(max(times), sum(times), lambda limit, count=count: fewest_stages(times, limit) <= count)
        assert bottleneck_of(splits[count - 1]) == best


def test_ties_go_to_the_earliest_boundary_every_time() -> None:
    layers = [PartitionLayer(seconds=0.1)] * 10
    splits = partition(layers, 4)
    assert [split.boundaries for split in splits if split] == [(0, 10), (0, 5, 10), (0, 2, 6, 10), (0, 1, 4, 7, 10)]
    assert partition(layers, 4) == splits


def test_memory_follows_the_distance_to_the_loss() -> None:
    # The k-th stage from the end holds k microbatches of one byte a layer: three bytes hold 3, 1 and 1 layers.
    layers = [PartitionLayer(seconds=1.0, saved_bytes=1)] * 5
    assert [split is not None for split in partition(layers, 3, memory_bytes=3)] == [False, False, True]
    split = partition(layers, 3, memory_bytes=3)[2]
    assert split is not None and split.boundaries == (0, 1, 2, 5)
    # With another stage between the chain and the loss nothing fits any more; with one microbatch all does.
    assert partition(layers, 3, memory_bytes=3, tail=1)[2] is None
    assert partition(layers, 3, memory_bytes=3, tail=1, num_microbatches=1)[2] is not None


def test_a_dear_cut_is_avoided() -> None:
    layers = [PartitionLayer(seconds=1.0, send_s=5.0 if index == 1 else 0.0) for index in range(4)]
    split = partition(layers, 2)[1]
    assert split is not None and split.boundaries == (0, 1, 4) and split.bottleneck_s == 3.0


@pytest.mark.parametrize("count", [0, 4])
def test_more_stages_than_layers_is_an_error(count: int) -> None:
    with pytest.raises(PlanError, match=f"cannot split 3 layers into {count} stages; use 1 to 3 stages"):
        partition([PartitionLayer(seconds=1.0)] * 3, count)
