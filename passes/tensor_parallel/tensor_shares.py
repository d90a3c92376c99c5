"""`tensor_shares`: bytes that tensor-parallel ranks exchange in each layer, and shares of its cost, before any rewrite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from mmcompile.costmodel.sharding import TensorShare
from mmcompile.ir.graph import info
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.rank_costs import Parts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding
from mmcompile.passes.tensor_parallel.shard_flow import ShardFlow
from mmcompile.passes.tensor_parallel.tensor_rewrite import smallest
from mmcompile.passes.values import num_bytes, tensors

_LOSS_NUMBERS = 3
"""Number of values per token that a loss over a sharded vocabulary sums over ranks, in two messages (`tp_token_loss`)."""


def tensor_shares(
    facts: GraphFacts, sharding: ComponentSharding, parts: Sequence[Parts] | None = None
) -> tuple[TensorShare, ...]:
    """Return the bytes exchanged and one rank's share of the cost, for each layer of a component in the captured batch.

    Args:
        parts: one rank's share of each layer's cost; None if unknown.
    """
    component = facts.graph.component(sharding.component)
    sizes = {spec.name: spec for spec in facts.graph.parameters}
    sharded = {facts.parameters[str(parameter.target)] for _, parameter in sharding.weights()}
    summed: dict[int, list[int]] = {}
    copied: dict[int, list[int]] = {}
    for node in sharding.embeddings:
        summed.setdefault(info(node).layer, []).append(_bytes(node))
    regions: dict[int, list[ShardFlow]] = {}
    for region in sharding.regions:
        regions.setdefault(info(region.facts.nodes[0]).layer, []).append(region)
    for layer, own in regions.items():
        summed.setdefault(layer, []).extend(size for region in own for size in _sums(region))
        copied[layer] = [_bytes(value) for value in dict.fromkeys(value for region in own for value in _copies(region))]
    for (name, layer), nodes in facts.layers.items():
        if name == component.name:
            copied.setdefault(layer, []).extend(_bytes(node) for node in nodes if _is_sent_away(facts, node))
    made = []
    for layer in component.layers:
        held = [sizes[name] for name in {facts.parameters[name] for name in layer.parameters} & sharded]
        sums, copies = summed.get(layer.index, []), copied.get(layer.index, [])
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


def _sums(region: ShardFlow) -> Iterable[int]:
    """Yield, for every projection of a region whose result is summed over ranks, the bytes of this result."""
    yield from (_bytes(node) for node in region.sums)
    for node in region.losses:
        labels = node.args[1]
        assert isinstance(labels, fx.Node)
        tokens = tensors(labels)[0].numel() * tensors(node)[0].element_size()
        yield from (tokens, (_LOSS_NUMBERS - 1) * tokens)


def _copies(region: ShardFlow) -> Iterable[fx.Node]:
    """Yield the whole values that a region reads and whose gradient is summed over ranks."""
    for node, value in region.copies:
        cut = (node, value) in region.parts or (node, value) in region.heads
        yield smallest(node, value, region)[1] if cut else value


def _is_sent_away(facts: GraphFacts, node: fx.Node) -> bool:
    """Return whether another component returns a gradient for a node, which one rank receives and all ranks need."""
    own = info(node).component
    readers = [user for user in node.users if user.op == "call_function" and not info(user).shared]
    return facts.carries(node) and any(info(user).component != own and facts.carries(user) for user in readers)


def _bytes(node: fx.Node) -> int:
    return sum(num_bytes(tensor) for tensor in tensors(node)[:1])
