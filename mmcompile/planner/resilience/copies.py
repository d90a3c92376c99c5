"""Copies of layers between nodes or workers: balanced over sources; in a round each holder sends and receives at most one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic

import numpy as np

from mmcompile.planner.resilience.job import Holder, Job, LayerId


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCopy(Generic[Holder]):
    """Copy of a layer, parameters and optimizer state together, from one holder to another."""

    layer: LayerId
    source: Holder
    destination: Holder
    num_bytes: int
    round: int
    """Number of the round; all copies of a round run at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need(Generic[Holder]):
    layer: int
    destination: Holder
    num_bytes: int
    candidates: tuple[Holder, ...]


def plan_copies(
    job: Job, needed: Mapping[Holder, np.ndarray], holdings: Mapping[Holder, np.ndarray]
) -> tuple[LayerCopy[Holder], ...]:
    """Return the copies, by round, after which every node, or worker, holds the layers that it runs.

    Each layer, the largest first, is assigned to the holder with the fewest bytes to send. Then layers are moved to other holders
    as long as the busiest holder gets fewer bytes. With equal layers the busiest source is the lightest possible. The number of
    rounds is the largest number of copies that any holder sends or receives (König's theorem on edge colourings of bipartite
    graphs).

    Args:
        needed: node -> layers it runs, bool [layers].
        holdings: node -> layers it holds, bool [layers], for all nodes that can send, leaving nodes included.

    Raises:
        KeyError: a layer that is needed has no holder.
    """
    needs = _needs(job, needed, holdings)
    sources = _sources(needs)
    rounds = _rounds([(source, need.destination) for source, need in zip(sources, needs, strict=True)])
    copies = [
        LayerCopy(
            layer=job.layers[need.layer],
            source=source,
            destination=need.destination,
            num_bytes=need.num_bytes,
            round=turn,
        )
        for need, source, turn in zip(needs, sources, rounds, strict=True)
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.round, copy.source)))


def busiest_bytes(copies: Sequence[LayerCopy[Holder]]) -> int:
    """Return the most bytes that any holder sends or receives in all copies."""
    sent: dict[tuple[str, Holder], int] = defaultdict(int)
    for copy in copies:
        sent["from", copy.source] += copy.num_bytes
        sent["to", copy.destination] += copy.num_bytes
    return max(sent.values(), default=0)


def _needs(job: Job, needed: Mapping[Holder, np.ndarray], holdings: Mapping[Holder, np.ndarray]) -> list[_Need[Holder]]:
    """Return the layers to copy, largest first: those that a node needs and does not hold. Raises KeyError if no node has one."""
    nothing = np.zeros(len(job.layers), dtype=bool)
    found: list[_Need[Holder]] = []
    holders: dict[int, tuple[Holder, ...]] = {}
    for node in sorted(needed):
        for layer in map(int, np.flatnonzero(needed[node] & ~holdings.get(node, nothing) & (job.bytes_of > 0))):
            if layer not in holders:
                holders[layer] = tuple(sorted(holder for holder, held in holdings.items() if held[layer]))
            if not holders[layer]:
                raise KeyError(f"nobody holds layer {job.layers[layer]}")
            size = int(job.bytes_of[layer])
            found.append(_Need(layer=layer, destination=node, num_bytes=size, candidates=holders[layer]))
    return sorted(found, key=lambda need: (-need.num_bytes, need.layer, need.destination))


def _sources(needs: Sequence[_Need[Holder]]) -> list[Holder]:
    loads: dict[Holder, int] = {node: 0 for need in needs for node in need.candidates}
    chosen: list[Holder] = []
    for need in needs:
        source = min(need.candidates, key=lambda node: (loads[node], node))
        loads[source] += need.num_bytes
        chosen.append(source)
    while (moves := _lighten(needs, chosen, loads)) is not None:
        for index, target in moves:
            loads[chosen[index]] -= needs[index].num_bytes
            loads[target] += needs[index].num_bytes
            chosen[index] = target
    return chosen


def _lighten(
    needs: Sequence[_Need[Holder]], chosen: Sequence[Holder], loads: Mapping[Holder, int]
) -> list[tuple[int, Holder]] | None:
    """Return changes (index into `needs`, new source) that lower the bytes of the busiest source; None if there are none.

    No other source becomes as busy as the busiest was. A breadth-first search finds holders that could send a layer instead.
    `needs`: layers to copy. `chosen`: the source of each. `loads`: source -> bytes that it sends.
    """
    busiest = min(loads, key=lambda node: (-loads[node], node), default=None)
    if busiest is None:
        return None
    sends: dict[Holder, list[int]] = defaultdict(list)
    for index, source in enumerate(chosen):
        sends[source].append(index)
    reached: dict[Holder, tuple[int, Holder]] = {}
    queue = deque([(busiest, 0)])
    while queue:
        node, taken = queue.popleft()
        for index in sends[node]:
            size = needs[index].num_bytes
            # On the way, a node hands on what makes room for what it took.
            if loads[node] + taken - size >= loads[busiest]:
                continue
            for target in needs[index].candidates:
                if target == busiest or target in reached:
                    continue
                reached[target] = (index, node)
                if loads[target] + size < loads[busiest]:
                    return _path(reached, target, busiest)
                queue.append((target, size))
    return None


def _path(reached: Mapping[Holder, tuple[int, Holder]], target: Holder, busiest: Holder) -> list[tuple[int, Holder]]:
    moves: list[tuple[int, Holder]] = []
    while target != busiest:
        index, node = reached[target]
        moves.append((index, target))
        target = node
    return moves


def _rounds(edges: Sequence[tuple[Holder, Holder]]) -> list[int]:
    """Return the round in which each copy (source, destination) runs. Copies of one round share no source or destination."""
    at: dict[tuple[str, Holder], dict[int, int]] = defaultdict(dict)  # end -> colour -> edge
    colour: list[int] = []
    for edge, (source, destination) in enumerate(edges):
        ends = (("from", source), ("to", destination))
        first, second = (next(turn for turn in count() if turn not in at[end]) for end in ends)
        if first != second:
            _swap(edges, at, colour, ends[1], first, second)
        colour.append(first)
        for end in ends:
            at[end][first] = edge
    return colour


def _swap(
    edges: Sequence[tuple[Holder, Holder]],
    at: Mapping[tuple[str, Holder], dict[int, int]],
    colour: list[int],
    end: tuple[str, Holder],
    first: int,
    second: int,
) -> None:
    """Free round `first` at one end of a new copy: exchange rounds `first` and `second` along a path of copies from `end`.

    The path alternates between the rounds and cannot reach the new copy's other end. `end`: ("from" or "to", holder).
    `at`: end -> round -> index into `edges`. `colour`: round of each copy in `edges`, changed in place.
    """
    path: list[int] = []
    wanted = first
    while wanted in at[end]:
        edge = at[end][wanted]
        path.append(edge)
        source, destination = edges[edge]
        end = ("to", destination) if end == ("from", source) else ("from", source)
        wanted = second if wanted == first else first
    for edge in path:
        for one in (("from", edges[edge][0]), ("to", edges[edge][1])):
            del at[one][colour[edge]]
    for edge in path:
        colour[edge] = second if colour[edge] == first else first
        for one in (("from", edges[edge][0]), ("to", edges[edge][1])):
            at[one][colour[edge]] = edge
