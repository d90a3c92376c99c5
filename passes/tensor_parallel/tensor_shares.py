"""`tensor_shares`: bytes that tensor-parallel ranks all-reduce in each layer; `rank_parts`: a rank's shares of a layer's cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from mmcompile.costmodel.compute import LayerCost
from mmcompile.costmodel.sharding import TensorShare
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.passes.base import Fact
from mmcompile.passes.cost.cost import Cost
from mmcompile.passes.cost.cost_table import PERMANENT, SIZED, CostTable
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding
from mmcompile.passes.tensor_parallel.shard_flow import ShardFlow
from mmcompile.passes.tensor_parallel.tensor_parallel import TensorParallel
from mmcompile.passes.tensor_parallel.tensor_rewrite import smallest
from mmcompile.passes.values import num_bytes, tensors

Parts = tuple[tuple[str, float], ...]
"""Pairs (field of `LayerCost`, fraction that one rank has of the layer's amount); the fraction of other fields is 1 / degree."""
_GIVEN = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
_LOSS_NUMBERS = 3
"""Number of values per token that a loss over a sharded vocabulary sums over ranks, in two messages (`tp_token_loss`)."""


def tensor_shares(
    facts: GraphFacts, sharding: ComponentSharding, parts: Sequence[Parts] | None = None
) -> tuple[TensorShare, ...]:
    """Return, for each layer of a component, the bytes that its ranks all-reduce in the captured batch, with the given `parts`.

    Args:
        parts: for each layer, the fraction of each cost field that one rank has (`rank_parts`); None if unknown.
    """
    component = facts.graph.component(sharding.component)
    specs = facts.graph.specs
    sharded = {facts.name_of(parameter) for _, parameter in sharding.weights()}
    made = []
    for layer in component.layers:
        nodes = facts.layers.get((component.name, layer.index), ())
        regions = [region for region in sharding.regions if info(region.facts.nodes[0]).layer == layer.index]
        sums = [_bytes(node) for node in nodes if node in sharding.embeddings]
        sums += [size for region in regions for size in _sums(region)]
        copies = [_bytes(value) for value in dict.fromkeys(value for region in regions for value in _copies(region))]
        copies += [_bytes(node) for node in nodes if _is_sent_away(facts, node)]
        held = [specs[name] for name in {facts.parameters[name] for name in layer.parameters} & sharded]
        made.append(
            TensorShare(
                sums=len(sums),
                summed_bytes=sum(sums),
                copies=len(copies),
                copied_bytes=sum(copies),
                parameter_bytes=sum(spec.num_bytes for spec in held),
                trainable_bytes=sum(spec.num_bytes for spec in held if spec.trainable),
                parts=() if parts is None else parts[layer.index],
            )
        )
    return tuple(made)


def rank_parts(
    graph: ModelGraph, whole: CostTable, found: Mapping[str, ComponentSharding], degree: int
) -> Mapping[str, tuple[Parts, ...]]:
    """Return component -> for each layer, the fraction of each cost field that one rank has, for the captured batch.

    The fractions are measured on the sharded graph, which the ranks run. Unsharded values (residuals, norms) stay whole on
    every rank, sharded work is divided, and collectives copy values; the cost pass counts all of this.

    Args:
        graph: annotated by gradient-flow; it is not changed.
        whole: costs of `graph`.
        found: component -> its sharding over `degree` ranks; components of which nothing is sharded are left out.
    """
    degrees = tuple((name, degree) for name, own in found.items() if own.regions or own.embeddings)
    if not degrees:
        return {}
    cost = Cost()
    table = Pipeline(passes=(TensorParallel(degrees=degrees), GradientFlow(), cost), given=_GIVEN).run(graph).of(cost)
    return {
        name: tuple(_parts(before, after, degree) for before, after in zip(whole[name], table[name], strict=True))
        for name, _ in degrees
    }


def _parts(whole: LayerCost, rank: LayerCost, degree: int) -> Parts:
    amounts = ((name, getattr(rank, name), getattr(whole, name)) for name in SIZED if name not in PERMANENT)
    return tuple((name, has / all_) for name, has, all_ in amounts if all_ and has * degree != all_)


def _sums(region: ShardFlow) -> Iterable[int]:
    """Yield the size in bytes of each sum over ranks in a sharded region: after each row-split linear layer, and in the loss."""
    yield from (_bytes(node) for node in region.sums)
    for node in region.losses:
        labels = node.args[1]
        assert isinstance(labels, fx.Node)
        tokens = tensors(labels)[0].numel() * tensors(node)[0].element_size()
        yield from (tokens, (_LOSS_NUMBERS - 1) * tokens)


def _copies(region: ShardFlow) -> Iterable[fx.Node]:
    for node, value in region.copies:
        cut = (node, value) in region.parts or (node, value) in region.heads
        yield smallest(node, value, region)[1] if cut else value


def _is_sent_away(facts: GraphFacts, node: fx.Node) -> bool:
    """Return whether `node` is read by another component, from which rank 0 gets a gradient to share with all ranks."""
    own = info(node).component
    readers = [user for user in node.users if user.op == "call_function" and not info(user).shared]
    return facts.carries(node) and any(info(user).component != own and facts.carries(user) for user in readers)


def _bytes(node: fx.Node) -> int:
    return sum(map(num_bytes, tensors(node)[:1]))
