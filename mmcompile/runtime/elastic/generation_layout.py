"""`GenerationLayout`: places every layer of every pipeline of a generation on the rank that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.planner.plan.by_layers import layer_name
from mmcompile.planner.plan.placement import PlacedStage, Placement, replica_name
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.resilience.job import Job, LayerId, LayerRuns, WorkerId
from mmcompile.planner.resilience.membership import NodePipeline
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.elastic.generation_plan import GenerationPlan


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """Places the layers of a generation on workers: which worker runs which layers, with which rank.

    Args:
        layers: plan in which every layer is a stage.
        nodes: nodes of the generation in order of ranks.
    """

    plan: GenerationPlan
    resilience: Resilience
    layers: Plan
    nodes: tuple[str, ...]

    @property
    def ranks(self) -> dict[WorkerId, int]:
        """Rank of each worker, including workers of idle nodes."""
        count = self.resilience.devices_per_node
        return {
            WorkerId(node=node, index=index): position * count + index
            for position, node in enumerate(self.nodes)
            for index in range(count)
        }

    def layers_of(self, device: WorkerId) -> frozenset[LayerId]:
        """Return the layers that a worker runs in this generation; an empty set for an idle worker."""
        return self._layers.get(device, frozenset())

    @cached_property
    def _layers(self) -> dict[WorkerId, frozenset[LayerId]]:
        return layers_by_worker(self.plan, self.resilience.job)

    def placement(self) -> Placement:
        """Return the placed stages of all replicas, as one balance group; each pipeline is a replica."""
        ranks = self.ranks
        depth = {stage.name: stage.depth for stage in self.layers.stages}
        order = {name: place for place, name in enumerate(depth)}
        several = len(self.plan.pipelines) > 1
        stages: list[PlacedStage] = []
        for replica, pipeline in enumerate(self.plan.pipelines):
            layers = _placed_layers(self.resilience.job, pipeline)
            placed = [(layer_name(layer), ranks[device]) for layer, device in layers]
            stages += (
                PlacedStage(
                    name=replica_name(name, replica) if several else name,
                    ranks=(rank,),
                    depth=depth[name],
                    program=name if several else "",
                    replica=replica,
                )
                for name, rank in sorted(placed, key=lambda item: order[item[0]])
            )
        return Placement(
            stages=tuple(stages),
            num_microbatches=max(pipeline.num_microbatches for pipeline in self.plan.pipelines),
            num_replicas=(len(self.plan.pipelines),),
        )


def layers_by_worker(plan: GenerationPlan, job: Job) -> dict[WorkerId, frozenset[LayerId]]:
    """Return the layers that each worker runs, by worker; idle workers are absent."""
    found: dict[WorkerId, set[LayerId]] = {}
    for pipeline in plan.pipelines:
        for layer, device in _placed_layers(job, pipeline):
            found.setdefault(device, set()).add(layer)
    return {device: frozenset(layers) for device, layers in found.items()}


def _placed_layers(job: Job, pipeline: NodePipeline[str]) -> Iterator[tuple[LayerId, WorkerId]]:
    for stage in job.by_size[len(pipeline.nodes)].stages:
        node, index = divmod(stage.devices[0], job.devices_per_node)
        for layer in range(stage.first, stage.last):
            yield LayerId(chain=stage.chain, index=layer), WorkerId(node=pipeline.nodes[node], index=index)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineBalancer(Balancer):
    """Deals the microbatches of another balancer to pipelines, each pipeline getting consecutive ones.

    The content of a microbatch does not depend on the pipelines, so a step computes the same for any membership.
    """

    name: ClassVar[str] = "dealt"

    inner: Balancer
    shares: tuple[int, ...]
    """Number of microbatches of each pipeline, in order."""

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Assign samples to microbatches by the inner balancer, and deal these microbatches to the pipelines."""
        return self.explained(costs, grid)[0]

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return `assign`'s result, and the inner balancer's reason."""
        whole = Grid(num_replicas=(1,) * len(grid.num_replicas), num_microbatches=sum(self.shares))
        found, reason = self.inner.explained(costs, whole)
        replica_of = np.repeat(np.arange(len(self.shares)), self.shares)
        slot_of = np.concatenate([np.arange(share) for share in self.shares])
        present = found.microbatch >= 0
        dealt = Assignment(
            components=found.components,
            grid=grid,
            replica=np.where(present, replica_of[found.microbatch], found.replica),
            microbatch=np.where(present, slot_of[found.microbatch], found.microbatch),
        )
        return dealt, reason


def shares_of(pipelines: Sequence[NodePipeline[str]]) -> tuple[int, ...]:
    """Return the number of microbatches of each pipeline, in order."""
    return tuple(pipeline.num_microbatches for pipeline in pipelines)


def layers_in(runs: LayerRuns) -> frozenset[LayerId]:
    """Return the layers in the given ranges of each chain: {"vision": ((0, 2),)} -> layers 0 and 1 of "vision".

    Inverse of `layer_runs`.
    """
    return frozenset(
        LayerId(chain=chain, index=index)
        for chain, parts in runs.items()
        for first, last in parts
        for index in range(first, last)
    )
