"""Replicas of chains that are decided before a search.

Chains of one tower have equally many: their rows stay in the replica that made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import networkx as nx

from mmcompile.planner.pricing.chains import ChainSet

Decided = tuple[int | None, ...]
"""Replicas of each chain; None where the search chooses."""


def towers_of(chains: ChainSet) -> tuple[tuple[int, ...], ...]:
    """Return the chains that have equally many replicas: the last alone, and each group of others that values connect."""
    last = len(chains.chains) - 1
    graph = nx.Graph()
    graph.add_nodes_from(range(last))
    graph.add_edges_from((edge.source, edge.target) for edge in chains.edges if last not in (edge.source, edge.target))
    return (*sorted(tuple(sorted(group)) for group in nx.connected_components(graph)), (last,))


def decided_replicas(chains: ChainSet, wanted: Mapping[str, int], *, follow: bool) -> Decided | None:
    """Return the replicas of each chain; None if a chain or balance group is given two different numbers.

    Args:
        wanted: chain or component name -> replicas.
        follow: chains that are not named, in a tower without any, have as many as the last chain, which has 1 if it is not
            named; otherwise the search chooses.
    """
    found: list[int | None] = [None] * len(chains.chains)
    for tower in towers_of(chains):
        numbers = set(_named(chains, tower, wanted))
        if len(numbers) > 1:
            return None
        for index in tower:
            found[index] = next(iter(numbers), None)
    if not follow:
        return tuple(found)
    rest = found[-1] or 1
    return tuple(number or rest for number in found)


def _named(chains: ChainSet, tower: Sequence[int], wanted: Mapping[str, int]) -> Iterator[int]:
    for index in tower:
        chain = chains.chains[index]
        yield from (number for name, number in wanted.items() if name == chain.name or name in chain.components)
