"""The published rules: nine known cases (numbers from Oobleck's repository, MIT), and what the rules promise for any case."""

from __future__ import annotations

import random

import pytest

from mmcompile.planner.resilience.regroup import RegroupRule, regroup

FOUR = ([0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13])
SIZES = (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("lost", "expected", "rule"),
    [
        ([2], [[0, 1], [3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]], RegroupRule.REINSTANTIATE),
        ([6, 8], [[0, 1], [5, 7], [2, 3, 4], [9, 10, 11, 12, 13]], RegroupRule.REINSTANTIATE),
        ([10, 11], [[0, 1], [2, 3, 4], [9, 12, 13], [5, 6, 7, 8]], RegroupRule.REINSTANTIATE),
        ([1], [[0, 13], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], RegroupRule.BORROW),
        ([1, 3, 4], [[0, 13], [2, 12], [9, 10, 11], [5, 6, 7, 8]], RegroupRule.BORROW),
        ([2, 4, 6, 7, 8], [[0, 1], [3, 13], [5, 12], [9, 10, 11]], RegroupRule.BORROW),
        ([*range(1, 12)], [[0, 12, 13]], RegroupRule.MERGE),
        ([1, 2, 3, 5, 6, 7, 9, 11, 12, 13], [[0, 4], [8, 10]], RegroupRule.MERGE),
        ([1, 2, 3, 5, 6, 7, 9, 10, 11], [[0, 4], [8, 12, 13]], RegroupRule.MERGE),
    ],
)
def test_known_cases(lost: list[int], expected: list[list[int]], rule: RegroupRule) -> None:
    found = regroup(FOUR, lost, SIZES)
    assert found is not None
    assert [list(group) for group in found.groups] == expected
    assert found.rule is rule
    assert found.spares == ()


def test_a_merge_that_holds_two_pipelines_is_divided() -> None:
    """Three pipelines of four lose a node each: the nine that are left are 4 + 5, not one pipeline of 9."""
    found = regroup(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]), {3, 7, 11}, (4, 5, 6, 7, 8, 9))
    assert found is not None
    assert [len(group) for group in found.groups] == [4, 5]
    assert found.rule is RegroupRule.MERGE


def test_idle_nodes_help_before_pipelines_do() -> None:
    found = regroup(FOUR, {1}, SIZES, spares=(20, 21))
    assert found is not None
    assert found.groups[0] == (0, 20) and found.groups[-1] == (9, 10, 11, 12, 13)
    assert found.spares == (21,)


def test_a_group_without_a_template_gives_up_nodes() -> None:
    found = regroup(([0, 1, 2, 3], [4, 5, 6, 7]), {3}, (2, 4))
    assert found is not None
    assert found.groups == ((0, 1), (4, 5, 6, 7))
    assert found.spares == (2,)


def test_too_few_nodes_for_one_pipeline() -> None:
    assert regroup(([0, 1, 2], [3, 4, 5]), {0, 1, 3, 4}, (3, 4)) is None


@pytest.mark.parametrize("seed", range(60))
def test_every_survivor_is_in_one_group_with_a_template(seed: int) -> None:
    rng = random.Random(seed)
    minimum = rng.randint(1, 5)
    sizes = tuple(range(minimum, 2 * minimum + rng.randint(0, 3)))
    groups: list[list[int]] = []
    start = 0
    for _ in range(rng.randint(1, 5)):
        size = rng.choice(sizes)
        groups.append([*range(start, start + size)])
        start += size
    lost = set(rng.sample(range(start), rng.randint(0, start)))
    found = regroup(groups, lost, sizes)
    alive = sorted(set(range(start)) - lost)
    if found is None:
        assert len(alive) < minimum
        return
    assert sorted(node for group in found.groups for node in group) == alive
    assert all(len(group) in sizes for group in found.groups)
