"""Constraints for given chains: names are looked up, and each becomes a rule about cuts, counts, bytes or degrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmcompile.errors import ConfigError
from mmcompile.planner.exact.rules import Cap, Count, Cuts, Demand, Devices, InStage, Rule, Unsatisfiable
from mmcompile.planner.exact.split_problem import ExactChain
from mmcompile.planner.plan.constraints import Constraint, EqualTp, MemoryCap, On, SameStage, StageRange
from mmcompile.planner.search.layer_names import LayersByChain, chain_index, find
from mmcompile.units import counted, format_bytes


def demands(
    constraints: Sequence[Constraint],
    chains: Sequence[ExactChain],
    *,
    memory_bytes: int | None = None,
    counts: Sequence[int] | None = None,
    devices: int | None = None,
) -> tuple[Demand, ...]:
    """Return all demands on a split: those of the user first, then those of the devices and of the layout.

    Args:
        memory_bytes: memory of a device; None for no limit.
        counts: number of stages of each chain if the layout decides it, else None.
        devices: largest number of devices of all stages together; None for no limit.

    Raises:
        ConfigError: a constraint names a chain, layer or rank that does not exist, or sets a memory limit without effect.
    """
    found = [Demand(rule=rule, words=c.words) for c in constraints for rule in _rules(c, chains, counts, memory_bytes)]
    everywhere = any(isinstance(constraint, MemoryCap) and not constraint.where for constraint in constraints)
    if memory_bytes is not None and not everywhere:
        words = f"memory <= {format_bytes(memory_bytes)} of a device"
        found.append(Demand(rule=Cap(num_bytes=memory_bytes), words=words, asked=False))
    for index, count in enumerate(counts or ()):
        words = f"{chains[index].name} has {counted(count, 'stage')}"
        found.append(Demand(rule=Count(chain=index, low=count, high=count), words=words, asked=False))
    if devices is not None:
        found.append(Demand(rule=Devices(most=devices), words=f"at most {devices} devices", asked=False))
    return tuple(found)


def _rules(
    constraint: Constraint, chains: Sequence[ExactChain], counts: Sequence[int] | None, memory_bytes: int | None
) -> Iterator[Rule]:
    where = str(constraint)
    match constraint:
        case SameStage(same=True):
            yield _together(where, constraint, chains)
        case SameStage():
            yield from _apart(where, constraint, chains)
        case On():
            yield _on(where, constraint, chains)
        case MemoryCap():
            yield _cap(where, constraint, chains, counts, memory_bytes)
        case StageRange():
            chain = chain_index(constraint.chain, _layers(chains), where=where)
            high = chains[chain].num_layers if constraint.high is None else constraint.high
            yield Count(chain=chain, low=constraint.low, high=high)
        case EqualTp():
            components = constraint.components
            numbers = {find(name, _layers(chains), where=where).chain for name in components} or range(len(chains))
            named = [chains[number] for number in sorted(numbers)]
            if len({chain.tp for chain in named}) > 1:
                yield Unsatisfiable(why=", ".join(f"{chain.name} has tp {chain.tp}" for chain in named))


def _together(where: str, constraint: SameStage, chains: Sequence[ExactChain]) -> Rule:
    places = [find(name, _layers(chains), where=where) for name in constraint.layers]
    for name, place in zip(constraint.layers, places, strict=True):
        if place.chain != places[0].chain:
            own, other = chains[places[0].chain].name, chains[place.chain].name
            why = f"{constraint.layers[0]} is in chain {own}, {name} in {other}, and a stage holds layers of one chain"
            return Unsatisfiable(why=why)
    first, last = min(place.first for place in places), max(place.last for place in places) - 1
    return Cuts(chain=places[0].chain, first=first, last=last, some=False)


def _apart(where: str, constraint: SameStage, chains: Sequence[ExactChain]) -> Iterator[Rule]:
    places = [find(name, _layers(chains), where=where) for name in constraint.layers]
    if places[0].chain != places[1].chain:
        return
    before, after = sorted(places, key=lambda place: (place.first, place.last))
    if before.last > after.first:
        yield Unsatisfiable(why=f"{constraint.layers[0]} and {constraint.layers[1]} have a layer in common")
    else:
        yield Cuts(chain=before.chain, first=before.last - 1, last=after.first, some=True)


def _on(where: str, constraint: On, chains: Sequence[ExactChain]) -> Rule:
    place = find(constraint.layer, _layers(chains), where=where)
    stage = constraint.stage
    if constraint.rank is not None:
        stages = _stages_on(where, constraint.rank, chains)
        stage = next((stage for chain, stage in stages if chain == place.chain), None)
        if stage is None:
            names = " and ".join(f"{chains[chain].name}.{stage}" for chain, stage in stages)
            return Unsatisfiable(
                why=f"rank {constraint.rank} runs {names}, and {constraint.layer} is in {chains[place.chain].name}"
            )
    assert stage is not None
    return InStage(chain=place.chain, first=place.first, last=place.last, stage=stage)


def _cap(
    where: str,
    constraint: MemoryCap,
    chains: Sequence[ExactChain],
    counts: Sequence[int] | None,
    memory_bytes: int | None,
) -> Rule:
    if memory_bytes is not None and constraint.num_bytes > memory_bytes:
        raise ConfigError(
            f"{where} has no effect: a device has {format_bytes(memory_bytes)}; ask for less, or leave it out"
        )
    named = constraint.where
    if not named:
        return Cap(num_bytes=constraint.num_bytes)
    if named.startswith("rank") and named[4:].isdigit():
        chain, stage = _stages_on(where, int(named[4:]), chains)[0]
        return Cap(num_bytes=constraint.num_bytes, chain=chain, stage=stage)
    owner, _, number = named.rpartition(".")
    if not number.isdigit() or named in {chain.name for chain in chains}:
        return Cap(num_bytes=constraint.num_bytes, chain=chain_index(named, _layers(chains), where=where))
    chain, stage = chain_index(owner, _layers(chains), where=where), int(number)
    most = counts[chain] if counts is not None else chains[chain].high
    if stage >= most:
        raise ConfigError(f"{where}: {owner} has stages {owner}.0 to {owner}.{most - 1}; got {named}")
    return Cap(num_bytes=constraint.num_bytes, chain=chain, stage=stage)


def _stages_on(where: str, rank: int, chains: Sequence[ExactChain]) -> list[tuple[int, int]]:
    if not all(chain.ranks for chain in chains):
        raise ConfigError(
            f"{where}: ranks are known once the number of stages is; name a stage instead, or fix the stages"
        )
    found = [
        (index, stage) for index, chain in enumerate(chains) for stage, ranks in enumerate(chain.ranks) if rank in ranks
    ]
    if not found:
        most = max(rank for chain in chains for ranks in chain.ranks for rank in ranks)
        raise ConfigError(f"{where}: no stage runs on rank {rank}; the plan has ranks 0 to {most}")
    return found


def _layers(chains: Sequence[ExactChain]) -> LayersByChain:
    return {chain.name: chain.labels for chain in chains}
