"""`with_chains`: the problem with the chains that a search may choose from; refuses requests that no candidate can meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmcompile.config import ProjectorPlacement
from mmcompile.errors import PlanError
from mmcompile.planner.pricing.chains import ChainSet, chain_sets, joined_chain
from mmcompile.planner.search.problem import Problem, balance_groups_of, decided_replicas
from mmcompile.planner.search.settings import SearchSpace


def with_chains(problem: Problem, projector: ProjectorPlacement | None = None) -> Problem:
    """Return a problem with the chain sets that allow its stages, replicas and tensor-parallel degrees.

    Its search space keeps only the replicas of the last chain that the request fixes, if any, and the context-parallel degree for
    which costs are given, if that is above 1.

    Args:
        projector: placement of projectors; None lets the simulator choose.

    Raises:
        PlanError: unknown chain names, more stages than layers or devices, replicas that no chains can have, neither a number of
            microbatches nor a global batch.
        ConfigError: `projector` has no effect.
    """
    graph, costs, entries, space = problem.graph, problem.pricing.table.layers, problem.entries, problem.space
    if problem.global_batch is None and space.microbatches is None:
        raise PlanError("num_microbatches or global_batch is needed: one of them says how much a step is")
    follow = problem.global_batch is None
    apart = chain_sets(graph, costs, projector=projector, entries=entries)
    sets = apart if "disjoint" in space.placements else ()
    if "colocated" in space.placements and projector is None:
        joined = joined_chain(graph, costs, entries=entries)
        sets = (*sets, *((joined,) if joined is not None else ()))
    sets = _with_replicas(_named(sets or apart, problem.stages), problem.replicas, follow=follow)
    sets = _with_shared_tensors(sets, problem.tensor_parallel)
    if problem.pricing.given_cp > 1:
        space = replace(space, cp=(problem.pricing.given_cp,))
    space = _replicated(space, sets, problem.replicas, problem.global_batch)
    problem = replace(problem, sets=tuple(sets), space=space, replicas_follow=follow)
    _check_devices(problem)
    return problem


def needs_sharing(problem: Problem, chains: ChainSet) -> bool:
    """Return whether there are fewer devices than chains while no option forbids chains to share devices."""
    alone = all(number in (None, 1) for number in problem.decided[chains])
    return not problem.stages and alone and problem.space.cp == (1,) and problem.num_devices < len(chains.chains)


def _replicated(
    space: SearchSpace, sets: Sequence[ChainSet], replicas: Mapping[str, int], global_batch: int | None
) -> SearchSpace:
    """Return a search space with only those numbers of replicas of the last chain that a request fixes; unchanged if none."""
    wanted = [decided_replicas(chains, replicas, follow=global_batch is None) for chains in sets]
    numbers = {each[-1] for each in wanted if each is not None}
    decided = tuple(sorted(number for number in numbers if number is not None))
    if len(decided) == len(numbers):
        space = replace(space, dp=decided)
    if global_batch is not None and space.dp is not None and all(global_batch % dp for dp in space.dp):
        raise PlanError(f"global_batch is {global_batch}; none of {space.dp} replicas gets whole samples")
    return space


def _check_devices(problem: Problem) -> None:
    shards, stages = min(problem.space.cp), problem.stages
    needs = [problem.least_ranks(chains, shards) for chains in problem.sets]
    possible = problem.cluster.is_local or any(needs_sharing(problem, chains) for chains in problem.sets)
    if min(needs) > problem.num_devices and not possible:
        asked = f"{named_counts(stages)}, " if stages else ""
        last = problem.sets[0].chains[-1]
        width = shards * min(problem.tensor_degrees(last))
        shared = f", {width} ranks for each of {last.name}" if width > 1 else ""
        copies = f", replicas {named_counts(problem.replicas)}" if problem.replicas else ""
        raise PlanError(
            f"stages ({asked}at least one for every other chain{shared}{copies}) need {min(needs)} devices, got "
            f"{problem.num_devices} of {problem.cluster}; ask for fewer stages{' or replicas' * bool(copies)} or a larger cluster"
        )


def named_counts(counts: Mapping[str, int]) -> str:
    """Return counts by name as text for messages: `vision 2, language_model 4`."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _named(sets: Sequence[ChainSet], stages: Mapping[str, int]) -> list[ChainSet]:
    """Return the chain sets that can have the requested numbers of stages: each named chain exists and has enough layers."""
    sizes = [{chain.name: len(chain.layers) for chain in chains.chains} for chains in sets]
    longest: dict[str, int] = {}
    for own in sizes:
        longest |= {name: max(longest.get(name, 0), count) for name, count in own.items()}
    for name, count in stages.items():
        if name not in longest:
            raise PlanError(f"no chain {name!r} to give {count} stages; chains are {', '.join(longest)}")
        if not 1 <= count <= longest[name]:
            raise PlanError(f"{name} has {longest[name]} layers, cannot be {count} stages; use 1 to {longest[name]}")
    fitting = [
        chains
        for chains, own in zip(sets, sizes, strict=True)
        if all(count <= own.get(name, 0) for name, count in stages.items())
    ]
    if not fitting:
        texts = (", ".join(f"{name} ({count} layers)" for name, count in own.items()) for own in sizes)
        raise PlanError(f"no placement of the projector gives stages {dict(stages)}; chains are {' | '.join(texts)}")
    return fitting


def _with_replicas(sets: Sequence[ChainSet], wanted: Mapping[str, int], *, follow: bool) -> list[ChainSet]:
    _check_names(sets, wanted, "{} replicas")
    fitting = [chains for chains in sets if decided_replicas(chains, wanted, follow=follow) is not None]
    if not fitting:
        groups = " | ".join(
            ", ".join("+".join(chains.chains[index].name for index in group) for group in balance_groups_of(chains))
            for chains in sets
        )
        raise PlanError(
            f"no placement gives {named_counts(wanted)} replicas: chains that lead from one encoder to the language model have "
            f"equally many, and so have components of one chain; they are {groups}"
        )
    return fitting


def _check_names(sets: Sequence[ChainSet], wanted: Mapping[str, int], words: str) -> None:
    names = dict.fromkeys(name for each in sets for chain in each.chains for name in chain.names)
    for name, number in wanted.items():
        what = words.format(number)
        if name not in names:
            raise PlanError(f"no chain {name!r} to give {what}; chains and components are {', '.join(names)}")
        if number < 1:
            raise PlanError(f"{name} cannot have {what}; give 1 or more")


def _with_shared_tensors(sets: Sequence[ChainSet], wanted: Mapping[str, int]) -> list[ChainSet]:
    _check_names(sets, wanted, "tensor parallel degree {}")
    fitting = [
        each
        for each in sets
        if all(len({wanted[name] for name in chain.names if name in wanted}) <= 1 for chain in each.chains)
    ]
    if not fitting:
        chains = " | ".join(", ".join("+".join(chain.components) for chain in each.chains) for each in sets)
        raise PlanError(
            f"no placement gives tensor parallel degrees {named_counts(wanted)}: components of one chain have the same; chains "
            f"are {chains}"
        )
    return fitting
