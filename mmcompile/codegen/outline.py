"""Runs of a stage's nodes, one a layer; equal runs become one function.

A run is an uninterrupted sequence of one layer's nodes. Shared values that several layers of the model read (masks, rotary
tables) are a run of their own, before all others; one that a single layer reads belongs to that layer, regardless of the rest of
the stage. So the function of a layer does not depend on the plan, and stages of all plans share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mmcompile.ir.graph import Place, info
from mmcompile.passes.cost.op_memory import is_view
from mmcompile.passes.values import needing_layers, op_name


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRun:
    """Nodes of one layer that run together in a stage, with the values they read and return."""

    place: Place | None
    """Layer of the nodes; None for values shared by several layers."""
    nodes: tuple[fx.Node, ...]
    """Call nodes in graph order."""
    tensors: tuple[fx.Node, ...]
    """Parameters, buffers and constants read, in the order of their use."""
    inputs: tuple[fx.Node, ...]
    """Values read from other runs and from the stage's inputs, in the order of first use."""
    outputs: tuple[fx.Node, ...]
    """Values read by other runs, or returned by the stage, in graph order."""

    @property
    def is_inline(self) -> bool:
        """True if the run computes nothing: views, and parts of values."""
        return all(is_view(node) for node in self.nodes)

    @property
    def needs_device(self) -> bool:
        """True if the run creates tensors (such as zeros), or moves tensors to a device."""
        arguments = ((node.args, node.kwargs) for node in self.nodes)
        return any(isinstance(value, torch.device) for value in pytree.tree_leaves(list(arguments)))


def runs_of(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> tuple[NodeRun, ...]:
    """Split `nodes` of a stage that returns `results` into runs: nodes of one layer, computed together, after runs they use."""
    nodes = list(nodes)
    groups = _groups(nodes)
    owner = {node: number for number, (_, own) in enumerate(groups) for node in own}
    read_by_others = {
        source for node in nodes for source in node.all_input_nodes if owner.get(source, owner[node]) != owner[node]
    }
    wanted = read_by_others | set(results)
    return tuple(_run(place, own, wanted) for place, own in groups)


def _run(place: Place | None, own: Sequence[fx.Node], wanted: set[fx.Node]) -> NodeRun:
    inside = set(own)
    read = [s for s in dict.fromkeys(source for node in own for source in node.all_input_nodes) if s not in inside]
    return NodeRun(
        place=place,
        nodes=tuple(own),
        tensors=tuple(node for node in read if node.op == "get_attr"),
        inputs=tuple(node for node in read if node.op != "get_attr"),
        outputs=tuple(node for node in own if node in wanted),
    )


def _groups(nodes: list[fx.Node]) -> list[tuple[Place | None, list[fx.Node]]]:
    """Split nodes of a stage into runs of one layer each; return their (layer, nodes). Shared values are first, without layer."""
    order = {node: index for index, node in enumerate(nodes)}
    places = needing_layers(nodes[0].graph)
    shared = [node for node in nodes if info(node).shared and len(places[node]) != 1]
    own = [node for node in nodes if not info(node).shared]
    place_of: dict[fx.Node, Place] = {}
    for node in own:
        (place,) = places[node]
        source = node.all_input_nodes[0] if op_name(node) == "getitem" else None
        place_of[node] = place if source is None else place_of.get(source, place)  # a part goes with the whole
    groups = _whole_layers(own, place_of) or _in_graph_order(own, place_of)
    group_of = {node: number for number, (_, members) in enumerate(groups) for node in members}
    for node in reversed(nodes):
        if info(node).shared and len(places[node]) == 1:
            readers = [group_of[user] for user in node.users if user in group_of]
            # One that only the stage's results read goes where its layers end.
            number = min(readers) if readers else len(groups) - 1
            group_of[node] = number
            groups[number][1].append(node)
    for _, members in groups:
        members.sort(key=order.__getitem__)
    return [*([(None, shared)] if shared else []), *groups]


def _whole_layers(
    nodes: Sequence[fx.Node], place_of: Mapping[fx.Node, Place]
) -> list[tuple[Place | None, list[fx.Node]]]:
    """Return (layer, nodes) with one run per layer, ordered so that each run is after those it reads from.

    Otherwise runs keep the order of their first nodes. The list is empty if two layers read from each other.

    A layer stays one run even if it needs another layer's result midway (an embedding that inserts image features), or reads
    values made much earlier (deep features).
    """
    members: dict[Place, list[fx.Node]] = {}
    waits_for: dict[Place, set[Place]] = {}
    for node in nodes:
        place = place_of[node]
        members.setdefault(place, []).append(node)
        sources = (place_of[source] for source in node.all_input_nodes if source in place_of)
        waits_for.setdefault(place, set()).update(source for source in sources if source != place)
    groups: list[tuple[Place | None, list[fx.Node]]] = []
    while waits_for:
        ready = next((place for place, sources in waits_for.items() if not sources & waits_for.keys()), None)
        if ready is None:
            return []
        del waits_for[ready]
        groups.append((ready, members[ready]))
    return groups


def _in_graph_order(
    nodes: Sequence[fx.Node], place_of: Mapping[fx.Node, Place]
) -> list[tuple[Place | None, list[fx.Node]]]:
    groups: list[tuple[Place | None, list[fx.Node]]] = []
    group_of: dict[fx.Node, int] = {}
    for node in nodes:
        source = node.all_input_nodes[0] if op_name(node) == "getitem" else None
        if source in group_of:
            group_of[node] = group_of[source]
        else:
            if not groups or groups[-1][0] != place_of[node]:
                groups.append((place_of[node], []))
            group_of[node] = len(groups) - 1
        groups[group_of[node]][1].append(node)
    return groups


def module_paths(nodes: Iterable[fx.Node]) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield (module path, nodes) for each sequence of consecutive nodes of one module; the path of shared values is "shared"."""
    path: str | None = None
    own: list[fx.Node] = []
    for node in nodes:
        where = "shared" if info(node).shared else info(node).module_path
        if where != path and own:
            yield str(path), own
            own = []
        path = where
        own.append(node)
    if own:
        yield str(path), own
