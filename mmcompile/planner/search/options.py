"""Options of a chain for all degrees and stage counts at once: bounds in arrays, before anything is split.

Take `S` stages, and the `n` equal layers that take most of a chain's time (its body). The stage count is possible only if the
memory holds the body, at most `cap(k)` of its layers in the k-th stage from the loss. In seconds a microbatch, the slowest stage
takes at least

    max(total / S, slowest layer, h * body layer),    h = least with sum over k <= S of min(h, cap(k)) >= n

where h is the number of body layers in the fullest stage. Exact splits (`mmcompile.planner.search.splitter`) are no faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.comm import ring_s
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.pricing.priced_chain import OPTIMIZER_PASSES, PricedChain
from mmcompile.planner.schedule.schedule import in_flight
from mmcompile.planner.search.problem import Problem, balance_groups_of
from mmcompile.planner.search.settings import Degrees, Setting

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options of one chain (a choice of degrees and stage count each), as arrays [options] of ranks and seconds."""

    degrees: tuple[Degrees, ...]
    which: Index
    """Entry i: index into `degrees` of the degrees of option i, [options]."""
    stages: Index
    ranks: Index
    """Number of ranks of all stages and replicas of the chain, [options]."""
    slowest_s: Array
    """Lower bound of the slowest stage's seconds over all splits, [options]."""
    path_s: Array
    """Seconds of one microbatch through all stages, forward and backward, [options]."""
    late_s: Array
    """Seconds of one microbatch's weight gradients in all stages, [options]."""
    waited: Array
    """Least value over a chain's layers of the share, 0..1, of a layer's time that is not weight gradient, [options]."""
    tail_s: Array
    """Rough seconds after the last backward: gradient reduction over replicas and optimizer step, [options]."""

    def __len__(self) -> int:
        return len(self.which)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """Combination, or stage counts of one chain, whose stages exceed the memory."""

    text: str
    limit_bytes: int
    number: int = 1
    """Number of combinations, or of stage counts of one chain, that this entry stands for."""


