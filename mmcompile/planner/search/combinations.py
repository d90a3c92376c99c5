"""`Combinations`: every combination of settings, degrees and stage counts that may be worth splitting, with a bound and a guess.

With M microbatches, a combination's step takes at least `bound` and about `guess` seconds (after Entrain's Eq. 4.2):

    bound = max(M slowest, path of the encoders + r T / (1 - (1 - r / (M - 1 + r))^S))
    guess = path + (M - 1) slowest (1 + a spread sqrt(ln stages)) + tail

`slowest` is the slowest stage's time for one microbatch, `path` the time of one microbatch through all stages, `tail` the time
after the last backward. `spread` is the standard deviation of the microbatches' tokens over their mean: stages wait for the
largest of about as many microbatches as there are stages, with a = `_SPREAD_COST` [Empirical, by the simulator]. T is the last
chain's time for one microbatch in S stages, r the part of it that stages upstream wait for (1 but for ZB-H1). The second bound
holds as a stage of the last chain ends no sooner than r times the time of all stages before it plus M - 1 + r times its own; the
last of these ends is earliest if T is divided so that all stages end at once.

Where combinations are few, all are listed. Else an option (degrees and stage count) of an encoder is left out if another needs no
more ranks and is no slower, and each option of the last chain is combined only with the encoder options of the best guesses.

Source: dissertation of Oobleck / Cornstarch / Entrain, §4.4.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from mmcompile.config import ScheduleKind
from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.pricing.priced_chain import PricedChain
from mmcompile.planner.search.options import Array, Index, JoinedEncoders, Options, OptionTables
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting

MAX_LISTED = 4000
"""Number of combinations up to which every one is listed."""
# Share of the largest microbatch's excess seconds over the mean one that a guess counts as waiting of stages. [Empirical]
_SPREAD_COST = 0.4
# Number of pairs (chain set, setting) up to which every pair is listed.
_MAX_PAIRS = 64
# Largest ratio to the least guess of a step at which a pair (chain set, setting) is kept, if there are too many pairs.
_NEAR = 1.3
# Number of encoder options (degrees and stage count) combined with each option of the last chain when not all are listed.
_KEPT = 2
# Number of combinations, best guess first, kept of each pair (chain set, setting) when not all are listed.
_KEPT_EACH = 48


@dataclass(frozen=True, kw_only=True)
class CombinationGroup:
    """Combinations of the chains' options (degrees and stage count) that share a chain set and a setting, as arrays."""

    chains: ChainSet
    setting: Setting
    options: tuple[Options, ...]
    """Possible degrees and stage counts ("options") of each chain, in the order of the chain set."""
    chosen: Index
    """Entry [n, c]: index into `options[c]` of chain c's degrees and stage count in combination n, [combinations, chains]."""
    ranks: Index
    bound_s: Array
    guess_s: Array

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: int) -> Combination:
        options = list(zip(self.options, self.chosen[index], strict=True))
        return Combination(
            chains=self.chains,
            setting=self.setting,
            degrees=tuple(own.degrees[own.which[option]] for own, option in options),
            counts=tuple(int(own.stages[option]) for own, option in options),
            guess_s=float(self.guess_s[index]),
        )


