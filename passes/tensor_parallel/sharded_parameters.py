"""`ShardedParameters`: pass that shards the parameters of a component over its replicas (FSDP).

Every rank keeps rows 1/n of each large parameter, with gradient and optimizer state of these rows only. In front of the
first reader in each layer a node `gather_parameter` makes the whole parameter; its backward adds up the gradients of
all replicas and leaves each its rows. Where tensor parallelism shards the tensor already, the whole parameter is one
rank's part, and the replicas of this rank shard the part along the same dim. The nodes belong to the layer that reads,
so they are in its function: where a layer is computed again in the backward, it gathers again; where it is not, its
backward does, as it reads the parameter (`mmcompile.kernels.sharded_parameters.regather`). Either way no whole
parameter outlives the layer.

Frozen parameters are sharded and gathered too, without a sum of gradients.

Source: SimpleFSDP (arXiv 2411.00284).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.copy import copied, rewritten
from mmcompile.ir.graph import ModelGraph, ParameterSpec, describe, info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.process_groups import REPLICA_GROUP
from mmcompile.kernels.sharded_parameters.gather_ops import gather_parameter as gather_parameter
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.tensor_parallel.tensor_parallel import check_given_once
from mmcompile.passes.values import tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameters(Rewrite):
    """Pass that shards parameters of components over their replicas.

    The sharded dim is 0 (rows), or the dim that tensor parallelism shards already. Parameters stay whole on every
    replica if they are vectors (norms, biases: few bytes, but a message each), if their sizes do not divide, or if a
    component with another number of replicas reads them too.

    Raises (in `run`):
        ConfigError: a component of `degrees` does not exist.
        PlanError: no parameter of any component can be sharded.
    """

    name: ClassVar[str] = "sharded-parameters"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)

    degrees: tuple[tuple[str, int], ...]
    """Pairs (component, number of replicas that shard its parameters); other components hold theirs whole."""
    group: str = REPLICA_GROUP
    """Name of the process group of the replicas of a stage; a process is in at most one such group."""

    def __post_init__(self) -> None:
        check_given_once(self.degrees, "numbers of replicas")
        for name, degree in self.degrees:
            if degree < 2:
                raise ConfigError(f"{name} has {degree} replicas, and parameters are shared by 2 or more: leave it out")

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph with `gather_parameter` nodes and sharded parameters."""
        graph.check_components((name for name, _ in self.degrees), "to shard")
        made = copied(graph)
        facts = GraphFacts(graph=made)
        shards: dict[str, TensorShard] = {}
        lines: list[str] = []
        for name, degree in self.degrees:
            reasons = _reasons(facts, name, dict(self.degrees))
            lines.append(f"{self.name}: {degree} replicas of {name} {_summary(reasons)}")
            shards |= {spec.name: _before(made, spec).spread(degree) for spec, reason in reasons.items() if not reason}
        if not shards:
            raise PlanError(f"no parameter can be shared, so leave out fsdp: {'; '.join(lines)}")
        for parameter, shard in shards.items():
            self._gather(facts, parameter, shard)
        return rewritten(made, lines, shards={**made.shards, **shards})

    def _gather(self, facts: GraphFacts, parameter: str, shard: TensorShard) -> None:
        """Insert, in each layer that reads a parameter, a node that joins the parts of it that the replicas hold (`shard`)."""
        readers: dict[tuple[str | None, int], list[tuple[fx.Node, fx.Node]]] = {}
        for reader, source in sorted(facts.readers[parameter], key=lambda pair: pair[0]):
            readers.setdefault((info(reader).component, info(reader).layer), []).append((reader, source))
        blocks = [block * shard.replicas // shard.count for block in shard.blocks]
        for own in readers.values():
            first, source = own[0]
            with first.graph.inserting_before(first):
                target = torch.ops.mmcompile.gather_parameter.default
                made = first.graph.call_function(target, (source, self.group, shard.replicas, shard.dim, blocks))
            carries = facts.carries(source) and info(first).carries_gradient
            whole = tensors(source)[0]
            value = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            describe(made, info(first).at_same_place(carries_gradient=carries), value)
            for reader, source in own:
                reader.replace_input_with(source, made)
        for node in {source for _, source in facts.readers[parameter]}:
            whole = tensors(node)[0]
            part = (*whole.shape[: shard.dim], whole.shape[shard.dim] // shard.replicas, *whole.shape[shard.dim + 1 :])
            node.meta["val"] = torch.empty(part, dtype=whole.dtype, device="meta")


def _before(graph: ModelGraph, spec: ParameterSpec) -> TensorShard:
    return graph.shards.get(spec.name) or TensorShard(dim=0, blocks=(spec.shape[0],), count=1)


def _reasons(facts: GraphFacts, component: str, degrees: Mapping[str, int]) -> dict[ParameterSpec, str]:
    found: dict[ParameterSpec, str] = {}
    for spec in facts.graph.parameters:
        reading = {info(reader).component for reader, _ in facts.readers.get(spec.name, ())}
        if component in reading:
            found[spec] = _whole(spec, _before(facts.graph, spec), reading, degrees, degrees[component])
    return found


def _summary(reasons: Mapping[ParameterSpec, str]) -> str:
    shared = [spec for spec, reason in reasons.items() if not reason]
    everything = sum(spec.num_elements for spec in reasons)
    share = f", {sum(spec.num_elements for spec in shared) / everything:.1%} of all elements" if everything else ""
    whole = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).items() if reason)
    return f"share {len(shared)} parameters{share}{f'; whole: {whole}' if whole else ''}"


def _whole(
    spec: ParameterSpec, shard: TensorShard, reading: set[str | None], degrees: Mapping[str, int], degree: int
) -> str:
    """Return the reason why `degree` replicas cannot each hold a part of a parameter; "" if they can.

    Args:
        shard: sharding of the parameter over tensor-parallel ranks.
        reading: components that read the parameter.
        degrees: component -> number of its replicas that shard.
    """
    if len(spec.shape) < 2:
        return "vectors"
    if any(name is None or degrees.get(name) != degree for name in reading):
        return "read by components of other replicas too"
    if any(block % (shard.count * degree) for block in shard.blocks):
        each = f" on each of {shard.count} ranks" if shard.count > 1 else ""
        return f"whose {'rows' if shard.dim == 0 else 'columns'}{each} do not divide by {degree}"
    return ""
