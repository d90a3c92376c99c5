"""Node counts of templates, and the node counts of a cluster that they cover.

A replica needs n0 nodes. To survive f failures at once, f + 1 replicas run, so the largest template has N - f n0 nodes.
The sizes n0, n0 + 1, .., 2 n0 - 1 are enough to use any N' >= (f + 1) n0 nodes in full: with N' = q n0 + r and r < n0, take
q - 1 templates of n0 nodes and one of n0 + r. Larger ones only make pipelines faster.

Source: Oobleck / Cornstarch / Entrain dissertation §2.4.1.1 and App. A.1. (The Frobenius number of a, a + 1, .., a + p - 1 is
(floor((a - 2) / (p - 1)) + 1) a - 1; the printed one lacks a factor.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mmcompile.errors import ConfigError, PlanError
from mmcompile.units import runs


def node_counts(num_nodes: int, least: int, fault_tolerance: int) -> range:
    """Return the node counts for which a cluster needs templates: `least` to `num_nodes - fault_tolerance * least`.

    `least` is n0, the fewest nodes that hold a replica; `fault_tolerance` is f, the number of nodes that may fail at once.

    Raises:
        ConfigError: `fault_tolerance` is negative.
        PlanError: f + 1 replicas do not fit the cluster.
    """
    if fault_tolerance < 0:
        raise ConfigError(
            f"fault tolerance is {fault_tolerance}; give the number of nodes that may fail at once, 0 or more"
        )
    replicas = fault_tolerance + 1
    if replicas * least > num_nodes:
        most = num_nodes // least - 1
        then = f"or a fault tolerance of {most}" if most >= 0 else "or devices with more memory"
        raise PlanError(
            f"a fault tolerance of {fault_tolerance} needs {replicas} replicas of the model at {least} nodes each, "
            f"{replicas * least} nodes; the cluster has {num_nodes}: use {replicas * least} nodes, {then}"
        )
    return range(least, num_nodes - fault_tolerance * least + 1)


def enough(least: int) -> range:
    """Return the template sizes with which any number of nodes from `least` on can be used in full."""
    return range(least, 2 * least)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cover:
    """Division of a cluster's node counts into those that pipelines of given sizes can use without idle nodes, and the others."""

    num_nodes: int
    """Number of nodes of the whole cluster."""
    fault_tolerance: int
    sizes: tuple[int, ...]
    """Node counts of the templates, ascending."""
    uncovered: tuple[int, ...]
    """Node counts from `least_nodes` to `num_nodes` that are not the sum of f + 1 or more pipelines' nodes."""

    @classmethod
    def of(
        cls, sizes: Iterable[int], num_nodes: int, fault_tolerance: int, *, max_pipelines: int | None = None
    ) -> Cover:
        """Return the `Cover` of templates: every node count up to `num_nodes` is checked for idle nodes.

        Args:
            sizes: node counts of the templates.
            fault_tolerance: f, number of nodes that may fail at once.
            max_pipelines: largest number of pipelines that a step has microbatches for; None for no limit.

        Raises:
            PlanError: `sizes` is empty, or f + 1 pipelines of the smallest size do not fit the cluster.
        """
        rising = tuple(sorted(set(sizes)))
        if not rising or rising[0] < 1:
            raise PlanError(f"templates of {_listed(rising) or 'no'} nodes cover nothing; give sizes of 1 or more")
        node_counts(num_nodes, rising[0], fault_tolerance)
        replicas = fault_tolerance + 1
        fewest = fewest_pipelines(rising, num_nodes, replicas)
        most = num_nodes if max_pipelines is None else max_pipelines
        uncovered = [n for n in range(replicas * rising[0], num_nodes + 1) if not 0 < fewest.get(n, 0) <= most]
        return cls(num_nodes=num_nodes, fault_tolerance=fault_tolerance, sizes=rising, uncovered=tuple(uncovered))

    @property
    def least_nodes(self) -> int:
        """Fewest nodes that hold f + 1 replicas; with fewer, training stops."""
        return (self.fault_tolerance + 1) * self.sizes[0]

    def check(self) -> None:
        """Raise PlanError, which names the node counts, if any node count cannot be used in full."""
        if self.uncovered:
            wanted = enough(self.sizes[0])
            missing = [size for size in wanted if size not in self.sizes]
            raise PlanError(
                f"templates of {_listed(self.sizes)} nodes cannot use {_listed(self.uncovered)} nodes in full with "
                f"{self.fault_tolerance + 1} or more pipelines; allow sizes {wanted[0]} to {wanted[-1]}, which cover all "
                f"(missing: {_listed(missing)})"
            )

    def __str__(self) -> str:
        low, high = self.least_nodes, self.num_nodes
        counts = f"any {low}..{high} nodes" if low < high else f"{high} nodes"
        words = f"{counts} can be used in full"
        if self.uncovered:
            words = f"{low}..{high} nodes can be used, but {_listed(self.uncovered)} not in full"
        return f"{words}; below {low} training stops"


def fewest_pipelines(sizes: Sequence[int], num_nodes: int, replicas: int) -> dict[int, int]:
    """Return node count -> fewest pipelines, at least `replicas`, that use all of its nodes; counts without any are absent."""
    fewest: dict[int, int] = {}
    for pipelines, counts in _sums(sizes, num_nodes):
        if pipelines >= replicas:
            fewest |= {
                count: pipelines for count in range(num_nodes + 1) if counts >> count & 1 and count not in fewest
            }
    return fewest


def _sums(sizes: Sequence[int], num_nodes: int) -> Iterator[tuple[int, int]]:
    """Yield for 1, 2, ... pipelines (number of pipelines, int whose bit n is set if they can have n nodes together).

    Example: sizes 2 and 3 give (2, 0b1110000), as two pipelines have 4, 5 or 6 nodes. Counts above `num_nodes` are left out.
    """
    within, counts, pipelines = (1 << num_nodes + 1) - 1, 1, 0
    while counts:
        longer = 0
        for size in sizes:
            longer |= counts << size
        counts, pipelines = longer & within, pipelines + 1
        if counts:
            yield pipelines, counts


def _listed(counts: Sequence[int]) -> str:
    """Return numbers as text, `2, 3 and 5`; three or more consecutive ones as `2..5`."""
    words: list[str] = []
    for first, last in runs(counts):
        words += [f"{first}..{last}"] if last > first + 1 else map(str, range(first, last + 1))
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