@dataclass(frozen=True, kw_only=True)
class Combinations:
    """Listing of a problem's combinations of degrees and stage counts, with bounds and guesses of their seconds."""

    problem: Problem
    listed: list[bool] = field(default_factory=list)
    """One entry for each call of `groups`: True if every combination was listed."""
    left_out: list[float] = field(default_factory=list)
    """Lower bounds in s of the pairs (chain set, setting) that `groups` did not list."""
    _joined: dict[tuple[ChainSet | Options, ...], JoinedEncoders] = field(default_factory=dict, repr=False)

    def groups(self) -> list[CombinationGroup]:
        """Return all listed combinations of degrees and stage counts, one group for each chain set and setting that has any."""
        self._price()
        prepared = [(chains, setting, self._options(chains, setting)) for chains, setting in self._promising()]
        number = sum(prod(map(len, options)) for _, _, options in prepared) + len(self.left_out) * MAX_LISTED
        self.listed.append(number <= MAX_LISTED)
        found = [
            self._group(chains, setting, options, everything=number <= MAX_LISTED)
            for chains, setting, options in prepared
            if all(map(len, options))
        ]
        return [group for group in found if len(group)]

    @cached_property
    def tables(self) -> OptionTables:
        """Cache of the options (possible degrees and stage counts) of each chain."""
        return OptionTables(problem=self.problem)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Choices for a whole plan (microbatches, replicas, recomputation), to combine with chains' degrees and stage counts."""
        return tuple(_settings(self.problem, _primary(self.problem.space.schedules)))

    def max_ranks(self, chains: ChainSet) -> int:
        """Return the most ranks of a candidate: the number of devices; on one machine also more, if the request needs more."""
        least = self.problem.least_ranks(chains, min(self.problem.space.cp))
        return max(self.problem.num_devices, least if self.problem.cluster.is_local else 0)

    def _promising(self) -> list[tuple[ChainSet, Setting]]:
        pairs = [
            (chains, setting)
            for chains in self.problem.sets
            for setting in self.settings
            if self.problem.decided[chains][-1] in (None, setting.dp)
        ]
        if len(pairs) <= _MAX_PAIRS:
            return pairs
        looks = [self._look(chains, setting) for chains, setting in pairs]
        limit_s = max(_NEAR * min(guess_s for guess_s, _ in looks), sorted(guess_s for guess_s, _ in looks)[_MAX_PAIRS])
        for guess_s, bound_s in looks:
            if guess_s > limit_s:
                self.left_out.append(bound_s)
        return [pair for pair, (guess_s, _) in zip(pairs, looks, strict=True) if guess_s <= limit_s]

    def _look(self, chains: ChainSet, setting: Setting) -> tuple[float, float]:
        """Return the least guess and a lower bound of a training step's seconds, from the last chain alone.

        The guess assumes that the chain has all devices and that its stages take equal time.
        """
        last, count = chains.chains[-1], setting.num_microbatches
        found: list[tuple[float, float]] = [(inf, inf)]
        for degrees in self.degrees(last, setting, last=True):
            stages = min(self.max_ranks(chains) // degrees.ranks, len(last.layers))
            if stages:
                priced = self.problem.prices.priced(last, degrees, setting)
                total_s = float(priced.total_s[-1])
                limit = stages * self.problem.memory_bytes(1)
                if priced.held_bytes(stages, 1) > limit:
                    continue
                tight = priced.held_bytes(stages, count) > limit
                guess_s = inf if tight else even_guess_s(self.problem, [priced], setting, stages)
                found.append((guess_s, float(_in_turn(setting, total_s, priced.waited, stages))))
        return min(guess_s for guess_s, _ in found), min(bound_s for _, bound_s in found)

    def _price(self) -> None:
        chains = {
            (chain, decided): chain is each.chains[-1]
            for each in self.problem.sets
            for chain, decided in zip(each.chains, self.problem.decided[each], strict=True)
        }
        for (chain, decided), last in chains.items():
            self.problem.prices.price(
                chain,
                [
                    (degrees, setting)
                    for setting in self.settings
                    for degrees in self.degrees(chain, setting, last=last, decided=decided)
                ],
            )

    def _options(self, chains: ChainSet, setting: Setting) -> tuple[Options, ...]:
        most = self.max_ranks(chains) - len(chains.chains) + 1
        found: list[Options] = []
        for chain, decided in zip(chains.chains, self.problem.decided[chains], strict=True):
            last = chain is chains.chains[-1]
            fixed = self.problem.stages.get(chain.name)
            counts = range(1, len(chain.layers) + 1) if fixed is None else range(fixed, fixed + 1)
            choices = tuple(self.degrees(chain, setting, last=last, decided=decided))
            found.append(self.tables.options(chain, setting, choices, counts, most, last=last))
        return tuple(found)

    def degrees(
        self, chain: ChainSpec, setting: Setting, *, last: bool, decided: int | None = None
    ) -> Iterator[Degrees]:
        """Yield the parallel degrees that a chain may have.

        Args:
            last: True for the last chain, which has the replicas of the setting.
            decided: number of replicas that the request fixes for a chain other than the last; None: all possible numbers.
        """
        shares = self.problem.tensor_degrees(chain)
        if last:
            fsdp = self.problem.shares_parameters(chain, setting.dp)
            for tp in shares:
                yield from (Degrees(tp=tp, cp=cp, dp=setting.dp, fsdp=fsdp) for cp in self.problem.space.cp)
            return
        for dp in self._replicas(setting) if decided is None else (decided,):
            fsdp = self.problem.shares_parameters(chain, dp)
            yield from (Degrees(tp=tp, dp=dp, fsdp=fsdp) for tp in shares)

    def _replicas(self, setting: Setting) -> list[int]:
        """Return the numbers of replicas that an encoder may have: divisors of the samples of a microbatch over all replicas.

        Each is also a divisor or a multiple of the last chain's number of replicas.
        """
        if self.problem.space.dp == (1,):
            return [1]
        slot = round(setting.dp * setting.samples)
        return [
            dp
            for dp in range(1, min(slot, self.problem.num_devices) + 1)
            if slot % dp == 0 and (setting.dp % dp == 0 or dp % setting.dp == 0)
        ]

    def _group(
        self, chains: ChainSet, setting: Setting, options: tuple[Options, ...], *, everything: bool
    ) -> CombinationGroup:
        key = (chains, *options[:-1])
        if key not in self._joined:
            self._joined[key] = JoinedEncoders.of(chains, options[:-1], setting.schedule, everything=everything)
        encoders = self._joined[key]
        last = options[-1]
        limit = self.max_ranks(chains)
        ranks = encoders.ranks[None, :] + last.ranks[:, None]
        slowest_s = np.maximum(encoders.slowest_s[None, :], last.slowest_s[:, None])
        uneven = unevenness(self.problem, setting, last.stages + len(chains.chains) - 1)
        guess_s = ((setting.num_microbatches - 1) * uneven)[:, None] * slowest_s
        guess_s += encoders.path_s[None, :] + (last.path_s - last.late_s * (setting.schedule == "zb-h1"))[:, None]
        guess_s += np.maximum(encoders.tail_s[None, :], last.tail_s[:, None])
        fits = ranks <= limit
        rows, columns = np.nonzero(fits) if everything else _best(np.where(fits, guess_s, np.inf))
        return CombinationGroup(
            chains=chains,
            setting=setting,
            options=options,
            chosen=np.concatenate([encoders.chosen[columns], rows[:, None]], axis=1),
            ranks=ranks[rows, columns],
            bound_s=np.maximum(
                setting.num_microbatches * slowest_s[rows, columns],
                encoders.before_s[columns] + _in_turn(setting, last.path_s, last.waited, last.stages)[rows],
            ),
            guess_s=guess_s[rows, columns],
        )


def unevenness(problem: Problem, setting: Setting, stages: Index | int) -> Array:
    """Return the factor, 1 or more, by which waiting for the largest microbatch lengthens a mean one, with `stages` stages."""
    return np.asarray(1.0 + _SPREAD_COST * problem.prices.spread(setting) * np.sqrt(np.log(stages)))


def even_guess_s(problem: Problem, priced: Sequence[PricedChain], setting: Setting, stages: int) -> float:
    """Return the guess of a step in s if chains fill `stages` stages of equal time; 1000 times it if memory looks too small."""
    count = setting.num_microbatches
    tight = sum(own.held_bytes(stages, count) for own in priced) > stages * problem.memory_bytes(1)
    uneven = float(unevenness(problem, setting, stages))
    each_s = sum(float(own.total_s[-1]) for own in priced)
    return (1000.0 if tight else 1.0) * each_s * (1.0 + (count - 1) * uneven / stages)


def _in_turn(
    setting: Setting, total_s: Array | float, waited: Array | float, stages: Index | int
) -> NDArray[np.float64]:
    """Return a lower bound in s of a training step, however the last chain is split into `stages` stages.

    A stage ends no sooner than one microbatch has passed all stages before it and the stage has run all microbatches. `total_s`
    is the seconds of one microbatch in all stages. `waited` is the least share, 0..1, of a layer's time that is not weight
    gradient: under ZB-H1, other stages wait for that share only.
    """
    share = np.maximum(waited, 1e-3) if setting.schedule == "zb-h1" else np.ones_like(waited)
    each = share / (setting.num_microbatches - 1 + share)
    return share * total_s / (1.0 - (1.0 - each) ** stages)


def _best(guess_s: Array) -> tuple[Index, Index]:
    count = min(_KEPT, guess_s.shape[1])
    if not count:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    columns = np.argpartition(guess_s, count - 1, axis=1)[:, :count]
    rows = np.repeat(np.arange(len(guess_s)), count)
    columns = columns.ravel()
    values = guess_s[rows, columns]
    order = np.argsort(values, kind="stable")[:_KEPT_EACH]
    order = order[np.isfinite(values[order])]
    return rows[order], columns[order]


def _primary(schedules: Sequence[ScheduleKind]) -> ScheduleKind:
    # ZB-H1 is never slower than 1F1B and holds no more activations.
    order: Mapping[ScheduleKind, int] = {"zb-h1": 0, "1f1b": 1, "eager-1f1b": 2, "gpipe": 3}
    return min(schedules, key=order.__getitem__)


def _settings(problem: Problem, schedule: ScheduleKind) -> Iterator[Setting]:
    space, batch = problem.space, problem.global_batch
    if batch is None:
        steps = [(dp, count) for dp in space.dp or (1,) for count in space.microbatches or (1,)]
    else:
        replicas = [dp for dp in _divisors(batch, space.dp) if dp <= problem.num_devices]
        steps = [(dp, count) for dp in replicas for count in _divisors(batch // dp, space.microbatches)]
    for recompute in space.recomputes:
        for dp, count in steps:
            samples = problem.graph.num_samples if batch is None else batch / dp / count
            yield Setting(num_microbatches=count, samples=samples, dp=dp, schedule=schedule, recompute=recompute)


def _divisors(number: int, allowed: Sequence[int] | None) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0 and (allowed is None or size in allowed)]
