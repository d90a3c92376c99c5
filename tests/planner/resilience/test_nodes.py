"""Sizes of templates, and which node counts they cover."""

from __future__ import annotations

from functools import cache

import pytest

from mmcompile.errors import ConfigError, PlanError
from mmcompile.planner.resilience.nodes import Cover, enough, fewest_pipelines, node_counts


@cache
def sums(sizes: tuple[int, ...], num_nodes: int) -> frozenset[tuple[int, int]]:
    """Every (nodes, pipelines) that some pipelines of these sizes have together."""
    reached = {(0, 0)}
    for size in sizes:
        for nodes in range(size, num_nodes + 1):
            reached |= {(nodes, pipelines + 1) for at, pipelines in list(reached) if at == nodes - size}
    return frozenset(reached)


@pytest.mark.parametrize("fault_tolerance", range(4))
def test_every_node_count_that_failures_may_leave_is_covered(fault_tolerance: int) -> None:
    """All N <= 64 and n0: from (f + 1) n0 nodes on, f + 1 or more pipelines use all of them."""
    replicas = fault_tolerance + 1
    for least in range(1, 64 // replicas + 1):
        for num_nodes in range(replicas * least, 65):
            cover = Cover.of(node_counts(num_nodes, least, fault_tolerance), num_nodes, fault_tolerance)
            assert cover.uncovered == ()
            assert cover.sizes[0] == least
            assert cover.sizes[-1] == num_nodes - fault_tolerance * least
            assert cover.least_nodes == replicas * least
            cover.check()


@pytest.mark.parametrize("least", range(1, 17))
def test_few_sizes_are_enough(least: int) -> None:
    """n0 to 2 n0 - 1 cover everything, one size less does not."""
    sizes = tuple(enough(least))
    for fault_tolerance in range(64 // least):
        assert Cover.of(sizes, 64, fault_tolerance).uncovered == ()
    if least > 1:
        assert 2 * least - 1 in Cover.of(sizes[:-1], 64, 0).uncovered


@pytest.mark.parametrize(
    "sizes", [(2, 3), (2, 4), (3, 5), (3, 4, 5), (4, 6, 9), (4, 5), (5, 6, 7), (5, 6, 7, 8, 9), (1,), (7,)]
)
def test_coverage_is_that_of_all_sums(sizes: tuple[int, ...]) -> None:
    reached = sums(sizes, 24)
    fewest = {}
    for at, pipelines in sorted(reached - {(0, 0)}):
        fewest.setdefault(at, pipelines)
    assert fewest_pipelines(sizes, 24, 1) == fewest
    for fault_tolerance in range(3):
        cover = Cover.of(sizes, 24, fault_tolerance)
        wanted = range(cover.least_nodes, 25)
        missing = [n for n in wanted if not any(at == n and count > fault_tolerance for at, count in reached)]
        assert list(cover.uncovered) == missing


def test_the_frobenius_number_of_consecutive_sizes() -> None:
    """(floor((a - 2) / (p - 1)) + 1) a - 1 is the last node count that no sizes add up to."""
    for least in range(2, 9):
        for count in range(2, 7):
            reached = fewest_pipelines(range(least, least + count), 100, 1)
            last = max(nodes for nodes in range(100) if nodes not in reached)
            assert last == ((least - 2) // (count - 1) + 1) * least - 1


@pytest.mark.parametrize(
    ("sizes", "num_nodes", "fault_tolerance", "text"),
    [
        (range(2, 13), 16, 2, "any 6..16 nodes can be used in full; below 6 training stops"),
        (range(3, 14), 16, 1, "any 6..16 nodes can be used in full; below 6 training stops"),
        (range(4, 5), 8, 1, "8 nodes can be used in full; below 8 training stops"),
        ([4, 6], 12, 0, "4..12 nodes can be used, but 5, 7, 9 and 11 not in full; below 4 training stops"),
        ([4], 10, 0, "4..10 nodes can be used, but 5..7, 9 and 10 not in full; below 4 training stops"),
        ([1, 2], 4, 0, "any 1..4 nodes can be used in full; below 1 training stops"),
    ],
)
def test_the_statement(sizes: range | list[int], num_nodes: int, fault_tolerance: int, text: str) -> None:
    assert str(Cover.of(sizes, num_nodes, fault_tolerance)) == text


def test_uncovered_node_counts_are_named() -> None:
    with pytest.raises(PlanError) as error:
        Cover.of([4, 6], 12, 1).check()
    assert str(error.value) == (
        "templates of 4 and 6 nodes cannot use 9 and 11 nodes in full with 2 or more pipelines; allow sizes 4 to 7, which "
        "cover all (missing: 5 and 7)"
    )


def test_too_many_failures_to_tolerate() -> None:
    with pytest.raises(PlanError) as error:
        node_counts(16, 6, 2)
    assert str(error.value) == (
        "a fault tolerance of 2 needs 3 replicas of the model at 6 nodes each, 18 nodes; the cluster has 16: use 18 nodes, "
        "or a fault tolerance of 1"
    )
    with pytest.raises(PlanError, match="the cluster has 4: use 6 nodes, or devices with more memory"):
        node_counts(4, 6, 0)
    with pytest.raises(
        ConfigError, match="fault tolerance is -1; give the number of nodes that may fail at once, 0 or more"
    ):
        node_counts(4, 1, -1)


def test_no_sizes_cover_nothing() -> None:
    with pytest.raises(PlanError, match="templates of no nodes cover nothing"):
        Cover.of([], 4, 0)
    with pytest.raises(PlanError, match="templates of 0 and 1 nodes cover nothing"):
        Cover.of([0, 1], 4, 0)
