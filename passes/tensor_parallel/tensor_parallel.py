"""`TensorParallel`: pass that shards the large weights of a component over several ranks.

Column projections (queries, keys, values, gate, up) are sharded in their outputs, row projections (attention output,
down) in their inputs; between them every rank computes its own heads and its own hidden units, and the sum over ranks
behind each row projection is whole again. Token embedding and head are sharded over the vocabulary if the loss is
`token_loss`. All else (norms, routers, experts) is computed by all ranks alike, so that a stage may end between any two
layers.

All ranks run the same graph: nodes `tp_*` (`mmcompile.kernels.tensor_parallel`) read the rank from the process group.
Gradients of whole parameters are whole, and equal, on every rank; gradients of sharded parameters cover the rank's part
(`ModelGraph.shards`).

Source: Megatron-LM (arXiv 1909.08053, section 3), without its sequence parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.copy import copied, rewritten
from mmcompile.ir.graph import ModelGraph
from mmcompile.kernels.process_groups import TENSOR_GROUP
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding, shardings
from mmcompile.passes.tensor_parallel.tensor_report import summary
from mmcompile.passes.tensor_parallel.tensor_rewrite import ShardRewriter, add_borders
from mmcompile.passes.text import layer_text, origin
from mmcompile.passes.values import draws_random, op_name


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel(Rewrite):
    """Pass that shards the weights of components over ranks.

    Raises (in `run`):
        ConfigError: a component of `degrees` does not exist, or the graph is sharded already.
        PlanError: no part of any component can be sharded at its degree, or a whole value depends on random numbers.
    """

    name: ClassVar[str] = "tensor-parallel"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)

    degrees: tuple[tuple[str, int], ...]
    """Pairs (component, number of ranks over which its weights are sharded); the number is 1 for other components."""
    tables: tuple[str, ...] = ()
    """Parameters that are known to be tables of token embeddings, in a graph that has their ids as an input of its own."""
    group: str = TENSOR_GROUP
    """Name of the process group of the ranks that shard a component; a process is in at most one such group."""

    def __post_init__(self) -> None:
        check_given_once(self.degrees, "degrees of tensor parallelism")
        for name, degree in self.degrees:
            if degree < 1:
                raise ConfigError(f"degree of tensor parallelism of {name} must be at least 1, got {degree}")
        if all(degree == 1 for _, degree in self.degrees):
            raise ConfigError(
                "tensor parallelism of degree 1 has no effect; give a component 2 or more, or leave it out"
            )

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph that the ranks of every component run."""
        graph.check_components((name for name, _ in self.degrees), "to shard")
        if graph.shards:
            raise ConfigError("this graph is sharded already; give all degrees to one pass tensor-parallel")
        degrees = dict.fromkeys((component.name for component in graph.components), 1) | dict(self.degrees)
        made = copied(graph)
        facts = GraphFacts(graph=made, tables=frozenset(self.tables))
        found = shardings(facts, degrees)
        if not any(sharding.regions or sharding.embeddings for sharding in found.values()):
            raise PlanError("; ".join(_why_nothing(sharding) for sharding in found.values()))
        for sharding in found.values():
            _check_draws(facts, sharding)
        lines = [f"{self.name}: {summary(facts, sharding)}" for sharding in found.values()]
        rewriter = ShardRewriter(facts=facts, group=self.group)
        for sharding in found.values():
            rewriter.apply(sharding)
        return rewritten(add_borders(made, degrees, self.group), lines, shards=rewriter.shards)


def check_given_once(numbers: Iterable[tuple[str, int]], what: str) -> None:
    """Raise ConfigError if one component has several of the `numbers`, called `what` in the message."""
    for name, count in Counter(name for name, _ in numbers).items():
        if count > 1:
            raise ConfigError(f"component {name} is given several {what}; give one")


def _why_nothing(sharding: ComponentSharding) -> str:
    name = sharding.component
    reasons = [f"{op_name(kept.node)} in {origin(kept.node)}: {kept.reason}" for kept in sharding.kept]
    why = "; ".join(dict.fromkeys(reasons)) or "it has no projections"
    return (
        f"tensor parallelism of degree {sharding.count} has no effect on {name}, of which nothing can be sharded: {why}; "
        f"leave {name} at degree 1"
    )


def _check_draws(facts: GraphFacts, sharding: ComponentSharding) -> None:
    """Raise PlanError if an op draws random numbers for a value that is not split: each rank would draw other numbers."""
    component = facts.graph.component(sharding.component)
    sharded = {node for region in sharding.regions for node in region.shards}
    for layer in component.layers:
        for node in facts.layers.get((component.name, layer.index), ()):
            if node not in sharded and draws_random(node):
                raise PlanError(
                    f"tensor parallelism cannot run {layer_text(node)} ({layer.name}): {node.name} = {op_name(node)} in "
                    f"{origin(node)} draws random numbers for a value that all ranks must agree on; set its probability to 0"
                )
