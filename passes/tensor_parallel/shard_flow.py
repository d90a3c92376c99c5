"""`ShardFlow`: follows sharded dims through one layer, from column projections to row projections.

The graph is not changed: `ShardFlow` records the changes to make, and a rule that fails raises `Refusal`. A *region* is a set of
nodes whose values are sharded: each rank has a part (`TensorShard`). All other values are whole, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.tensor_parallel.graph_facts import LayerFacts, projection
from mmcompile.passes.text import layer_text
from mmcompile.passes.values import op_name, shape

Shards = TensorShard | tuple[TensorShard | None, ...]
"""Sharding of a tensor, or of each item of a tuple (None for a whole item)."""


class Refusal(Exception):
    """Exception: a node, or the region that reaches it, cannot be sharded, for the given reason."""

    def __init__(self, node: fx.Node, reason: str, *, indivisible: bool = False) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason
        self.indivisible = indivisible
        """True if a size does not divide by the degree, so that a smaller degree may work."""

    def of(self, node: fx.Node) -> Refusal:
        """Return the refusal of another node for the same reason."""
        return Refusal(node, self.reason, indivisible=self.indivisible)


class Refinement(Refusal):
    """Refusal with a remedy: start again with the outputs of projection `origin` divided into smaller `blocks` (their sizes)."""

    def __init__(
        self, node: fx.Node, reason: str, origin: fx.Node, blocks: tuple[int, ...], *, indivisible: bool = False
    ) -> None:
        super().__init__(node, reason, indivisible=indivisible)
        self.origin = origin
        self.blocks = blocks


class RegionGrowth(Exception):
    """Exception: a sharded value meets results of unsharded `projections`; sharding must start again with these sharded too."""

    def __init__(self, projections: Sequence[fx.Node]) -> None:
        super().__init__()
        self.projections = projections


Rule = Callable[["ShardFlow", fx.Node], Shards | None]
"""Rule that returns the sharding of an op's result when some input is sharded; None if the result is whole."""