@dataclass(frozen=True, kw_only=True)
class OptionTables:
    """Cache of the options (degrees and stage counts) of single chains, so that bounds are computed once."""

    problem: Problem
    too_big: dict[str, MemoryShortage] = field(default_factory=dict, repr=False)
    """Chain name, largest excluded stage count and degrees, as in "llm 4 (tp 2)" -> all stage counts that exceed the memory."""
    _slowest: dict[tuple[object, ...], Array] = field(default_factory=dict, repr=False)
    _known: dict[tuple[object, ...], Options] = field(default_factory=dict, repr=False)

    def options(
        self,
        chain: ChainSpec,
        setting: Setting,
        choices: tuple[Degrees, ...],
        counts: range,
        max_ranks: int,
        *,
        last: bool,
    ) -> Options:
        """Return the degrees and stage counts with which a chain may fit the memory. Equal arguments give the same object.

        Args:
            counts: numbers of stages to choose from.
            max_ranks: largest number of ranks of the chain's stages and replicas together.
            last: True if the chain ends in the loss; any other chain is at least one stage away from it.
        """
        slot = setting.samples * setting.dp  # all that other settings of the same slot could change
        whole = (setting.schedule, setting.recompute, setting.num_microbatches, slot)
        key = (chain, whole, choices, counts, max_ranks)
        if key in self._known:
            return self._known[key]
        kept: list[Degrees] = []
        parts: list[tuple[NDArray[Any], ...]] = []
        for degrees in choices:
            most = max_ranks // degrees.ranks
            allowed = np.arange(counts.start, min(counts.stop, most + 1))
            if not len(allowed):
                continue
            priced = self.problem.prices.priced(chain, degrees, setting)
            slowest_s = self.slowest(priced, setting, counts.stop - 1, last=last)[allowed - 1]
            fits = np.isfinite(slowest_s)
            if not fits.all():
                self._note(chain, setting, degrees, allowed[~fits])
            allowed, slowest_s = allowed[fits], slowest_s[fits]
            path_s, late_s = float(priced.total_s[-1]), float(priced.weight_grad_s[-1])
            tail_s = self._tail(priced, degrees) / allowed
            full = np.ones(len(allowed))
            which = np.full(len(allowed), len(kept))
            times = (slowest_s, full * path_s, full * late_s, full * priced.waited, tail_s)
            parts.append((which, allowed, allowed * degrees.ranks, *times))
            kept.append(degrees)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0)] * 8
        which, stages, ranks = (column.astype(np.int64) for column in columns[:3])
        times = dict(zip(("slowest_s", "path_s", "late_s", "waited", "tail_s"), columns[3:], strict=True))
        self._known[key] = Options(degrees=tuple(kept), which=which, stages=stages, ranks=ranks, **times)
        return self._known[key]

    def _note(self, chain: ChainSpec, setting: Setting, degrees: Degrees, counts: Index) -> None:
        again = f"recompute {setting.recompute}" if setting.recompute != "none" else ""
        words = ", ".join(filter(None, (str(degrees), again)))
        text = f"{chain.name} {counts.max()}" + (f" ({words})" if words else "")
        shortage = MemoryShortage(text=text, limit_bytes=self.problem.memory_bytes(1), number=len(counts))
        self.too_big.setdefault(text, shortage)

    def slowest(self, priced: PricedChain, setting: Setting, most: int, *, last: bool) -> Array:
        """Return a lower bound of the slowest stage's seconds for 1, 2, ... stages, [most]; infinite if too big for memory."""
        key = (priced, setting.schedule, min(setting.num_microbatches, 2 * most + 1), most, last)
        if key in self._slowest:
            return self._slowest[key]
        body = priced.body
        free = self.problem.memory_bytes(1) - body.working_bytes
        flights = _flights(setting.schedule, setting.num_microbatches, most, last)
        needs = np.maximum(body.fixed_bytes + flights * body.saved_bytes, 1)
        cap = np.maximum(free, 0) // needs
        height = np.arange(1, body.count + 1)
        held = np.minimum(height[:, None], cap[None, :]).cumsum(axis=1)  # [height, stages]
        enough = held >= body.count
        least = np.where(enough.any(axis=0), enough.argmax(axis=0) + 1.0, np.inf)
        if free < 0:
            least[:] = np.inf
        even = float(priced.total_s[-1]) / np.arange(1, most + 1)
        bound = np.maximum(np.maximum(even, priced.slowest_s), least * body.seconds)
        self._slowest[key] = np.where(np.isinf(least), np.inf, bound)
        return self._slowest[key]

    def _tail(self, priced: PricedChain, degrees: Degrees) -> float:
        """Return rough seconds of gradient reduction and optimizer step, as if one stage held all layers of a chain."""
        cluster = self.problem.cluster
        num_bytes = float(priced.trainable_bytes[-1])
        peers = degrees.cp * degrees.dp
        update_s = OPTIMIZER_PASSES * num_bytes / cluster.device.memory_bytes_per_s
        if peers == 1 or degrees.fsdp:
            return update_s
        link = cluster.intra if peers * degrees.tp <= cluster.devices_per_node else cluster.inter
        return update_s + 2 * ring_s(num_bytes, peers, link)


@cache
def _flights(schedule: ScheduleKind, num_microbatches: int, most: int, last: bool) -> Index:
    """Return the number of microbatches in flight of a chain's last stage, the one before it, and so on, [most].

    The chain ends with the loss if `last`, else at least one stage before it. 1F1B: `[1, 2, 3]` if `last`, else `[2, 3, 4]`.
    """
    depths = range(0 if last else 1, most + (0 if last else 1))
    return np.array([in_flight(schedule, depth, num_microbatches) for depth in depths])


