"""Search: devices, sharding and replicas of each chain, judged by the simulator.

A strategy proposes candidates of a problem; `mmcompile.planner.search.branch_and_bound` decides between them, and
`mmcompile.planner.search.outcome` writes the plan.

Source: exact splits over frozen-aware costs, Oobleck / Cornstarch / Entrain dissertation §3.4.1; expected makespan over
the data, DFLOP §3.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmcompile.errors import ConfigError
from mmcompile.planner.pricing.chains import ChainSet
from mmcompile.planner.search.branch_and_bound import BranchAndBound
from mmcompile.planner.search.build_problem import named_counts, needs_sharing
from mmcompile.planner.search.candidate import Candidate, Strategy, assemble
from mmcompile.planner.search.problem import Problem, balance_groups_of, decided_replicas
from mmcompile.planner.search.settings import Degrees, Setting
from mmcompile.planner.strategies.baselines import BASELINES
from mmcompile.planner.strategies.dflop import dflop
from mmcompile.planner.strategies.entrain import entrain
from mmcompile.planner.strategies.loosely_coupled import loosely_coupled

AUTO = "auto"
"""Name of our search `auto`, which includes the candidates of all other strategies."""

STRATEGIES: Mapping[str, Strategy] = {
    "loosely-coupled": loosely_coupled,
    "dflop": dflop,
    "entrain": entrain,
    **BASELINES,
}
"""Strategy name -> strategy. `auto` is absent, as it includes all of them."""


def strategy_of(name: str) -> Strategy:
    """Return the strategy with a name. An unknown name raises ConfigError, which lists the valid names."""
    if name not in STRATEGIES:
        raise ConfigError(f"no strategy {name!r}; choose one of {', '.join((AUTO, *STRATEGIES))}")
    return STRATEGIES[name]


def searched(problem: Problem, strategy: str | Strategy = AUTO) -> tuple[BranchAndBound, Candidate | None]:
    """Run a strategy: return the search with all judged candidates, and the fastest one, None if no candidate fits the memory.

    Args:
        strategy: name of a strategy, or a function that proposes candidates.

    Raises:
        ConfigError: unknown name, placement `disjoint` needed but not allowed, or no candidate with the requested replicas.
    """
    engine = BranchAndBound(problem=problem)
    apart = any(not chains.colocated for chains in problem.sets)
    if strategy != AUTO:
        propose = strategy_of(strategy) if isinstance(strategy, str) else strategy
        strategy = strategy if isinstance(strategy, str) else strategy.__name__
        if not apart:
            raise ConfigError(
                f"strategy {strategy} begins with chains on ranks of their own; allow placement 'disjoint'"
            )
        proposed = list(propose(problem))
        for candidate in proposed:
            if _keeps_replicas(problem, candidate):
                engine.judge([candidate], strategy)
        if proposed and not engine.judged:
            raise ConfigError(
                f"strategy {strategy} decides replicas itself, and found none with {named_counts(problem.replicas)}; ask for "
                "other replicas, or take strategy auto"
            )
        return engine, engine.best()
    for chains in problem.sets:
        if needs_sharing(problem, chains):
            for setting in (own for own in engine.combos.settings if own.dp == 1):
                candidate = _shared_ranks(problem, chains, setting)
                if candidate.fits:
                    engine.judge([candidate])
    engine.run()
    if problem.global_batch is not None and apart:
        for name, propose in STRATEGIES.items():
            proposed = propose(replace(problem, beat_s=engine.fastest_s))
            engine.judge([candidate for candidate in proposed if _within(problem, candidate)], name)
    return engine, engine.best()


def _within(problem: Problem, candidate: Candidate) -> bool:
    space, setting = problem.space, candidate.setting
    placing = "colocated" if candidate.chains.colocated else "disjoint"
    return (
        setting.schedule in space.schedules
        and setting.recompute in space.recomputes
        and placing in space.placements
        and (space.microbatches is None or setting.num_microbatches in space.microbatches)
        and (space.dp is None or setting.dp in space.dp)
        and _keeps_replicas(problem, candidate)
        and all(
            degrees.tp in problem.tensor_degrees(chain)
            for chain, degrees in zip(candidate.chains.chains, candidate.degrees, strict=True)
        )
        and candidate.degrees[-1].cp in space.cp
        and not (space.dp is not None and any(degrees.fsdp for degrees in candidate.degrees))
    )


def _keeps_replicas(problem: Problem, candidate: Candidate) -> bool:
    wanted = decided_replicas(candidate.chains, problem.replicas, follow=problem.replicas_follow)
    own = [degrees.dp for degrees in candidate.degrees]
    return (
        wanted is not None
        and all(number in (None, dp) for number, dp in zip(wanted, own, strict=True))
        and all(len({own[index] for index in group}) == 1 for group in balance_groups_of(candidate.chains))
    )


def _shared_ranks(problem: Problem, chains: ChainSet, setting: Setting) -> Candidate:
    """Return the candidate in which each chain is one stage on one device, and some chains share a device.

    It serves requests with fewer devices than chains. Chains are assigned in descending order of their seconds a microbatch, each
    to the device with the fewest seconds so far. The device of the last chain gets the highest rank. The others are numbered in
    the order of the first chain on each.
    """
    last = len(chains.chains) - 1
    priced = [problem.prices.priced(chain, Degrees(), setting) for chain in chains.chains]
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