@dataclass(kw_only=True, slots=True)
class ShardFlow:
    """One attempt to shard nodes of a layer, from the projections `columns` on; after `run` it holds what is sharded and how."""

    count: int
    facts: LayerFacts
    columns: Mapping[fx.Node, tuple[int, ...]]
    """Projections whose outputs are sharded -> sizes of the blocks into which the outputs are divided."""
    excluded: Set[fx.Node]
    """Projections that this attempt leaves whole."""
    shards: dict[fx.Node, Shards] = field(default_factory=dict)
    origins: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    """Sharded value -> projections from which it is made."""
    weights: dict[tuple[fx.Node, fx.Node], TensorShard] = field(default_factory=dict)
    """(reader node, parameter node) -> sharding of the parameter."""
    copies: dict[tuple[fx.Node, fx.Node], None] = field(default_factory=dict)
    """Pairs (reader node, whole value with gradient) that need a `tp_copy` between them; an ordered set."""
    parts: dict[tuple[fx.Node, fx.Node], TensorShard] = field(default_factory=dict)
    """(reader node, whole value) -> part of the value that a rank reads."""
    heads: dict[tuple[fx.Node, fx.Node], tuple[int, ...]] = field(default_factory=dict)
    """(attention node, whole keys or values) -> heads that rank 0 reads, then rank 1, and so on."""
    arguments: dict[fx.Node, dict[str, Any]] = field(default_factory=dict)
    """Node -> arguments that differ on a rank, such as local sizes, by the names of the op's schema."""
    sums: set[fx.Node] = field(default_factory=set)
    """Projections that contract the sharded dim: the sum of their results over ranks is the whole result."""
    losses: set[fx.Node] = field(default_factory=set)

    def run(self, rule_of: Callable[[fx.Node], Rule | None]) -> None:
        """Follow the sharded dim through the layer. Raises Refusal or RegionGrowth."""
        for node in self.facts.nodes:
            if node in self.columns:
                self._column(node)
            elif any(source in self.shards for source in node.all_input_nodes):
                self._follow(node, rule_of)

    def _column(self, node: fx.Node) -> None:
        found = projection(node)
        assert found is not None
        if found.source in self.shards:
            raise Refusal(node, "it reads what another sharded projection made")
        blocks = self.columns[node]
        self._shard_weight(node, found.weight, self.shard(found.output_dim, blocks))
        if found.bias is not None:
            self._shard_weight(node, found.bias, self.shard(0, blocks))
        self._enter(node, (found.source,))
        self._made(node, self.shard(len(shape(node)) - 1, blocks), {node})

    def _follow(self, node: fx.Node, rule_of: Callable[[fx.Node], Rule | None]) -> None:
        if node in self.facts.taken:
            raise Refusal(node, "it is part of another sharded region")
        rule = rule_of(node)
        if rule is None:
            raise Refusal(node, f"no rule says what {op_name(node)} does to a sharded dim")
        result = rule(self, node)
        origins = {origin for source in node.all_input_nodes for origin in self.origins.get(source, ())}
        if node not in self.sums:
            self._enter(node, node.all_input_nodes)
        if result is not None:
            self._made(node, result, origins)

    def _enter(self, node: fx.Node, sources: Sequence[fx.Node]) -> None:
        """Add to `copies` the inputs of a sharded node that are equal on all ranks. Their gradients must be summed over ranks."""
        for source in sources:
            whole = source not in self.shards and (node, source) not in self.weights
            if whole and self.facts.whole.carries(node) and self.facts.whole.carries(source):
                self.copies[node, source] = None

    def _made(self, node: fx.Node, shards: Shards, origins: Set[fx.Node]) -> None:
        self.shards[node] = shards
        self.origins[node] = frozenset(origins)
        for user in node.users:
            if user not in self.facts.members:
                where = "the graph's result" if user.op == "output" else layer_text(user)
                raise Refusal(node, f"its result would leave the layer sharded, for {where}")

    def _shard_weight(self, reader: fx.Node, parameter: fx.Node, shard: TensorShard) -> None:
        if not self.facts.whole.is_parameter(parameter):
            raise Refusal(reader, f"its weight {parameter.name} is computed, not a parameter")
        self.weights[reader, parameter] = shard

    def shard_of(self, node: fx.Node) -> TensorShard:
        """Return the sharding of a sharded node whose value is a single tensor."""
        found = self.shards[node]
        assert isinstance(found, TensorShard)
        return found

    def sharded_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of `node` that are sharded."""
        return [source for source in node.all_input_nodes if source in self.shards]

    def shard(self, dim: int, blocks: Sequence[int]) -> TensorShard:
        """Return a sharding of dim `dim` by blocks of these sizes, over all ranks."""
        return TensorShard(dim=dim, blocks=tuple(blocks), count=self.count)

    def row(self, node: fx.Node, weight: fx.Node, shard: TensorShard) -> None:
        """Record that `node` contracts a sharded dim: `weight` is sharded as `shard`, and results are summed over ranks."""
        self._shard_weight(node, weight, shard)
        self.sums.add(node)

    def meet(self, node: fx.Node, value: fx.Node, wanted: TensorShard) -> None:
        """Let `node` read `value` sharded as `wanted`: each rank takes its part of a whole value. Raises Refusal if it cannot."""
        if value in self.shards:
            found = self.shard_of(value)
            if found != wanted:
                reason = f"{value.name} is sharded as {_text(found)}, the others as {_text(wanted)}"
                if found.dim == wanted.dim:
                    self.refine(node, value, wanted.blocks, reason)
                raise Refusal(node, reason)
        elif self.facts.whole.is_parameter(value):
            self.weights[node, value] = wanted
        elif (node, value) not in self.parts:
            self.grow(value)
            self.parts[node, value] = wanted

    def meet_along(self, node: fx.Node, values: Iterable[fx.Node], from_right: int, blocks: Sequence[int]) -> None:
        """Require that inputs `values` of `node` are sharded in `blocks` of dim `from_right` (-1: the last), if they have it."""
        for value in values:
            dim = len(shape(value)) + from_right
            if value in self.shards or dim >= 0 and shape(value)[dim] != 1:
                self.meet(node, value, self.shard(dim, blocks))

    def grow(self, value: fx.Node) -> None:
        """Raise RegionGrowth if the unsharded `value` is made from projections whose outputs can be sharded too; else return."""
        known = self.columns.keys() | self.sums | self.excluded
        found = [source for source in self.facts.projections_of(value, self.count) if source not in known]
        if found:
            raise RegionGrowth(found)

    def refine(
        self, node: fx.Node, value: fx.Node, blocks: Sequence[int], reason: str, *, indivisible: bool = False
    ) -> None:
        """Raise Refinement if `value` gets `blocks` when the outputs of the projection that made it are divided so; else return.

        Args:
            node: node that needs the smaller blocks (parts of a dim, of each of which every rank has an equal part).
            value: sharded value that the node reads.
            blocks: requested sizes of the blocks along the sharded dim of `value`.
            reason: reason for the refusal, reported if no other attempt to shard succeeds.
            indivisible: True if a size does not divide by the number of ranks, so that sharding over fewer may succeed.
        """
        origins = self.origins[value]
        if len(origins) != 1:
            return
        (origin,) = origins
        now, made = self.shard_of(value).blocks, self.columns[origin]
        factor, rest = divmod(sum(made), sum(now))
        finer = tuple(block * factor for block in blocks)
        even = not any(block % self.count for block in finer)
        if even and not rest and tuple(block * factor for block in now) == made and finer != made:
            raise Refinement(node, reason, origin, finer, indivisible=indivisible)

    def local(self, node: fx.Node, name: str, value: Any) -> None:
        """Record that `node` has another value for the argument `name` on a rank."""
        self.arguments.setdefault(node, {})[name] = value


def _text(shard: TensorShard) -> str:
    return f"dim {shard.dim} in blocks {list(shard.blocks)}"
