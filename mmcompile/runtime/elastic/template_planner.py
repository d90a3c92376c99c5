"""`TemplatePlanner`: the coordinator's planner, which answers every membership change with pipelines made from templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mmcompile.planner.resilience.copies import plan_copies
from mmcompile.planner.resilience.instantiate import instantiate
from mmcompile.planner.resilience.job import Job, LayerId, LayerRuns, WorkerId, layer_runs
from mmcompile.planner.resilience.membership import (
    Decision,
    MembershipChange,
    MembershipPlan,
    Planned,
    Spare,
    StateLost,
    Stop,
    Wait,
)
from mmcompile.planner.resilience.reconfigure import reconfigure
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.elastic.generation_layout import layers_by_worker, layers_in
from mmcompile.runtime.elastic.generation_plan import GenerationPlan

_Held = Mapping[WorkerId, frozenset[LayerId]]
_NOTHING: frozenset[LayerId] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TemplatePlanner:
    """Plans the pipelines of each generation from templates (a `mmcompile.runtime.control.membership_view.Planner`).

    Args:
        start_nodes: number of nodes that must be connected before training starts.
        checkpoints: folder of the last checkpoint, read when state is lost.
    """

    resilience: Resilience
    start_nodes: int
    checkpoints: Path

    @cached_property
    def _job(self) -> Job:
        return self.resilience.job

    def plan(self, change: MembershipChange) -> Decision:
        """Return the decision for a membership change: a plan, a wait, lost state, or the end."""
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

    def _start(self, change: MembershipChange) -> Decision:
        wanted = max(self.start_nodes, self._job.min_nodes)
        if len(change.members) < wanted:
            return Wait(reason=f"{len(change.members)} of {wanted} nodes are there")
        return self._fresh(change, step=change.committed or None)

    def _fresh(self, change: MembershipChange, *, step: int | None) -> Planned | Stop:
        """Return a plan for nodes that hold no state.

        Args:
            step: step of the checkpoint to read; None for the model's initial state.
        """
        found = instantiate(self._job, change.members)
        if isinstance(found, Stop):
            return found
        return Planned(payload=replace(_generation_plan(found, committed=step or 0), checkpoint=step).encode())

    def _next(self, change: MembershipChange, before: GenerationPlan) -> Decision:
        held = self._held(change, before)
        staying = [name for name in change.members if name not in change.joined]
        found = reconfigure(
            self._job,
            before.pipelines,
            lost=[name for name in change.previous if name not in staying],
            draining=[name for name in change.draining if name in staying],
            joined=change.joined,
            spares=[spare.node for spare in before.spares],
            holdings={
                name: self._mask(layers for worker, layers in held.items() if worker.node == name) for name in staying
            },
        )
        if isinstance(found, StateLost):
            return self._from_checkpoint(change, found)
        if isinstance(found, Stop):
            if not change.members:
                return found
            return Planned(payload=self._farewell(change, found.reason, held).encode())
        plan = _generation_plan(found, committed=change.committed)
        return Planned(payload=self._with_copies(plan, change, held).encode())

    def _from_checkpoint(self, change: MembershipChange, lost: StateLost) -> Decision:
        saved = checkpoint.saved(self.checkpoints)
        if saved is None and change.committed == 0:
            # Nothing was learned yet.
            return self._start(change)
        if saved is None:
            return lost
        if len(change.members) < self._job.min_nodes:
            # Nobody holds all state, so there is nothing to save: nodes may come back.
            return Wait(reason=f"{lost.reason}; {len(change.members)} of {self._job.min_nodes} nodes are there")
        fresh = self._fresh(change, step=saved.step)
        if isinstance(fresh, Stop):
            return fresh
        return replace(lost, checkpoint_step=saved.step, cursor=saved.cursor, payload=fresh.payload)

    def _farewell(self, change: MembershipChange, reason: str, held: _Held) -> GenerationPlan:
        """Return a plan that ends training, because too few nodes are left: they save the layers they hold."""
        return GenerationPlan(
            pipelines=(),
            spares=tuple(Spare(node=node, reason="training ends") for node in change.members),
            rule="stop",
            reason=reason,
            iteration_s=0.0,
            committed=change.committed,
            former=self._former(change.members, held, {}),
            farewell=reason,
        )

    def _held(self, change: MembershipChange, before: GenerationPlan) -> _Held:
        held = layers_by_worker(before, self._job)
        if change.committed == before.committed:
            # Nothing was committed since, so nothing that moved away was dropped or is old.
            for node, devices in before.former.items():
                for index, layers in enumerate(devices):
                    worker = WorkerId(node=node, index=index)
                    held[worker] = held.get(worker, _NOTHING) | layers_in(layers)
        staying = set(change.members) - set(change.joined)
        return {worker: layers for worker, layers in held.items() if worker.node in staying}

    def _with_copies(self, plan: GenerationPlan, change: MembershipChange, held: _Held) -> GenerationPlan:
        """Return a plan with layer copies added: each layer goes from a worker in `held` to the workers that need and lack it."""
        needed = layers_by_worker(plan, self._job)
        copies = plan_copies(
            self._job,
            {worker: self._mask([layers]) for worker, layers in needed.items()},
            {worker: self._mask([layers]) for worker, layers in held.items()},
        )
        return replace(plan, copies=copies, former=self._former(change.members, held, needed))

    def _former(self, members: Iterable[str], held: _Held, needed: _Held) -> dict[str, tuple[LayerRuns, ...]]:
        found: dict[str, tuple[LayerRuns, ...]] = {}
        for node in members:
            workers = [WorkerId(node=node, index=index) for index in range(self.resilience.devices_per_node)]
            beside = [held.get(worker, _NOTHING) - needed.get(worker, _NOTHING) for worker in workers]
            if any(beside):
                found[node] = tuple(layer_runs(sorted(layers)) for layers in beside)
        return found

    def _mask(self, layers: Iterable[frozenset[LayerId]]) -> np.ndarray:
        mask = np.zeros(len(self._job.layers), dtype=bool)
        for some in layers:
            mask[[self._index[layer] for layer in some]] = True
        return mask

    @cached_property
    def _index(self) -> Mapping[LayerId, int]:
        return {layer: index for index, layer in enumerate(self._job.layers)}


def _generation_plan(found: MembershipPlan[str], *, committed: int) -> GenerationPlan:
    return GenerationPlan(
        pipelines=found.pipelines,
        spares=found.spares,
        rule=found.rule,
        reason=found.reason,
        iteration_s=found.iteration_s,
        committed=committed,
    )
