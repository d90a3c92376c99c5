"""`TemplatePlanner`: what the coordinator asks when the membership changes, answered with templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mmcompile.planner.resilience import pipelines as templates
from mmcompile.planner.resilience.copies import plan_copies
from mmcompile.planner.resilience.instantiate import instantiate
from mmcompile.planner.resilience.job import Job, LayerId
from mmcompile.planner.resilience.pipelines import Pipeline
from mmcompile.planner.resilience.reconfigure import reconfigure
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.control.membership_planner import Change, Decision, Planned, StateLost, Stop, Wait
from mmcompile.runtime.elastic.generation_layout import held_ranges, layers_by_device, ranges_held
from mmcompile.runtime.elastic.generation_plan import Device, GenerationPlan, Held, IdleNode, LayerCopy, NodePipeline

Holdings = Mapping[Device, frozenset[LayerId]]


@dataclass(frozen=True, kw_only=True)
class TemplatePlanner:
    """Plans generations (`mmcompile.runtime.control.membership_planner.Planner`).

    Args:
        resilience: templates and promise.
        start_nodes: that must be there before training starts.
        checkpoints: folder of the last checkpoint, read when state is lost.
    """

    resilience: Resilience
    start_nodes: int
    checkpoints: Path

    @cached_property
    def _job(self) -> Job:
        return self.resilience.job

    def plan(self, change: Change) -> Decision:
        count = self.resilience.devices_per_node
        if wrong := [
            node for node, workers in zip(change.members, change.num_workers, strict=True) if workers != count
        ]:
            return Stop(
                reason=f"{', '.join(wrong)} have another number of workers than the plan's {count} devices a node"
            )
        if change.previous_payload is None:
            return self._start(change)
        return self._next(change, GenerationPlan.decode(change.previous_payload))

    def _start(self, change: Change) -> Decision:
        """All state is the model's, or that of a checkpoint."""
        wanted = max(self.start_nodes, self._job.min_nodes)
        if len(change.members) < wanted:
            return Wait(reason=f"{len(change.members)} of {wanted} nodes are there")
        return self._fresh(change, step=change.committed or None)

    def _fresh(self, change: Change, *, step: int | None) -> Planned | Stop:
        """
        Args:
            step: of the checkpoint to read; None for the model's own state.
        """
        found = instantiate(self._job, range(len(change.members)))
        if isinstance(found, templates.Stop):
            return Stop(reason=found.reason)
        names = dict(enumerate(change.members))
        return Planned(payload=replace(_named(found, names, committed=step or 0), checkpoint=step).encode())

    def _next(self, change: Change, before: GenerationPlan) -> Decision:
        held = self._held(change, before)
        ids = {name: number for number, name in enumerate(change.previous)}
        # A node that comes back is a new one: what it held is gone.
        joined = {name: len(ids) + number for number, name in enumerate(change.joined)}
        names = {number: name for name, number in (*ids.items(), *joined.items())}
        staying = [name for name in change.members if name not in change.joined]
        found = reconfigure(
            self._job,
            [self._pipeline(pipeline, ids) for pipeline in before.pipelines],
            lost=[ids[name] for name in change.previous if name not in staying],
            draining=[ids[name] for name in change.draining if name in staying],
            joined=list(joined.values()),
            spares=[ids[idle.node] for idle in before.idle],
            holdings={
                ids[name]: self._mask(layers for device, layers in held.items() if device.node == name)
                for name in staying
            },
        )
        if isinstance(found, templates.StateLost):
            return self._from_checkpoint(change, found)
        if isinstance(found, templates.Stop):
            if not change.members:
                return Stop(reason=found.reason)
            return Planned(payload=self._farewell(change, found.reason, held).encode())
        plan = _named(found, names, committed=change.committed)
        return Planned(payload=self._with_copies(plan, change, held).encode())

    def _from_checkpoint(self, change: Change, lost: templates.StateLost) -> Decision:
        saved = checkpoint.saved(self.checkpoints)
        layers = tuple(str(layer) for layer in lost.layers)
        if saved is None and change.committed == 0:
            # Nothing was learned yet.
            return self._start(change)
        if saved is None:
            return StateLost(layers=layers, checkpoint_step=None, cursor=None, payload="")
        if len(change.members) < self._job.min_nodes:
            # Nobody holds all state, so there is nothing to save: nodes may come back.
            return Wait(reason=f"{lost.reason}; {len(change.members)} of {self._job.min_nodes} nodes are there")
        fresh = self._fresh(change, step=saved.step)
        if isinstance(fresh, Stop):
            return fresh
        return StateLost(layers=layers, checkpoint_step=saved.step, cursor=saved.cursor, payload=fresh.payload)

    def _farewell(self, change: Change, reason: str, held: Holdings) -> GenerationPlan:
        """Too few nodes are left: they save what they hold."""
        return GenerationPlan(
            pipelines=(),
            idle=tuple(IdleNode(node=node, reason="training ends") for node in change.members),
            rule="stop",
            reason=reason,
            iteration_s=0.0,
            committed=change.committed,
            former=self._former(change.members, held, {}),
            farewell=reason,
        )

    def _held(self, change: Change, before: GenerationPlan) -> Holdings:
        """What the workers of members that stay hold at the last committed step."""
        held = layers_by_device(before, self._job)
        if change.committed == before.committed:
            # Nothing was committed since, so nothing that moved away was dropped or is old.
            for node, devices in before.former.items():
                for index, layers in enumerate(devices):
                    device = Device(node=node, index=index)
                    held[device] = held.get(device, frozenset()) | ranges_held(layers)
        staying = set(change.members) - set(change.joined)
        return {device: layers for device, layers in held.items() if device.node in staying}

    def _with_copies(self, plan: GenerationPlan, change: Change, held: Holdings) -> GenerationPlan:
        """Copies between workers: what a node needs can be on another device of its own."""
        needed = layers_by_device(plan, self._job)
        devices = sorted(needed.keys() | held.keys())
        number = {device: index for index, device in enumerate(devices)}
        copies = plan_copies(
            self._job,
            {number[device]: self._mask([layers]) for device, layers in needed.items()},
            {number[device]: self._mask([layers]) for device, layers in held.items()},
        )
        return replace(
            plan,
            copies=tuple(
                LayerCopy(
                    layer=copy.layer,
                    source=devices[copy.source],
                    destination=devices[copy.destination],
                    num_bytes=copy.num_bytes,
                    round=copy.round,
                )
                for copy in copies
            ),
            former=self._former(change.members, held, needed),
        )

    def _former(self, members: Iterable[str], held: Holdings, needed: Holdings) -> dict[str, tuple[Held, ...]]:
        nothing: frozenset[LayerId] = frozenset()
        found: dict[str, tuple[Held, ...]] = {}
        for node in members:
            devices = [Device(node=node, index=index) for index in range(self.resilience.devices_per_node)]
            beside = [held.get(device, nothing) - needed.get(device, nothing) for device in devices]
            if any(beside):
                found[node] = tuple(held_ranges(layers) for layers in beside)
        return found

    def _pipeline(self, pipeline: NodePipeline, ids: Mapping[str, int]) -> Pipeline:
        return Pipeline(
            template=self._job.by_size[len(pipeline.nodes)],
            nodes=tuple(ids[node] for node in pipeline.nodes),
            num_microbatches=pipeline.num_microbatches,
        )

    def _mask(self, layers: Iterable[frozenset[LayerId]]) -> np.ndarray:
        """bool [layers of the job]."""
        mask = np.zeros(len(self._job.layers), dtype=bool)
        for some in layers:
            mask[[self._index[layer] for layer in some]] = True
        return mask

    @cached_property
    def _index(self) -> Mapping[LayerId, int]:
        return {layer: index for index, layer in enumerate(self._job.layers)}


def _named(found: templates.Membership, names: Mapping[int, str], *, committed: int) -> GenerationPlan:
    return GenerationPlan(
        pipelines=tuple(
            NodePipeline(nodes=_names(pipeline.nodes, names), num_microbatches=pipeline.num_microbatches)
            for pipeline in found.pipelines
        ),
        idle=tuple(IdleNode(node=names[spare.node], reason=spare.reason) for spare in found.spares),
        rule=found.rule,
        reason=found.reason,
        iteration_s=found.iteration_s,
        committed=committed,
    )


def _names(nodes: Sequence[int], names: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(names[node] for node in nodes)
