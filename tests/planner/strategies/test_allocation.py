"""Largest remainder."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mmcompile.errors import ConfigError
from mmcompile.planner.strategies.entrain import allocate


def nearest(shares: list[float], devices: int) -> float:
    """Least sum of distances to the shares over all ways to share the devices."""
    ways = product(range(devices + 1), repeat=len(shares))
    return min(
        sum(abs(count - share) for count, share in zip(way, shares, strict=True)) for way in ways if sum(way) == devices
    )


def test_largest_remainder_is_nearest_to_the_shares() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        parts, devices = int(generator.integers(1, 5)), int(generator.integers(4, 13))
        work = generator.random(parts) + 0.01
        found = allocate({str(i): float(w) for i, w in enumerate(work)}, devices, minimum=0)
        shares = (work / work.sum() * devices).tolist()
        assert sum(found.values()) == devices
        distance = sum(abs(count - share) for count, share in zip(found.values(), shares, strict=True))
        assert distance == pytest.approx(nearest(shares, devices))


def test_the_minimum_is_taken_from_the_others_in_proportion() -> None:
    assert allocate({"small": 0.001, "a": 2.0, "b": 1.0}, 7) == {"small": 1, "a": 4, "b": 2}
    assert allocate({"none": 0.0, "all": 1.0}, 8, minimum=2) == {"none": 2, "all": 6}


@pytest.mark.parametrize("minimum", [0, 1, 2])
def test_every_component_has_its_minimum_and_all_devices_are_used(minimum: int) -> None:
    generator = np.random.default_rng(minimum)
    for _ in range(200):
        parts = int(generator.integers(1, 6))
        devices = parts * minimum + int(generator.integers(1, 20))
        work = {str(i): float(w) for i, w in enumerate(generator.exponential(size=parts) ** 3)}
        found = allocate(work, devices, minimum)
        assert list(found) == list(work) and sum(found.values()) == devices and min(found.values()) >= minimum
        order = sorted(work, key=work.__getitem__)
        assert all(found[a] <= found[b] for a, b in zip(order, order[1:], strict=False))


def test_a_tie_goes_to_the_component_named_first() -> None:
    assert allocate({"a": 1.0, "b": 1.0}, 3) == {"a": 2, "b": 1}


def test_too_few_devices_and_no_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 devices for 3 components of at least 1; give 3 or more"):
        allocate({"a": 1.0, "b": 1.0, "c": 1.0}, 2)
    with pytest.raises(ConfigError, match="at least one above zero"):
        allocate({"a": 0.0, "b": 0.0}, 2)
