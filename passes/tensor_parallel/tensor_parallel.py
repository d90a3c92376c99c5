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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import ModelGraph, info
from mmcompile.kernels.process_groups import TENSOR_GROUP
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.context_parallel.token_axis import argument
from mmcompile.passes.tensor_parallel.boundary_collectives import add_borders
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.regions import ComponentSharding, shardings
from mmcompile.passes.tensor_parallel.tensor_report import summary
from mmcompile.passes.tensor_parallel.tensor_rewrite import ShardRewriter
from mmcompile.passes.values import op_name


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel(Rewrite):
    """Pass that shards the weights of components over ranks.

    Raises (in `run`):
        ConfigError: a component of `degrees` does not exist, or the graph is sharded already.
        PlanError: no part of any component can be sharded at its degree, or a whole value depends on random numbers.
    """

    name: ClassVar[str] = "tensor-parallel"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED,)

    degrees: tuple[tuple[str, int], ...]
    """Pairs (component, number of ranks over which its weights are sharded); the number is 1 for other components."""
    group: str = TENSOR_GROUP
    """Name of the process group of the ranks that shard a component; a process is in at most one such group."""

    def __post_init__(self) -> None:
        twice = [name for name, number in Counter(name for name, _ in self.degrees).items() if number > 1]
        if twice:
            raise ConfigError(f"component {twice[0]} is given several degrees of tensor parallelism; give one")
        for name, degree in self.degrees:
            if degree < 1:
                raise ConfigError(f"degree of tensor parallelism of {name} must be at least 1, got {degree}")
        if all(degree == 1 for _, degree in self.degrees):
            raise ConfigError(
                "tensor parallelism of degree 1 has no effect; give a component 2 or more, or leave it out"
            )

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph that the ranks of every component run."""
        degrees = self._degrees(graph)
        made = copied(graph)
        facts = GraphFacts(graph=made)
        found = shardings(facts, degrees)
        if not any(_shards(sharding) for sharding in found.values()):
            raise PlanError("; ".join(_why_nothing(sharding) for sharding in found.values()))
        for sharding in found.values():
            _check_draws(made, facts, sharding)
        lines = tuple(f"{self.name}: {summary(facts, sharding)}" for sharding in found.values())
        rewriter = ShardRewriter(facts=facts, group=self.group)
        for sharding in found.values():
            rewriter.apply(sharding)
        made = add_borders(made, degrees, self.group)
        made.module.graph.lint()
        made.module.recompile()
        return replace(made, shards=rewriter.shards, rewrites=(*made.rewrites, *lines))

    def _degrees(self, graph: ModelGraph) -> Mapping[str, int]:
        names = [component.name for component in graph.components]
        for name, _ in self.degrees:
            if name not in names:
                raise ConfigError(f"no component {name!r} to shard; components are {', '.join(names)}")
        if graph.shards:
            raise ConfigError("this graph is sharded already; give all degrees to one pass tensor-parallel")
        return dict.fromkeys(names, 1) | dict(self.degrees)


def _shards(sharding: ComponentSharding) -> bool:
    return bool(sharding.regions or sharding.embeddings)


def _why_nothing(sharding: ComponentSharding) -> str:
    name = sharding.component
    reasons = [f"{op_name(kept.node)} in {_where(kept.node)}: {kept.reason}" for kept in sharding.kept]
    why = "; ".join(dict.fromkeys(reasons)) or "it has no projections"
    return (
        f"tensor parallelism of degree {sharding.count} has no effect on {name}, of which nothing can be sharded: {why}; "
        f"leave {name} at degree 1"
    )


def _check_draws(graph: ModelGraph, facts: GraphFacts, sharding: ComponentSharding) -> None:
    """Raise PlanError if random numbers are drawn for a value that every rank must compute alike."""
    name = sharding.component
    sharded = {node for region in sharding.regions for node in region.shards}
    for (component, layer), nodes in facts.layers.items():
        for node in nodes if component == name else ():
            if node not in sharded and _draws(node):
                raise PlanError(
                    f"tensor parallelism cannot run layer {layer} of {component} ({graph.component(name).layers[layer].name}): "
                    f"{node.name} = {op_name(node)} in {_where(node)} draws random numbers for a value that all ranks must "
                    "agree on; set its probability to 0"
                )


def _where(node: fx.Node) -> str:
    path = info(node).module_path
    return f"module {path}" if path else "the model's own forward"


def _draws(node: fx.Node) -> bool:
    """Return whether a call draws random numbers; a dropout that is off draws none."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if op_name(node) == "aten.scaled_dot_product_attention":
        return bool(argument(node, "dropout_p"))
    return "dropout" not in op_name(node) or bool(node.args[1]) and node.args[2] is not False
