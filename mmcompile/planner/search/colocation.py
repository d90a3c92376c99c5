"""Fewer devices than chains: each chain is one stage, and stages share ranks."""

from __future__ import annotations

from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.candidate import Candidate, assemble
from mmcompile.planner.search.problem import Problem
from mmcompile.planner.search.settings import Degrees, Setting


def dealt(problem: Problem, chains: ChainSet, setting: Setting) -> Candidate:
    """Chains dealt to devices, longest first to the least loaded.

    The rank of the loss comes last, the others in the order of their first chain.

    Args:
        setting: with one replica.
    """
    last = len(chains.chains) - 1
    priced = [problem.priced(chain, Degrees(), setting) for chain in chains.chains]
    totals = [float(own.total_s[-1]) for own in priced]
    load = [0.0] * problem.num_devices
    device_of: dict[int, int] = {}
    for index in sorted(range(len(totals)), key=lambda index: (-totals[index], index)):
        device = min(range(len(load)), key=lambda d: (load[d], d))
        load[device] += totals[index]
        device_of[index] = device
    in_order = dict.fromkeys(device_of[index] for index in range(last + 1))
    ranks = {
        device: rank for rank, device in enumerate([*(d for d in in_order if d != device_of[last]), device_of[last]])
    }
    return assemble(
        problem,
        chains,
        setting,
        [Degrees()] * len(totals),
        [((0, len(chain.layers)),) for chain in chains.chains],
        [(ranks[device_of[index]],) for index in range(last + 1)],
    )
