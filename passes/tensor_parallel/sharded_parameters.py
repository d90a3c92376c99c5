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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from mmcompile.errors import ConfigError, PlanError
from mmcompile.ir.copy import copied
from mmcompile.ir.graph import META_KEY, ModelGraph, NodeInfo, ParameterSpec, info
from mmcompile.ir.tensor_shard import TensorShard
from mmcompile.kernels.process_groups import REPLICA_GROUP
from mmcompile.kernels.sharded_parameters.gather_ops import gather_parameter as gather_parameter
from mmcompile.passes.base import Fact, Rewrite
from mmcompile.passes.tensor_parallel.graph_facts import GraphFacts
from mmcompile.passes.values import tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedParameters(Rewrite):
    """Pass that shards parameters of components over their replicas.

    The sharded dim is 0 (rows), or the dim that tensor parallelism shards already. Parameters stay whole on every
    replica if they are vectors (norms, biases: few bytes, but a message each), if their sizes do not divide, or if a
    component with another number of replicas reads them too.

    Raises (in `run`):
        ConfigError: a component of `degrees` does not exist.
        PlanError: no parameter of any component can be shared.
    """

    name: ClassVar[str] = "sharded-parameters"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED, Fact.GRADIENT_FLOW)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.ANNOTATED,)

    degrees: tuple[tuple[str, int], ...]
    """Pairs (component, number of replicas that shard its parameters); other components hold theirs whole."""
    group: str = REPLICA_GROUP
    """Name of the process group of the replicas of a stage; a process is in at most one such group."""

    def __post_init__(self) -> None:
        twice = [name for name, number in Counter(name for name, _ in self.degrees).items() if number > 1]
        if twice:
            raise ConfigError(f"component {twice[0]} is given several numbers of replicas; give one")
        for name, degree in self.degrees:
            if degree < 2:
                raise ConfigError(f"{name} has {degree} replicas, and parameters are shared by 2 or more: leave it out")

    def run(self, graph: ModelGraph) -> ModelGraph:
        """Return the graph with `gather_parameter` nodes and sharded parameters."""
        names = [component.name for component in graph.components]
        for name, _ in self.degrees:
            if name not in names:
                raise ConfigError(f"no component {name!r} to shard; components are {', '.join(names)}")
        made = copied(graph)
        facts = GraphFacts(graph=made)
        shards: dict[str, TensorShard] = {}
        lines: list[str] = []
        for name, degree in self.degrees:
            own = _Parameters.of(facts, name, dict(self.degrees))
            lines.append(f"{self.name}: {degree} replicas of {name} {own.summary()}")
            shards |= {spec.name: _before(made, spec).spread(degree) for spec in own.shared}
        if not shards:
            raise PlanError(f"no parameter can be shared, so leave out fsdp: {'; '.join(lines)}")
        for parameter, shard in shards.items():
            self._gather(facts, parameter, shard)
        made.module.graph.lint()
        made.module.recompile()
        return replace(made, shards={**made.shards, **shards}, rewrites=(*made.rewrites, *lines))

    def _gather(self, facts: GraphFacts, parameter: str, shard: TensorShard) -> None:
        """Insert one node that gathers a parameter, sharded as `shard`, in each layer that reads it."""
        readers: dict[tuple[str | None, int], list[tuple[fx.Node, fx.Node]]] = {}
        for reader, source in sorted(facts.readers[parameter], key=lambda pair: pair[0]):
            readers.setdefault((info(reader).component, info(reader).layer), []).append((reader, source))
        for own in readers.values():
            first, source = own[0]
            with first.graph.inserting_before(first):
                target = torch.ops.mmcompile.gather_parameter.default
                blocks = [block * shard.replicas // shard.count for block in shard.blocks]
                made = first.graph.call_function(target, (source, self.group, shard.replicas, shard.dim, blocks))
            note, whole = info(first), tensors(source)[0]
            made.meta = {
                META_KEY: NodeInfo(
                    component=note.component,
                    layer=note.layer,
                    module_path=note.module_path,
                    carries_gradient=facts.carries(source) and note.carries_gradient,
                ),
                "val": torch.empty(whole.shape, dtype=whole.dtype, device="meta"),
                "module_path": note.module_path,
            }
            for reader, source in own:
                reader.replace_input_with(source, made)
        for node in {source for _, source in facts.readers[parameter]}:
            whole = tensors(node)[0]
            node.meta["val"] = torch.empty(_shared(whole.shape, shard), dtype=whole.dtype, device="meta")


def _before(graph: ModelGraph, spec: ParameterSpec) -> TensorShard:
    """Return the tensor-parallel sharding of a parameter, before it is sharded over replicas."""
    return graph.shards.get(spec.name) or TensorShard(dim=0, blocks=(spec.shape[0],), count=1)


def _shared(shape: Sequence[int], shard: TensorShard) -> tuple[int, ...]:
    """Return the shape of a replica's part of a tensor-parallel rank's tensor, which has shape `shape` before it is divided."""
    return (*shape[: shard.dim], shape[shard.dim] // shard.replicas, *shape[shard.dim + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameters:
    """Sorts the parameters that one component reads into those that its replicas shard and those that stay whole."""

    shared: Sequence[ParameterSpec]
    whole: Sequence[tuple[ParameterSpec, str]] = field(default=())
    """Parameters that stay whole: (parameter, reason)."""

    @classmethod
    def of(cls, facts: GraphFacts, component: str, degrees: Mapping[str, int]) -> _Parameters:
        shared: list[ParameterSpec] = []
        whole: list[tuple[ParameterSpec, str]] = []
        for spec in facts.graph.parameters:
            reading = {info(reader).component for reader, _ in facts.readers.get(spec.name, ())}
            if component in reading:
                reason = _whole(spec, _before(facts.graph, spec), reading, degrees, degrees[component])
                if reason:
                    whole.append((spec, reason))
                else:
                    shared.append(spec)
        return cls(shared=shared, whole=whole)

    def reasons(self) -> str:
        counts = Counter(reason for _, reason in self.whole)
        return ", ".join(f"{number} {reason}" for reason, number in counts.items()) or "it reads none"

    def summary(self) -> str:
        elements = sum(spec.num_elements for spec in self.shared)
        everything = elements + sum(spec.num_elements for spec, _ in self.whole)
        kept = f"; whole: {self.reasons()}" if self.whole else ""
        share = f", {elements / everything:.1%} of all elements" if everything else ""
        return f"share {len(self.shared)} parameters{share}{kept}"


def _whole(
    spec: ParameterSpec, shard: TensorShard, reading: set[str | None], degrees: Mapping[str, int], degree: int
) -> str:
    """Return the reason why every replica holds all of a rank's part of a parameter; "" if the replicas shard it."""
    if len(spec.shape) < 2:
        return "vectors"
    if any(name is None or degrees.get(name) != degree for name in reading):
        return "read by components of other replicas too"
    if any(block % (shard.count * degree) for block in shard.blocks):
        each = f" on each of {shard.count} ranks" if shard.count > 1 else ""
        return f"whose {'rows' if shard.dim == 0 else 'columns'}{each} do not divide by {degree}"
    return ""
