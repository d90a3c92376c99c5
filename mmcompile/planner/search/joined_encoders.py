"""`JoinedEncoders`: options of all encoders of a chain set together; those of one tower have equally many replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import ScheduleKind
from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.options import Array, Index, Options, undominated
from mmcompile.planner.search.replicas import towers_of


@dataclass(frozen=True, kw_only=True)
class JoinedEncoders:
    """Options of all encoders together [combinations]."""

    chosen: Index
    """Option of each encoder, [combinations, encoders]."""
    ranks: Index
    slowest_s: Array
    path_s: Array
    """Seconds of the longest path through encoders, forward and backward."""
    before_s: Array
    """Seconds that certainly pass before the last chain's first stage begins and after it ends."""
    tail_s: Array

    @classmethod
    def of(
        cls, chains: ChainSet, options: Sequence[Options], schedule: ScheduleKind, *, everything: bool
    ) -> JoinedEncoders:
        """Return the combinations of all encoders' options."""
        zero = np.zeros(1)
        chosen = np.zeros((1, 0), dtype=np.int64)
        ranks, slowest_s, tail_s = np.zeros(1, dtype=np.int64), zero, zero
        times = [own.path_s for own in options]
        bound = _Bound.of(chains, options)
        for chain, own in enumerate(options):
            # What is beaten among its own options is beaten in every combination, where others of its tower allow both.
            single = np.arange(len(own))
            if not everything:
                alone = bound.replicas[chain][:, None]
                single = _undominated_each(alone, own.ranks, own.slowest_s, own.path_s + own.tail_s)
            left, right = (part.ravel() for part in np.indices((len(ranks), len(single))))
            right = single[right]
            joined = np.concatenate([chosen[left], right[:, None]], axis=1)
            allowed = bound.allowed(joined)
            left, right, joined = left[allowed], right[allowed], joined[allowed]
            sums = ranks[left] + own.ranks[right]
            slowest = np.maximum(slowest_s[left], own.slowest_s[right])
            tails = np.maximum(tail_s[left], own.tail_s[right])
            kept = np.arange(len(joined))
            if not everything:
                path_s = _path(chains, times, joined, first=False)
                kept = _undominated_each(bound.chosen(joined), sums, slowest, path_s + tails)
            chosen, ranks, slowest_s, tail_s = joined[kept], sums[kept], slowest[kept], tails[kept]
        if schedule == "zb-h1":
            times = [own.path_s - own.late_s for own in options]
        return cls(
            chosen=chosen,
            ranks=ranks,
            slowest_s=slowest_s,
            path_s=_path(chains, times, chosen, first=False),
            before_s=_path(chains, times, chosen, first=True),
            tail_s=tail_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bound:
    """Encoders whose replicas must be those of another: several chains of one tower."""

    replicas: tuple[Index, ...]
    """Number of replicas of each encoder [options]; 0 if it is a balance group of its own."""
    towers: tuple[tuple[int, ...], ...]
    """Balance groups of several chains."""

    @classmethod
    def of(cls, chains: ChainSet, options: Sequence[Options]) -> _Bound:
        towers = tuple(tower for tower in towers_of(chains) if len(tower) > 1)
        several = {chain for tower in towers for chain in tower}
        return cls(
            replicas=tuple(
                np.array([degrees.dp * (chain in several) for degrees in own.degrees], dtype=np.int64)[own.which]
                for chain, own in enumerate(options)
            ),
            towers=towers,
        )

    def chosen(self, joined: Index) -> Index:
        """Return the replicas of the encoders chosen so far, [combinations, encoders]."""
        columns = [self.replicas[chain][joined[:, chain]] for chain in range(joined.shape[1])]
        return np.stack(columns, axis=1)

    def allowed(self, joined: Index) -> NDArray[np.bool_]:
        """Return whether the last encoder chosen agrees with those of its tower before it, [combinations]."""
        newest, found = joined.shape[1] - 1, self.chosen(joined)
        before = [chain for tower in self.towers if newest in tower for chain in tower if chain < newest]
        return (found[:, before] == found[:, newest : newest + 1]).all(axis=1)


def _undominated_each(kinds: Index, ranks: Index, first: Array, second: Array) -> Index:
    """Return `undominated` among options of each kind [options, any], in order of kinds."""
    if not kinds.any():
        return undominated(ranks, first, second)
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    groups = [np.flatnonzero(kind == number) for number in range(int(kind.max()) + 1)]
    return np.concatenate([group[undominated(ranks[group], first[group], second[group])] for group in groups])


def _path(chains: ChainSet, times: Sequence[Array], chosen: NDArray[np.int64], *, first: bool) -> Array:
    """Return the longest path through the encoders chosen so far, [combinations]; chains are in topological order.

    Args:
        times: of each encoder [options].
        first: only along edges that enter a chain at its first layer.
    """
    longest: list[Array] = [np.zeros(len(chosen))]
    last = len(chains.chains) - 1
    edges = [edge for edge in chains.edges if edge.source != edge.target and not (first and edge.target_layer)]
    for chain in range(chosen.shape[1]):
        before = [longest[edge.source + 1] for edge in edges if edge.target == chain]
        longest.append(times[chain][chosen[:, chain]] + (np.max(before, axis=0) if before else 0.0))
    ends = {edge.source for edge in edges if edge.target == last} if first else range(len(longest) - 1)
    return np.max([longest[0], *(longest[chain + 1] for chain in ends if chain < len(longest) - 1)], axis=0)
