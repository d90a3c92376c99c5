"""`dflop`: one (tp, pp, dp) for the encoders, one for the language model, and a microbatch count, by mean work.

All devices are used (Eq. 3). A stage has an equal part of its module; a step is taken to last

    T = (N_mb + E_pp + L_pp - 1) max(E_dur, L_dur)

with the durations of the mean microbatch. Memory by Eq. 4-5: an encoder stage keeps the activations of E_pp + L_pp
microbatches, a language-model stage those of L_pp. The argmin over all of these is Algorithm 1; its candidate is cut into
equal numbers of layers. Where its memory model is too kind for ours, the next best is taken.

Differences: microbatch counts are divisors of a replica's samples, and replicas divide or multiply each other, so that
the global batch is shared evenly; durations are those of our costs, by the mean microbatch; recomputation is one more choice.

Source: DFLOP §3.3, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.combinations import Combinations
from mmcompile.planner.search.options import Array, Index
from mmcompile.planner.search.partition import equal_ranges
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting

_MAX_TRIED = 64
"""Number of configurations, best by DFLOP's estimate, that are checked by our memory model."""


@dataclass(frozen=True, kw_only=True)
class _Module:
    """Possible degrees of one module (all encoders, or the language model), with seconds and bytes as arrays [configurations]."""

    degrees: tuple[Degrees, ...]
    which: Index
    pp: Index
    ranks: Index
    duration_s: Array
    """Seconds of one stage, all stages being equal, [configurations]."""
    state_bytes: Array
    """Bytes of one stage's parameters, gradients and optimizer state, [configurations]."""
    saved_bytes: Array
    """Bytes of one stage's activations of the mean microbatch, [configurations]."""

    @classmethod
    def of(cls, degrees: tuple[Degrees, ...], table: NDArray[Any]) -> _Module:
        """Return the configurations from an array [6, configurations] whose rows are the fields after `degrees`, in order."""
        which, pp, ranks = table[:3].astype(np.int64)
        duration_s, state_bytes, saved_bytes = table[3:]
        return cls(
            degrees=degrees,
            which=which,
            pp=pp,
            ranks=ranks,
            duration_s=duration_s,
            state_bytes=state_bytes,
            saved_bytes=saved_bytes,
        )

    def take(self, chosen: NDArray[np.bool_]) -> _Module:
        columns = (self.which, self.pp, self.ranks, self.duration_s, self.state_bytes, self.saved_bytes)
        return _Module.of(self.degrees, np.stack(columns)[:, chosen])


def dflop(problem: Problem) -> Sequence[Candidate]:
    """Return the candidate of DFLOP's Algorithm 1; an empty sequence without encoders or if no configuration fits the memory."""
    pairs = [chains for chains in problem.sets if len(chains.chains) == 2]
    if not pairs:
        return ()
    chains = pairs[0]
    found = sorted(_configurations(problem, chains), key=lambda each: each.guess_s)
    for each in found[:_MAX_TRIED]:
        parts = [equal_ranges(0, len(chain.layers), pp) for chain, pp in zip(chains.chains, each.counts, strict=True)]
        candidate = assemble(problem, chains, each.setting, each.degrees, parts)
        if max(candidate.rank_bytes) <= problem.memory_bytes(candidate.num_ranks):
            return (candidate,)
    return ()


def _configurations(problem: Problem, chains: ChainSet) -> Iterator[Combination]:
    """Yield the best few configurations of encoders and language model for each setting."""
    combos = Combinations(problem=problem)
    limit = problem.memory_bytes(1)
    modules: dict[tuple[object, ...], _Module] = {}

    def module(chain: ChainSpec, setting: Setting, choices: tuple[Degrees, ...]) -> _Module:
        drawn = (setting.num_microbatches, setting.dp) if chain is chains.chains[-1] else ()
        key = (chain, choices, setting.samples * setting.dp, setting.recompute, drawn)
        if key not in modules:
            modules[key] = _module(problem, chain, setting, choices)
        return modules[key]

    for setting in combos.settings:
        setting = replace(setting, schedule="1f1b" if "1f1b" in problem.space.schedules else setting.schedule)
        encoder = module(chains.chains[0], setting, tuple(combos.degrees(chains.chains[0], setting, last=False)))
        language = module(chains.chains[1], setting, tuple(combos.degrees(chains.chains[1], setting, last=True)))
        # Of each, the configurations that some configuration of the other makes up to all devices.
        encoder, language = (
            encoder.take(np.isin(problem.num_devices - encoder.ranks, language.ranks)),
            language.take(np.isin(problem.num_devices - language.ranks, encoder.ranks)),
        )
        depth = encoder.pp[:, None] + language.pp[None, :]
        slowest_s = np.maximum(encoder.duration_s[:, None], language.duration_s[None, :])
        makespan_s = (setting.num_microbatches + depth - 1) * slowest_s
        fits = encoder.ranks[:, None] + language.ranks[None, :] == problem.num_devices
        fits &= encoder.state_bytes[:, None] + depth * encoder.saved_bytes[:, None] <= limit
        fits &= (language.state_bytes + language.pp * language.saved_bytes <= limit)[None, :]
        rows, columns = np.nonzero(fits)
        for index in np.argsort(makespan_s[rows, columns], kind="stable")[:8].tolist():
            row, column = int(rows[index]), int(columns[index])
            yield Combination(
                chains=chains,
                guess_s=float(makespan_s[row, column]),
                setting=setting,
                degrees=(encoder.degrees[encoder.which[row]], language.degrees[language.which[column]]),
                counts=(int(encoder.pp[row]), int(language.pp[column])),
            )


def _module(problem: Problem, chain: ChainSpec, setting: Setting, choices: tuple[Degrees, ...]) -> _Module:
    fixed = problem.stages.get(chain.name)
    columns: list[NDArray[Any]] = []
    for which, degrees in enumerate(choices):
        most = min(len(chain.layers), (problem.num_devices - 1) // degrees.ranks)
        pp = np.arange(1, most + 1) if fixed is None else np.arange(fixed, min(fixed, most) + 1)
        priced = problem.prices.priced(chain, degrees, setting)
        state = float(priced.state_bytes[-1])
        stage = np.array([[float(priced.total_s[-1])], [state], [float(priced.saved_bytes[-1])]]) / pp
        columns.append(np.stack([np.full(len(pp), which), pp, pp * degrees.ranks, *stage]))
    return _Module.of(choices, np.concatenate(columns, axis=1))
