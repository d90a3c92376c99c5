"""`tensor_axes`: tensor-parallel degrees at which components can run, with the share of parameters that each degree shards.

A planner calls it before it chooses degrees; the pass tensor-parallel then shards the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from mmcompile.costmodel.sharding import TensorShare
from mmcompile.ir.graph import ModelGraph, info, reached
from mmcompile.passes.cost.cost_table import CostTable
from mmcompile.passes.cost.op_flops import keys_and_values
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding, shardings
from mmcompile.passes.tensor_parallel.tensor_report import kept_lines
from mmcompile.passes.tensor_parallel.tensor_shares import Parts, rank_parts, tensor_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorAxes:
    """Tensor-parallel degrees at which one component can run (*legal*), with what each shards and what it leaves whole."""

    degrees: tuple[int, ...]
    """Legal degrees, 1 first: they shard all attention heads, and all projections that any degree shards."""
    reasons: Mapping[int, str]
    """Illegal degree -> reason."""
    shares: Mapping[int, float]
    """Legal degree -> fraction of the component's parameter elements that are sharded, 0 to 1."""
    kept: Mapping[int, tuple[str, ...]]
    """Legal degree -> parts that stay whole with the reason, one line each."""
    layers: Mapping[int, tuple[TensorShare, ...]] = field(default_factory=dict)
    """Degree above 1, legal or not -> for each layer, its all-reduces and one rank's shares of its cost in the captured batch."""


def tensor_axes(graph: ModelGraph, max_degree: int = 16, costs: CostTable | None = None) -> Mapping[str, TensorAxes]:
    """Return component -> its tensor-parallel degrees, among 1, 2, 4, ... up to `max_degree`.

    Args:
        graph: annotated by gradient-flow; it is not changed, and its tensors may be fake.
        max_degree: maximum number of ranks over which a component's weights can be sharded.
        costs: costs of the graph, from which `TensorAxes.layers` has a rank's shares; None leaves the shares unknown.
    """
    facts = GraphFacts(graph=graph)
    names = [component.name for component in graph.components]
    degrees = [1 << power for power in range(1, max_degree.bit_length()) if 1 << power <= max_degree]
    found = {degree: shardings(facts, dict.fromkeys(names, degree)) for degree in degrees}
    parts = {} if costs is None else {degree: rank_parts(graph, costs, own, degree) for degree, own in found.items()}
    return {
        name: _axes(
            facts,
            name,
            {degree: each[name] for degree, each in found.items()},
            {degree: each[name] for degree, each in parts.items() if name in each},
        )
        for name in names
    }


def _axes(
    facts: GraphFacts, name: str, found: Mapping[int, ComponentSharding], parts: Mapping[int, tuple[Parts, ...]]
) -> TensorAxes:
    reasons = {
        degree: why for degree, sharding in found.items() if (why := _illegal(facts, sharding, found)) is not None
    }
    legal = [degree for degree in found if degree not in reasons]
    return TensorAxes(
        degrees=(1, *legal),
        reasons=reasons,
        shares={1: 0.0, **{degree: _share(facts, found[degree]) for degree in legal}},
        kept={1: (), **{degree: tuple(kept_lines(facts, found[degree])) for degree in legal}},
        layers={degree: tensor_shares(facts, sharding, parts.get(degree)) for degree, sharding in found.items()},
    )


def _illegal(facts: GraphFacts, sharding: ComponentSharding, found: Mapping[int, ComponentSharding]) -> str | None:
    """Return the reason why a component cannot be split over the number of ranks in `sharding`; None if it can.

    `found` maps each candidate number of ranks to the sharding found for it.
    """
    own = [node for (name, _), nodes in facts.layers.items() if name == sharding.component for node in nodes]
    reasons = {kept.node: kept.reason for kept in sharding.kept}
    sharded = _projections(sharding)
    if not sharded:
        return next(iter(dict.fromkeys(reasons.values())), "it has no projections")
    lost = set[fx.Node]().union(*map(_projections, found.values())) - sharded
    for node in own:
        if node in lost and node in reasons and not _shares_heads(node, sharding):
            return reasons[node]
    for node in own:
        if keys_and_values(node) and node not in sharding.attention():
            return _before(node, reasons) or "the heads of its attention cannot be sharded"
    return None


def _projections(sharding: ComponentSharding) -> set[fx.Node]:
    """Return the linear layers in a component's sharded regions, except in those of the loss (head over the vocabulary)."""
    return {node for region in sharding.regions if not region.losses for node in (*region.columns, *region.sums)}


def _shares_heads(node: fx.Node, sharding: ComponentSharding) -> bool:
    """Return whether a projection makes fewer key or value heads than there are ranks, so that several ranks use one head."""
    taken = {value for region in sharding.regions for _, value in (*region.heads, *region.parts)}

    def readers(value: fx.Node) -> list[fx.Node]:
        users = () if keys_and_values(value) else value.users
        return [user for user in users if user.op == "call_function" and info(user).layer == info(node).layer]

    return not taken.isdisjoint(reached([node], readers))


def _before(node: fx.Node, reasons: Mapping[fx.Node, str]) -> str | None:
    """Return the reason in `reasons` for `node` or the nearest node that it is computed from; None if there is none."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        value = waiting.pop(0)
        if value in reasons:
            return reasons[value]
        if value not in seen:
            seen.add(value)
            waiting += value.all_input_nodes
    return None


def _share(facts: GraphFacts, sharding: ComponentSharding) -> float:
    component = facts.graph.component(sharding.component)
    own = {facts.parameters[name] for layer in component.layers for name in layer.parameters}
    sharded = {facts.name_of(parameter) for _, parameter in sharding.weights()}
    elements = {name: facts.graph.specs[name].num_elements for name in own}
    total = sum(elements.values())
    return sum(elements[name] for name in own & sharded) / total if total else 0.0
