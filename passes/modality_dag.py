"""`ModalityDag`: independent components, their joins, and the distance of each component to the loss.

Two components are independent if neither reaches the other in the component DAG (Cornstarch paper, section 4.1);
independent components may run at the same time on devices of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx

from mmcompile.errors import VerifyError
from mmcompile.ir.graph import ComponentKind, ModelGraph
from mmcompile.passes.base import Analysis


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityReport:
    """Edges, depths, independent sets and branches of the component DAG, for scheduling."""

    kinds: Mapping[str, ComponentKind]
    edges: tuple[tuple[str, str, tuple[str, ...]], ...]
    """One entry (producer, consumer, names of the tensors sent) for each edge, in topological order."""
    depth: Mapping[str, int]
    """Component -> number of edges on its longest path to the loss component (0 there), farthest component first."""
    independent: tuple[tuple[str, ...], ...]
    """Maximal sets of components in which no component depends on another."""
    branches: tuple[tuple[str, ...], ...]
    """Chains of components: every component but the last has one consumer, and this consumer has no other producer."""
    joins: tuple[str, ...]
    """Components with several producers; a microbatch starts there when all producers have sent their tensors."""

    def __str__(self) -> str:
        lines = [f"{name} [{self.kinds[name]}] depth {depth}" for name, depth in self.depth.items()]
        lines += [f"{producer} -> {consumer}: {', '.join(tensors)}" for producer, consumer, tensors in self.edges]
        lines += [f"independent: {', '.join(group)}" for group in self.independent if len(group) > 1]
        lines += [f"branch: {' -> '.join(branch)}" for branch in self.branches]
        lines += [f"join: {name}" for name in self.joins]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModalityDag(Analysis[ModalityReport]):
    """Pass that reads the component DAG of a graph."""

    name: ClassVar[str] = "modality-dag"

    def run(self, graph: ModelGraph) -> ModalityReport:
        """Return the report on the component DAG. Raises VerifyError if the components form a cycle."""
        dag = graph.dag()
        if not nx.is_directed_acyclic_graph(dag):
            cycle = " -> ".join(str(edge[0]) for edge in nx.find_cycle(dag))
            raise VerifyError(f"components of {graph.name} form a cycle: {cycle}; merge them into one component")
        order = list(nx.lexicographical_topological_sort(dag))
        depth = _depths(dag, order)
        position = {name: index for index, name in enumerate(order)}
        return ModalityReport(
            kinds={name: graph.component(name).kind for name in order},
            edges=tuple(sorted(graph.edges, key=lambda edge: (position[edge[0]], position[edge[1]]))),
            depth=dict(sorted(depth.items(), key=lambda item: (-item[1], item[0]))),
            independent=_independent(dag, position),
            branches=_branches(dag, order),
            joins=tuple(name for name in order if dag.in_degree(name) > 1),
        )


def _depths(dag: nx.DiGraph[str], order: list[str]) -> dict[str, int]:
    depth: dict[str, int] = {}
    for name in reversed(order):
        depth[name] = max((1 + depth[consumer] for consumer in dag.successors(name)), default=0)
    return depth


def _independent(dag: nx.DiGraph[str], position: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Return the largest sets of components in which none depends on another. `position` maps a component to its sort key."""
    incomparable = nx.complement(nx.transitive_closure_dag(dag).to_undirected())
    groups = [tuple(sorted(clique, key=position.__getitem__)) for clique in nx.find_cliques(incomparable)]
    return tuple(sorted(groups, key=lambda group: [position[name] for name in group]))


def _branches(dag: nx.DiGraph[str], order: list[str]) -> tuple[tuple[str, ...], ...]:
    branches: list[list[str]] = []
    for name in order:
        parents = list(dag.predecessors(name))
        if len(parents) == 1 and dag.out_degree(parents[0]) == 1:
            next(branch for branch in branches if branch[-1] == parents[0]).append(name)
        else:
            branches.append([name])
    return tuple(tuple(branch) for branch in branches)
