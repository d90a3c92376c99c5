"""`dflop`: one (tp, pp, dp) for the encoders, one for the language model, and a microbatch count, by mean work.

All devices are used (Eq. 3). A stage has an equal part of its module; the time of a step is estimated as

    T = (N_mb + E_pp + L_pp - 1) max(E_dur, L_dur)

with N_mb microbatches, pp stages and dur seconds of one stage for the mean microbatch, of the encoders (E) and of the language
model (L). Memory is by Eq. 4-5: an encoder stage keeps the activations of E_pp + L_pp microbatches, a language-model stage those
of L_pp. Algorithm 1 takes the configuration with the least T, cut into equal numbers of layers. Where that exceeds the memory by
our model, the next best is taken.

Differences: microbatch counts are divisors of a replica's samples, and replicas divide or multiply each other, so that
the global batch is shared evenly; durations are those of our costs, by the mean microbatch; recomputation is one more choice.

Source: DFLOP §3.3, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mmcompile.planner.pricing.chains import ChainSet, ChainSpec
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.combinations import Combinations
from mmcompile.planner.search.options import Array
from mmcompile.planner.search.partition import equal_ranges
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Combination, Degrees, Setting

# Number of configurations, best by DFLOP's estimate, that are checked by our memory model.
_MAX_TRIED = 64


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
        if candidate.fits:
            return (candidate,)
    return ()


def _configurations(problem: Problem, chains: ChainSet) -> Iterator[Combination]:
    """Yield the 8 fastest configurations, by DFLOP's estimate, for each choice of microbatches, replicas and recomputation.

    All use every device and fit DFLOP's memory model.
    """
    combos, devices, limit = Combinations(problem=problem), problem.num_devices, problem.memory_bytes(1)
    known: dict[tuple[object, ...], Array] = {}

    def table(chain: ChainSpec, setting: Setting, choices: tuple[Degrees, ...]) -> Array:
        drawn = (setting.num_microbatches, setting.dp) if chain is chains.chains[-1] else ()
        key = (chain, choices, setting.samples * setting.dp, setting.recompute, drawn)
        if key not in known:
            known[key] = _table(problem, chain, setting, choices)
        return known[key]

    for setting in combos.settings:
        setting = replace(setting, schedule="1f1b" if "1f1b" in problem.space.schedules else setting.schedule)
        first, second = (tuple(combos.degrees(c, setting, last=c is chains.chains[-1])) for c in chains.chains)
        encoder, language = table(chains.chains[0], setting, first), table(chains.chains[1], setting, second)
        # Of each, the configurations that some configuration of the other makes up to all devices.
        which, pp, ranks, stage_s, state, saved = encoder[:, np.isin(devices - encoder[2], language[2]), None]
        last, last_pp, last_ranks, last_s, last_state, last_saved = language[
            :, np.isin(devices - language[2], encoder[2])
        ]
        depth = pp + last_pp
        makespan_s = (setting.num_microbatches + depth - 1) * np.maximum(stage_s, last_s)
        fits = (ranks + last_ranks == devices) & (state + depth * saved <= limit)
        fits &= last_state + last_pp * last_saved <= limit
        rows, columns = np.nonzero(fits)
        for index in np.argsort(makespan_s[rows, columns], kind="stable")[:8].tolist():
            row, column = int(rows[index]), int(columns[index])
            yield Combination(
                chains=chains,
                guess_s=float(makespan_s[row, column]),
                setting=setting,
                degrees=(first[int(which[row, 0])], second[int(last[column])]),
                counts=(int(pp[row, 0]), int(last_pp[column])),
            )


def _table(problem: Problem, chain: ChainSpec, setting: Setting, choices: tuple[Degrees, ...]) -> Array:
    """Return the possible degrees and stage counts of a module, one pair in each column, [6, pairs].

    A module is all encoders, or the language model. Rows: index into `choices`, stages, ranks, then of one of the equal stages:
    seconds, bytes of parameters, gradients and optimizer state, and bytes of the mean microbatch's activations.
    """
    fixed = problem.stages.get(chain.name)
    columns: list[Array] = []
    for which, degrees in enumerate(choices):
        most = min(len(chain.layers), (problem.num_devices - 1) // degrees.ranks)
        pp = np.arange(1, most + 1) if fixed is None else np.arange(fixed, min(fixed, most) + 1)
        priced = problem.prices.priced(chain, degrees, setting)
        stage = np.array([[priced.total_s[-1]], [priced.state_bytes[-1]], [priced.saved_bytes[-1]]]) / pp
        columns.append(np.stack([np.full(len(pp), which), pp, pp * degrees.ranks, *stage], dtype=np.float64))
    return np.concatenate(columns, axis=1)
