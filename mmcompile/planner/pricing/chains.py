"""Chains: components planned as one sequence of layers on the same devices, and the edges between chains."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from typing import get_args

import networkx as nx

from mmcompile.config import ProjectorPlacement
from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.graph import ComponentKind, ModelGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainLayer:
    """Layer in its place in a chain: its component, its index there, and its name."""

    component: str
    index: int
    """Index of the layer within the component."""
    name: str
    """Module path of the layer in the model."""
    share: float = 1.0
    """Share of a microbatch's load that the layer processes; below 1 where several stages hold a copy of the layer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainSpec:
    """Components planned as one chain, named after the encoder or language model among them, else after the projector."""

    name: str
    components: tuple[str, ...]
    layers: tuple[ChainLayer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainEdge:
    """Values that leave after one layer and enter before another layer, of another chain or of the same."""

    source: int
    """Index of the chain whose layer computes the values."""
    source_layer: int
    target: int
    target_layer: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainSet:
    """One way to group the components into chains: chains in topological order (the last ends in the loss) and their edges."""

    placement: ProjectorPlacement | None
    """Placement of projectors; None for a model without any."""
    chains: tuple[ChainSpec, ...]
    edges: tuple[ChainEdge, ...]
    colocated: bool = False
    """True if all components are in one chain, so that a stage may have layers of an encoder and of the language model."""


def chain_sets(
    graph: ModelGraph,
    costs: Mapping[str, Sized],
    *,
    projector: ProjectorPlacement | None = None,
    entries: Mapping[tuple[str, str], int] | None = None,
) -> tuple[ChainSet, ...]:
    """Return every way to group a model's components into chains that `projector` allows, each once.

    Args:
        graph: model; only its components and edges are read.
        costs: component name -> one cost for each layer; only the number of costs is read.
        projector: placement of projectors; None tries all three. A projector with several producers (consumers) cannot
            join one, and stays alone.
        entries: (producer, consumer) -> first layer of the consumer that reads the producer; 0 where absent.

    Raises:
        PlanError: costs and components do not match, or the components have no single end.
        ConfigError: `projector` is given for a model without projectors, or is not one of the placements.
    """
    _check(graph, costs, projector)
    kinds = {component.name: component.kind for component in graph.components}
    has_projector = ComponentKind.PROJECTOR in kinds.values()
    placements = get_args(ProjectorPlacement) if projector is None else (projector,)
    sets: dict[tuple[tuple[str, ...], ...], ChainSet] = {}
    layers = {name: _layers(graph, name) for name in kinds}
    known: dict[tuple[str, ...], ChainSpec] = {}
    for placement in placements if has_projector else (None,):
        groups = _groups(graph, kinds, placement)
        if groups not in sets:
            found = _chain_set(graph, kinds, placement, groups, layers, entries or {})
            # A chain that two sets have is one object, priced once.
            chains = tuple(known.setdefault(chain.components, chain) for chain in found.chains)
            sets[groups] = replace(found, chains=chains)
    return tuple(sets.values())


def joined_chain(
    graph: ModelGraph,
    costs: Mapping[str, Sized],
    *,
    entries: Mapping[tuple[str, str], int] | None = None,
) -> ChainSet | None:
    """Return one chain of all components, each after its inputs; None for a model of one component.

    Arguments as of `chain_sets`.
    """
    _check(graph, costs, None)
    kinds = {component.name: component.kind for component in graph.components}
    if len(kinds) == 1:
        return None
    position = {component.name: index for index, component in enumerate(graph.components)}
    order = tuple(nx.lexicographical_topological_sort(graph.dag(), key=position.__getitem__))
    layers = {name: _layers(graph, name) for name in kinds}
    joined = _chain_set(graph, kinds, None, (order,), layers, entries or {})
    (line,) = joined.chains
    return replace(joined, chains=(replace(line, name=order[-1]),), colocated=True)


def _check(graph: ModelGraph, costs: Mapping[str, Sized], projector: ProjectorPlacement | None) -> None:
    for component in graph.components:
        got, wanted = len(costs.get(component.name, ())), len(component.layers)
        if got != wanted or wanted == 0:
            raise PlanError(
                f"component {component.name} has {wanted} layers and {got} costs; it needs one cost a layer"
            )
    dag = graph.dag()
    ends = [name for name, degree in dag.out_degree() if degree == 0]
    if not nx.is_directed_acyclic_graph(dag) or len(ends) != 1:
        raise PlanError(f"components must form a DAG that ends in the loss; edges {graph.edges}, ends {ends}")
    if projector is None:
        return
    if projector not in get_args(ProjectorPlacement):
        raise ConfigError(f"projector {projector!r} is not one of {', '.join(get_args(ProjectorPlacement))}")
    if all(component.kind is not ComponentKind.PROJECTOR for component in graph.components):
        names = ", ".join(component.name for component in graph.components)
        raise ConfigError(
            f"projector={projector!r} has no effect: {graph.name} has no projector; its components are {names}"
        )


def _groups(
    graph: ModelGraph, kinds: Mapping[str, ComponentKind], placement: ProjectorPlacement | None
) -> tuple[tuple[str, ...], ...]:
    """Return the component names of each chain, in order; chains in topological order, ties in the model's order."""
    dag = graph.dag()
    position = {component.name: index for index, component in enumerate(graph.components)}
    order = list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))
    leader = {name: name for name in order}
    for name in order if placement == "with_encoder" else reversed(order):
        peers = {"with_encoder": dag.predecessors, "with_language_model": dag.successors}.get(placement or "")
        if kinds[name] is not ComponentKind.PROJECTOR or peers is None:
            continue
        neighbours = list(peers(name))
        if len(neighbours) == 1:
            leader[name] = leader[neighbours[0]]
    members: dict[str, list[str]] = {}
    for name in order:
        members.setdefault(leader[name], []).append(name)
    joined = nx.DiGraph()
    joined.add_nodes_from(members)
    joined.add_edges_from((leader[a], leader[b]) for a, b in dag.edges if leader[a] != leader[b])
    chains = nx.lexicographical_topological_sort(joined, key=position.__getitem__)
    return tuple(tuple(members[name]) for name in chains)


def _layers(graph: ModelGraph, component: str) -> tuple[ChainLayer, ...]:
    layers = graph.component(component).layers
    return tuple(ChainLayer(component=component, index=layer.index, name=layer.name) for layer in layers)


def _chain_set(
    graph: ModelGraph,
    kinds: Mapping[str, ComponentKind],
    placement: ProjectorPlacement | None,
    groups: tuple[tuple[str, ...], ...],
    layers: Mapping[str, tuple[ChainLayer, ...]],
    entries: Mapping[tuple[str, str], int],
) -> ChainSet:
    chains = tuple(
        ChainSpec(
            name=next((name for name in group if kinds[name] is not ComponentKind.PROJECTOR), group[0]),
            components=group,
            layers=tuple(layer for name in group for layer in layers[name]),
        )
        for group in groups
    )
    # component -> (chain, chain-relative index of its first layer)
    start: dict[str, tuple[int, int]] = {}
    for index, group in enumerate(groups):
        first = 0
        for name in group:
            start[name] = (index, first)
            first += len(layers[name])
    edges: list[ChainEdge] = []
    for producer, consumer, _ in graph.edges:
        source, first = start[producer]
        target, entry = start[consumer]
        edges.append(
            ChainEdge(
                source=source,
                source_layer=first + len(layers[producer]) - 1,
                target=target,
                target_layer=entry + entries.get((producer, consumer), 0),
            )
        )
    return ChainSet(placement=placement, chains=chains, edges=tuple(edges))