def _undominated(ranks: Index, first: Array, second: Array) -> Index:
    """Return the indices of the options that no other beats, by rising ranks; `first` and `second` are two costs of each option.

    An option is beaten by one with no more ranks and neither cost higher; of equal ones the first is kept.
    """
    order = np.lexsort((second, first, ranks))
    kept: list[int] = []
    # The options kept so far that none beats: rising in the first cost, falling in the second.
    rising: list[float] = []
    falling: list[float] = []
    for index, one, other in zip(order.tolist(), first[order].tolist(), second[order].tolist(), strict=True):
        place = bisect_right(rising, one)
        if place and falling[place - 1] <= other:
            continue
        kept.append(index)
        start = place - 1 if place and rising[place - 1] == one else place
        end = place
        while end < len(rising) and falling[end] >= other:
            end += 1
        rising[start:end] = [one]
        falling[start:end] = [other]
    return np.array(kept, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class JoinedEncoders:
    """Joint options, each of one option (degrees and stage count) for every encoder, as arrays [combinations]."""

    chosen: Index
    """Entry [n, e]: index of encoder e's option in joint option n, [combinations, encoders]."""
    ranks: Index
    slowest_s: Array
    path_s: Array
    """Seconds of the longest path through encoders, forward and backward, [combinations]."""
    before_s: Array
    """Least seconds of a microbatch's encoder forwards before the last chain plus encoder backwards after it, [combinations]."""
    tail_s: Array

    @classmethod
    def of(
        cls, chains: ChainSet, options: Sequence[Options], schedule: ScheduleKind, *, everything: bool
    ) -> JoinedEncoders:
        """Return the joint options of encoders from those of each: all if `everything`, else only those that no other beats."""
        zero = np.zeros(1)
        chosen = np.zeros((1, 0), dtype=np.int64)
        ranks, slowest_s, tail_s = np.zeros(1, dtype=np.int64), zero, zero
        times = [own.path_s for own in options]
        bound = _Bound.of(chains, options)
        for chain, own in enumerate(options):
            # What is beaten among its own options is beaten in every combination, where others of its balance group allow both.
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
    """Constraint on the numbers of replicas of encoders: equal for all encoders of a group."""

    replicas: tuple[Index, ...]
    """Number of replicas in each option of each encoder, one array [options] each; 0 where it need not match other encoders."""
    groups: tuple[tuple[int, ...], ...]
    """Indices of the encoders in each group that must have equal numbers of replicas; groups of one are left out."""

    @classmethod
    def of(cls, chains: ChainSet, options: Sequence[Options]) -> _Bound:
        groups = tuple(group for group in balance_groups_of(chains) if len(group) > 1)
        several = {chain for group in groups for chain in group}
        return cls(
            replicas=tuple(
                np.array([degrees.dp * (chain in several) for degrees in own.degrees], dtype=np.int64)[own.which]
                for chain, own in enumerate(options)
            ),
            groups=groups,
        )

    def chosen(self, joined: Index) -> Index:
        """Return the number of replicas of each encoder in each combination, [combinations, encoders].

        `joined` has the same shape and the index of each encoder's option.
        """
        columns = [self.replicas[chain][joined[:, chain]] for chain in range(joined.shape[1])]
        return np.stack(columns, axis=1)

    def allowed(self, joined: Index) -> NDArray[np.bool_]:
        """Return for each row of `joined` (encoders' option indices) if the last has as many replicas as others of its group."""
        newest, found = joined.shape[1] - 1, self.chosen(joined)
        before = [chain for group in self.groups if newest in group for chain in group if chain < newest]
        return (found[:, before] == found[:, newest : newest + 1]).all(axis=1)


def _undominated_each(kinds: Index, ranks: Index, first: Array, second: Array) -> Index:
    """Apply `_undominated` to each kind of option separately, and return the indices of all kept options, kind by kind.

    Options are of one kind if their rows of `kinds` [options, columns] are equal.
    """
    if not kinds.any():
        return _undominated(ranks, first, second)
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    groups = [np.flatnonzero(kind == number) for number in range(int(kind.max()) + 1)]
    return np.concatenate([group[_undominated(ranks[group], first[group], second[group])] for group in groups])


def _path(chains: ChainSet, times: Sequence[Array], chosen: NDArray[np.int64], *, first: bool) -> Array:
    # Chains are in topological order. With `first`, only edges into a chain's first layer count.
    longest: list[Array] = [np.zeros(len(chosen))]
    last = len(chains.chains) - 1
    edges = [edge for edge in chains.edges if edge.source != edge.target and not (first and edge.target_layer)]
    for chain in range(chosen.shape[1]):
        before = [longest[edge.source + 1] for edge in edges if edge.target == chain]
        longest.append(times[chain][chosen[:, chain]] + (np.max(before, axis=0) if before else 0.0))
    ends = {edge.source for edge in edges if edge.target == last} if first else range(len(longest) - 1)
    return np.max([longest[0], *(longest[chain + 1] for chain in ends if chain < len(longest) - 1)], axis=0)
