"""`shardings`: parts of a component's layers that can be sharded over a number of ranks, with reasons for those that cannot.

A region, a set of nodes with sharded values, starts at one projection, such as that to queries. Where its result meets the
whole result of another projection of the layer (to keys), that projection is sharded too, as part of the region. If it
cannot be (fewer key/value heads than ranks), every rank computes its whole result and uses a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from mmcompile.ir.graph import component_of, reached
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.passes.cost.op_flops import keys_and_values
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts, LayerFacts, projection
from mmcompile.passes.tensor_parallel.shard_flow import Refinement, Refusal, RegionGrowth, ShardFlow
from mmcompile.passes.tensor_parallel.shard_rules import rule_of
from mmcompile.passes.text import layer_text
from mmcompile.passes.values import argument, aten_ops, op_name, shape, tensors

_MOST_ATTEMPTS = 100
_SCALES = aten_ops("dropout mul div to _to_copy")
# Ops that give other ids to some tokens, or look at ids in another shape.
_KEEP_IDS = aten_ops(
    "view reshape flatten unsqueeze squeeze slice select clone to _to_copy contiguous where masked_fill clamp clamp_min "
    "clamp_max maximum minimum alias detach cat pad constant_pad_nd index_put scatter slice_scatter select_scatter copy fill "
    "expand expand_as lift_fresh_copy"
)


@dataclass(kw_only=True, slots=True)
class ComponentSharding:
    """Sharded regions of one component at one degree, and its projections and embeddings that stay whole."""

    component: str
    count: int
    regions: list[ShardFlow] = field(default_factory=list)
    embeddings: dict[fx.Node, TensorShard] = field(default_factory=dict)
    """Token embedding node -> sharding of its table."""
    kept: list[Refusal] = field(default_factory=list)
    """Projections and embeddings that stay whole on every rank, with the reasons."""

    def weights(self) -> dict[tuple[fx.Node, fx.Node], TensorShard]:
        """Return (reader node, parameter node) -> sharding of the parameter."""
        found = {pair: shard for region in self.regions for pair, shard in region.weights.items()}
        return found | {(node, node.all_input_nodes[0]): shard for node, shard in self.embeddings.items()}

    def attention(self) -> set[fx.Node]:
        """Return the attention nodes whose heads are sharded."""
        return {node for region in self.regions for node in region.shards if keys_and_values(node)}


def shardings(facts: GraphFacts, degrees: Mapping[str, int]) -> dict[str, ComponentSharding]:
    """Return component -> its sharding at the given degree.

    A parameter that is read in several places (a tied embedding) is sharded in all of them alike, or in none.
    """
    found = {component: _sharding(facts, component, count) for component, count in degrees.items() if count > 1}
    while (broken := _inconsistent(facts, found)) is not None:
        for sharding in found.values():
            _drop(facts, sharding, *broken)
    return found


def _sharding(facts: GraphFacts, component: str, count: int) -> ComponentSharding:
    made = ComponentSharding(component=component, count=count)
    for (name, _), nodes in facts.layers.items():
        if name != component:
            continue
        layer = LayerFacts(whole=facts, nodes=nodes)
        _embeddings(made, layer)
        starts = [node for node in nodes if projection(node) is not None]
        # The first of two products with nothing between (LoRA) is small, and better whole than added up over ranks.
        for node in (*(s for s in starts if not _leads_to_projection(s)), *filter(_leads_to_projection, starts)):
            if node not in layer.taken:
                _start(made, layer, node)
        made.kept = [kept for kept in made.kept if kept.node not in layer.taken]
    return made


def _embeddings(made: ComponentSharding, layer: LayerFacts) -> None:
    for node in layer.nodes:
        if op_name(node) == "aten.embedding":
            try:
                made.embeddings[node] = _table_shard(node, layer, made.count)
                layer.taken.add(node)
            except Refusal as refusal:
                made.kept.append(refusal)


def _table_shard(node: fx.Node, layer: LayerFacts, count: int) -> TensorShard:
    """Return the sharding of the table of an `aten.embedding` node over the vocabulary. Raises Refusal if it stays whole."""
    table, ids = argument(node, "weight"), argument(node, "indices")
    if not layer.whole.is_parameter(table):
        raise Refusal(node, "its table is computed, not a parameter")
    if argument(node, "scale_grad_by_freq") or argument(node, "sparse"):
        raise Refusal(node, "its gradient is sparse, or scaled by how often an id occurs")
    component = layer.whole.graph.component(component_of(node))
    # A decoder's tokens may be the labels, shifted.
    labels = _inputs(loss.all_input_nodes[1] for loss in layer.whole.losses)
    known = layer.whole.name_of(table) in layer.whole.tables
    if not known and not _inputs([ids]) & {*component.sources, *labels}:
        raise Refusal(node, "it looks up positions or kinds, not tokens of an input")
    rows = shape(table)[0]
    if rows % count:
        raise Refusal(node, f"a vocabulary of {rows} does not divide by {count}", indivisible=True)
    return TensorShard(dim=0, blocks=(rows,), count=count)


def _inputs(ids: Iterable[fx.Node]) -> set[str]:
    """Return the names of the integer inputs that token ids come from, through ops that only replace or move some ids."""
    found = reached(ids, lambda n: n.all_input_nodes if n.op == "call_function" and op_name(n) in _KEEP_IDS else ())
    inputs = [node for node in found if node.op == "placeholder" and tensors(node)]
    return {str(node.target) for node in inputs if not tensors(node)[0].is_floating_point()}


def _leads_to_projection(node: fx.Node) -> bool:
    readers = list(node.users)
    while len(readers) == 1 and op_name(readers[0]) in _SCALES:
        readers = list(readers[0].users)
    return bool(readers) and all(projection(reader) is not None for reader in readers)


def _start(made: ComponentSharding, layer: LayerFacts, start: fx.Node) -> None:
    result = _search(layer, start, made.count)
    if isinstance(result, ShardFlow):
        made.regions.append(result)
        layer.taken |= result.shards.keys() | result.sums | result.losses
    else:
        layer.refused.add(start)
        made.kept.append(result.of(start))


def _search(layer: LayerFacts, start: fx.Node, count: int) -> ShardFlow | Refusal:
    """Return the sharding over `count` ranks of projection `start` and all nodes up to the sum of results, or a refusal."""
    size = shape(start)[-1]
    if size % count:
        return Refusal(start, f"{size} outputs do not divide by {count}", indivisible=True)
    columns: dict[fx.Node, tuple[int, ...]] = {start: (size,)}
    excluded: set[fx.Node] = set()
    refusals: list[Refusal] = []
    for _ in range(_MOST_ATTEMPTS):
        flow = ShardFlow(count=count, facts=layer, columns=dict(columns), excluded=frozenset(excluded))
        try:
            flow.run(rule_of)
            return flow
        except RegionGrowth as growth:
            columns |= {node: (shape(node)[-1],) for node in growth.projections}
        except Refinement as refusal:
            refusals.append(refusal)
            columns[refusal.origin] = refusal.blocks
        except Refusal as refusal:
            refusals.append(refusal)
            guilty = [node for node in columns if node is not start and node in _origins(flow, refusal.node)]
            if not guilty:
                break
            excluded.add(guilty[-1])
            del columns[guilty[-1]]
    # The most informative one: about a size that does not divide, if there is one.
    return next((refusal for refusal in reversed(refusals) if refusal.indivisible), refusals[-1])


def _origins(flow: ShardFlow, node: fx.Node) -> set[fx.Node]:
    found = {origin for source in (node, *node.all_input_nodes) for origin in flow.origins.get(source, ())}
    return found | ({node} if node in flow.columns else set())


def _inconsistent(facts: GraphFacts, found: Mapping[str, ComponentSharding]) -> tuple[str, str] | None:
    """Return (parameter name, reason) if a parameter is not sharded alike in all its readers; None if all are."""
    wanted: dict[str, TensorShard] = {}
    weights = {pair: shard for sharding in found.values() for pair, shard in sharding.weights().items()}
    for (_, parameter), shard in weights.items():
        name = facts.name_of(parameter)
        if wanted.setdefault(name, shard) != shard:
            return name, f"{name} is read in several places, which would shard it differently"
    for name in wanted:
        for node, source in facts.uses[name]:
            if (node, source) not in weights:
                where = layer_text(node) if node.op == "call_function" else "the result"
                return name, f"{name} is also read by {node.name} = {op_name(node)} in {where}, which stays whole"
    return None


def _drop(facts: GraphFacts, sharding: ComponentSharding, name: str, reason: str) -> None:
    def reads(parameters: Iterable[fx.Node]) -> bool:
        return any(facts.name_of(parameter) == name for parameter in parameters)

    for region in [region for region in sharding.regions if reads(parameter for _, parameter in region.weights)]:
        sharding.regions.remove(region)
        sharding.kept += [Refusal(node, reason) for node in region.columns]
    for node in [node for node in sharding.embeddings if reads(node.all_input_nodes[:1])]:
        del sharding.embeddings[node]
        sharding.kept.append(Refusal(node, reason))
