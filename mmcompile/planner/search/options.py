"""Options of a chain for all degrees and stage counts at once: bounds in arrays, before anything is split.

Take `S` stages and the `n` alike layers that most of a chain is made of (its body). The stage count is possible only if the
memory holds the body, `cap(k)` layers of it at most in the k-th stage from the loss; and the slowest stage takes at least

    max(total / S, slowest layer, h * body layer),    h = least with sum over k <= S of min(h, cap(k)) >= n

Exact splits (`mmcompile.planner.search.splitter`) are no faster, and fit only where these allow it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.comm import ring_s
from mmcompile.planner.pricing.chains import ChainSpec
from mmcompile.planner.pricing.priced_chain import OPTIMIZER_PASSES, PricedChain
from mmcompile.planner.schedule.schedule import in_flight
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options of one chain [options]."""

    degrees: tuple[Degrees, ...]
    which: Index
    """Index into `degrees`."""
    stages: Index
    ranks: Index
    """Number of ranks of all replicas."""
    slowest_s: Array
    """Lower bound of the slowest stage's seconds, over all splits."""
    path_s: Array
    """Seconds of one microbatch through all stages, forward and backward."""
    late_s: Array
    """Part of `path_s` that is weight gradients."""
    waited: Array
    """Least share, 0..1, of a stage's time that is not weight gradients."""
    tail_s: Array
    """Rough seconds after the last backward: reduction over replicas and the optimizer's step."""

    def __len__(self) -> int:
        return len(self.which)

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> Options:
        """Return some of the options."""
        return Options(
            degrees=self.degrees,
            which=self.which[chosen],
            stages=self.stages[chosen],
            ranks=self.ranks[chosen],
            slowest_s=self.slowest_s[chosen],
            path_s=self.path_s[chosen],
            late_s=self.late_s[chosen],
            waited=self.waited[chosen],
            tail_s=self.tail_s[chosen],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TooBig:
    """Stages that exceed the memory."""

    text: str
    chain: str
    limit_bytes: int
    number: int = 1
    """Number of combinations, or of stage counts of one chain."""


@dataclass(frozen=True, kw_only=True)
class OptionTables:
    """Makes options, each bound computed once."""

    problem: Problem
    too_big: dict[str, TooBig] = field(default_factory=dict, repr=False)
    """Options left out, by their text."""
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
        """Return all degrees and stage counts of a chain that the memory may hold. Equal arguments give the same object.

        Args:
            counts: numbers of stages to choose from.
            max_ranks: most ranks of all its stages and replicas.
            last: the chain ends in the loss; others are at least one stage away from it.
        """
        slot = setting.samples * setting.dp  # all that other settings of the same slot could change
        key = (
            chain,
            setting.schedule,
            setting.recompute,
            setting.num_microbatches,
            slot,
            choices,
            counts,
            max_ranks,
        )
        if key not in self._known:
            self._known[key] = self._options(chain, setting, choices, counts, max_ranks, last=last)
        return self._known[key]

    def _options(
        self,
        chain: ChainSpec,
        setting: Setting,
        choices: tuple[Degrees, ...],
        counts: range,
        max_ranks: int,
        *,
        last: bool,
    ) -> Options:
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
        return Options(
            degrees=tuple(kept),
            which=which,
            stages=stages,
            ranks=ranks,
            slowest_s=columns[3],
            path_s=columns[4],
            late_s=columns[5],
            waited=columns[6],
            tail_s=columns[7],
        )

    def _note(self, chain: ChainSpec, setting: Setting, degrees: Degrees, counts: Index) -> None:
        again = setting.recompute if setting.recompute != "none" else ""
        words = ", ".join(filter(None, (str(degrees), f"recompute {again}" if again else "")))
        text = f"{chain.name} {counts.max()}" + (f" ({words})" if words else "")
        limit = self.problem.memory_bytes(1)
        self.too_big.setdefault(text, TooBig(text=text, chain=chain.name, limit_bytes=limit, number=len(counts)))

    def slowest(self, priced: PricedChain, setting: Setting, most: int, *, last: bool) -> Array:
        """Return the least seconds of the slowest of 1, 2, ... stages, [most]; infinite where the memory cannot hold them."""
        flights = min(setting.num_microbatches, 2 * most + 1)
        key = (priced, setting.schedule, flights, most, last)
        if key not in self._slowest:
            self._slowest[key] = self._computed(priced, setting, most, last)
        return self._slowest[key]

    def _computed(self, priced: PricedChain, setting: Setting, most: int, last: bool) -> Array:
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
        return np.where(np.isinf(least), np.inf, np.maximum(np.maximum(even, priced.slowest_s), least * body.seconds))

    def _tail(self, priced: PricedChain, degrees: Degrees) -> float:
        """Return rough seconds after the last backward if all layers were one stage's."""
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
    """Return the least microbatches in flight in the 1st, 2nd, ... stage from the end of a chain, [most]."""
    depths = range(0 if last else 1, most + (0 if last else 1))
    return np.array([in_flight(schedule, depth, num_microbatches) for depth in depths])


def undominated(ranks: Index, first: Array, second: Array) -> Index:
    """Return options that no other with as few ranks beats in both costs; the first of equals. In order of ranks."""
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
