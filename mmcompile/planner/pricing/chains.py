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

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which a request may mean the chain: its own, and those of its components."""
        return (self.name, *self.components)


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
        entries: component names (producer, consumer) -> index of the consumer's first layer that reads the producer, 0 if absent.

    Raises:
        PlanError: costs and components do not match, or the components have no single end.
        ConfigError: `projector` is given for a model without projectors, or is not one of the placements.
    """
    _check(graph, costs, projector)
    has_projector = any(component.kind is ComponentKind.PROJECTOR for component in graph.components)
    placements = get_args(ProjectorPlacement) if projector is None else (projector,)
    sets: dict[tuple[tuple[str, ...], ...], ChainSet] = {}
    known: dict[tuple[str, ...], ChainSpec] = {}
    for placement in placements if has_projector else (None,):
        groups = _groups(graph, placement)
        if groups not in sets:
            found = _chain_set(graph, placement, groups, entries or {})
            # A chain that two sets have is one object, priced once.
            chains = tuple(known.setdefault(chain.components, chain) for chain in found.chains)
            sets[groups] = replace(found, chains=chains)
    return tuple(sets.values())


def joined_chain(
    graph: ModelGraph, costs: Mapping[str, Sized], *, entries: Mapping[tuple[str, str], int] | None = None
) -> ChainSet | None:
    """Return one chain of all components, each after its inputs; None if there is but one. Arguments as of `chain_sets`."""
    _check(graph, costs, None)
    if len(graph.components) == 1:
        return None
    order = tuple(_in_order(graph, graph.dag()))
    joined = _chain_set(graph, None, (order,), entries or {})
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


def _in_order(graph: ModelGraph, dag: nx.DiGraph[str]) -> list[str]:
    position = {component.name: index for index, component in enumerate(graph.components)}
    return list(nx.lexicographical_topological_sort(dag, key=position.__getitem__))


def _groups(graph: ModelGraph, placement: ProjectorPlacement | None) -> tuple[tuple[str, ...], ...]:
    """Return the component names of each chain, in order; chains in topological order, ties in the model's order."""
    dag = graph.dag()
    order = _in_order(graph, dag)
    leader = {name: name for name in order}
    for name in order if placement == "with_encoder" else reversed(order):
        peers = {"with_encoder": dag.predecessors, "with_language_model": dag.successors}.get(placement or "")
        if graph.component(name).kind is not ComponentKind.PROJECTOR or peers is None:
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
    return tuple(tuple(members[name]) for name in _in_order(graph, joined))


def _chain_set(
    graph: ModelGraph,
    placement: ProjectorPlacement | None,
    groups: tuple[tuple[str, ...], ...],
    entries: Mapping[tuple[str, str], int],
) -> ChainSet:
    kinds = {component.name: component.kind for component in graph.components}
    chains = tuple(
        ChainSpec(
            name=next((name for name in group if kinds[name] is not ComponentKind.PROJECTOR), group[0]),
            components=group,
            layers=tuple(
                ChainLayer(component=name, index=layer.index, name=layer.name)
                for name in group
                for layer in graph.component(name).layers
            ),
        )
        for group in groups
    )
    # component -> (chain, chain-relative index of its first layer)
    start = {
        name: (index, next(place for place, layer in enumerate(chain.layers) if layer.component == name))
        for index, chain in enumerate(chains)
        for name in chain.components
    }
    edges = tuple(
        ChainEdge(
            source=start[producer][0],
            source_layer=start[producer][1] + len(graph.component(producer).layers) - 1,
            target=start[consumer][0],
            target_layer=start[consumer][1] + entries.get((producer, consumer), 0),
        )
        for producer, consumer, _ in graph.edges
    )
    return ChainSet(placement=placement, chains=chains, edges=edges)
