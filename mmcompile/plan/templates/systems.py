"""Three ways to train on nodes that come and go: templates, checkpoint and restart, redundant computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

import msgspec

from mmcompile.plan.templates.copies import busiest_bytes
from mmcompile.plan.templates.instantiate import instantiate
from mmcompile.plan.templates.job import Job
from mmcompile.plan.templates.membership import Membership, Pipeline, StateLost, Stop
from mmcompile.plan.templates.reconfigure import reconfigure
from mmcompile.plan.templates.replay import Busy, ReplayConstants, Run, Spent, SystemReplay, save_interval_s
from mmcompile.plan.templates.template import Template
from mmcompile.plan.templates.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReplay:
    """All systems over one trace."""

    trace: str
    duration_s: float
    max_nodes: int
    num_added: int
    num_removed: int
    fault_tolerance: int
    constants: ReplayConstants
    save_interval_s: float
    """Between the checkpoints of checkpoint and restart: the best of several, around what Young's rule gives for the trace."""
    systems: tuple[SystemReplay, ...]

    def to_json(self) -> dict[str, object]:
        """With the figures that follow from the spans, and without the spans."""
        return msgspec.to_builtins(self) | {
            "systems": [
                {
                    "name": one.name,
                    "useful": one.useful,
                    "samples": one.samples,
                    "samples_per_s": one.samples_per_s,
                    "lost_samples": one.lost_samples,
                    "num_pauses": one.num_pauses,
                    "seconds": {spent.value: one.seconds(spent) for spent in Spent},
                    "curve": one.curve(CURVE_WINDOWS),
                }
                for one in self.systems
            ]
        }


CURVE_WINDOWS = 120
"""Points of a throughput curve."""
_INTERVALS = (0.25, 0.5, 1.0, 2.0)


def replay_trace(
    job: Job, trace: Trace, *, microbatch_samples: float, constants: ReplayConstants | None = None
) -> TraceReplay:
    """Play a job over a trace in virtual time, with templates and with two baselines that use the same templates' times.

    Args:
        job: templates, batch and promise.
        trace: as read.
        microbatch_samples: samples of a microbatch.
        constants: what is assumed.
    """
    known = constants or ReplayConstants()
    ready = trace.delayed(known.creation_s)
    templates = TemplateRun(job, microbatch_samples, known, known.safety_interval_s).play(ready)
    redundant = RedundantRun(job, microbatch_samples, known, known.safety_interval_s).play(ready)
    usual_s = save_interval_s(trace, int(job.bytes_of.sum()) / known.store_bytes_per_s)
    intervals = [factor * usual_s for factor in _INTERVALS]
    restarts = [RestartRun(job, microbatch_samples, known, interval_s).play(ready) for interval_s in intervals]
    best = max(range(len(restarts)), key=lambda index: restarts[index].samples)
    return TraceReplay(
        trace=trace.name,
        duration_s=trace.duration_s,
        max_nodes=trace.max_nodes,
        num_added=trace.num_added,
        num_removed=trace.num_removed,
        fault_tolerance=job.fault_tolerance,
        constants=known,
        save_interval_s=intervals[best],
        systems=(templates, restarts[best], redundant),
    )


@final
class TemplateRun(Run):
    """Ours: regroup, copy what is missing, do the step again. No committed sample is lost while each layer has a holder."""

    name = "templates"

    def __init__(self, job: Job, microbatch_samples: float, constants: ReplayConstants, save_interval_s: float) -> None:
        super().__init__(job, microbatch_samples, constants, save_interval_s)
        self._pipelines: tuple[Pipeline, ...] = ()
        self._spares: list[int] = []

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        if not self._pipelines or not self._runs(nodes):
            self._spares = [node for node in self._spares if node not in nodes]
            return None
        alive = [node for node in (*self._running(), *self._spares) if node not in nodes]
        found = reconfigure(self.job, self._pipelines, lost=nodes, spares=self._spares)
        if isinstance(found, StateLost):
            self.roll_back()
            return self._begin(alive)
        return self._take(found, alive)

    def join(self, nodes: Sequence[int]) -> Busy:
        if not self._pipelines:
            return self._begin([*self._spares, *nodes])
        alive = [*self._running(), *self._spares, *nodes]
        return self._take(reconfigure(self.job, self._pipelines, joined=nodes, spares=self._spares), alive)

    def _begin(self, nodes: Sequence[int]) -> Busy:
        """From the last checkpoint."""
        found = instantiate(self.job, nodes)
        if isinstance(found, Stop):
            self._pipelines, self._spares = (), list(nodes)
            self.step_s = 0.0
            return ()
        self._take(found, nodes)
        return ((Spent.PAUSED, self.constants.restart_s + self.state_s),)

    def _take(self, found: Membership | Stop | StateLost, alive: Sequence[int]) -> Busy:
        if not isinstance(found, Membership):
            self._pipelines, self._spares = (), list(alive)
            self.step_s = 0.0
            return ((Spent.SAVING, self.state_s),)
        same = found.pipelines == self._pipelines
        self._pipelines, self._spares = found.pipelines, [spare.node for spare in found.spares]
        self.step_s = found.iteration_s
        copy_s = busiest_bytes(found.copies) / self.constants.bytes_per_s
        return () if same else ((Spent.PAUSED, self.constants.reconfigure_s + copy_s),)

    def _running(self) -> list[int]:
        return [node for pipeline in self._pipelines for node in pipeline.nodes]

    def _runs(self, nodes: Sequence[int]) -> bool:
        return not set(nodes).isdisjoint(self._running())


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Equal pipelines that share a step evenly: what a system without templates runs."""

    template: Template
    num_pipelines: int
    num_microbatches: int
    """Of one pipeline."""

    @property
    def step_s(self) -> float:
        return self.template.iteration_s(self.num_microbatches)

    @property
    def num_nodes(self) -> int:
        return self.template.num_nodes * self.num_pipelines


def fastest_grid(job: Job, num_nodes: int) -> Grid | None:
    """The grid with the shortest step, ties to fewer nodes; None where the nodes hold no pipeline."""
    grids = [
        Grid(template=template, num_pipelines=count, num_microbatches=ceil(job.num_microbatches / count))
        for template in job.templates
        for count in range(1, min(num_nodes // template.num_nodes, job.num_microbatches) + 1)
    ]
    return min(grids, key=lambda grid: (grid.step_s, grid.num_nodes), default=None)


@final
class RestartRun(Run):
    """Checkpoints, and a restart on the best grid from the last one after every loss (as Varuna does).

    New nodes are taken at the next checkpoint, and only where the step gets shorter.
    """

    name = "checkpoint-restart"
    joins_after_save = True

    def __init__(self, job: Job, microbatch_samples: float, constants: ReplayConstants, save_interval_s: float) -> None:
        super().__init__(job, microbatch_samples, constants, save_interval_s)
        self._running: list[int] = []
        self._idle: list[int] = []

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        self._idle = [node for node in self._idle if node not in nodes]
        if set(nodes).isdisjoint(self._running):
            return None
        self.roll_back()
        return self._place([node for node in (*self._running, *self._idle) if node not in nodes])

    def join(self, nodes: Sequence[int]) -> Busy:
        alive = [*self._running, *self._idle, *nodes]
        grid = fastest_grid(self.job, len(alive))
        if self.step_s and grid is not None and grid.step_s >= self.step_s:
            self._idle += nodes
            return ()
        return self._place(alive)

    def _place(self, alive: list[int]) -> Busy:
        grid = fastest_grid(self.job, len(alive))
        self.step_s = 0.0 if grid is None else grid.step_s
        used = 0 if grid is None else grid.num_nodes
        self._running, self._idle = alive[:used], alive[used:]
        return () if grid is None else ((Spent.PAUSED, self.constants.restart_s + self.state_s),)


@final
class RedundantRun(Run):
    """Every node also computes for its neighbour in a ring, and stands in for it when it is lost (as Bamboo does).

    A pipeline with stand-ins takes twice its time for a microbatch. One that loses two neighbours is given up. When new nodes
    heal the holes or shorten the step, all regroup; without any pipeline left, the last checkpoint is loaded.
    """

    name = "redundant computation"

    def __init__(self, job: Job, microbatch_samples: float, constants: ReplayConstants, save_interval_s: float) -> None:
        super().__init__(job, microbatch_samples, constants, save_interval_s)
        self.useful_share = 1 / constants.redundancy_slowdown
        self._grid: Grid | None = None
        self._rings: list[list[int | None]] = []
        self._standby: list[int] = []

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        gone = set(nodes)
        self._standby = [node for node in self._standby if node not in gone]
        if gone.isdisjoint(node for ring in self._rings for node in ring):
            return None
        rings = [[None if node in gone else node for node in ring] for ring in self._rings]
        self._rings = [ring for ring in rings if _stands(ring)]
        self._standby += [node for ring in rings if not _stands(ring) for node in ring if node is not None]
        if not self._rings:
            self.roll_back()
            return self._regroup(self._standby, self.constants.restart_s + self.state_s)
        self._set_step()
        return ((Spent.PAUSED, self.constants.rendezvous_s),)

    def join(self, nodes: Sequence[int]) -> Busy:
        self._standby += nodes
        alive = [node for ring in self._rings for node in ring if node is not None] + self._standby
        grid = fastest_grid(self.job, len(alive))
        if self._rings and grid is not None and self.constants.redundancy_slowdown * grid.step_s >= self.step_s:
            return ()
        pause_s = self.constants.rendezvous_s if self._rings else self.constants.restart_s + self.state_s
        return self._regroup(alive, pause_s)

    def _regroup(self, alive: Sequence[int], pause_s: float) -> Busy:
        self._grid = fastest_grid(self.job, len(alive))
        if self._grid is None:
            self._rings, self._standby = [], list(alive)
            self.step_s = 0.0
            return ()
        size, used = self._grid.template.num_nodes, self._grid.num_nodes
        self._rings = [list(alive[start : start + size]) for start in range(0, used, size)]
        self._standby = list(alive[used:])
        self._set_step()
        return ((Spent.PAUSED, pause_s),)

    def _set_step(self) -> None:
        """The slowest pipeline's step, the batch being shared evenly."""
        assert self._grid is not None
        template, share = self._grid.template, ceil(self.job.num_microbatches / len(self._rings))
        holes = any(None in ring for ring in self._rings)
        step_s = template.iteration_s(share) + (share * template.slowest_s if holes else 0.0)
        self.step_s = self.constants.redundancy_slowdown * step_s


def _stands(ring: Sequence[int | None]) -> bool:
    """No node is missing beside another in the ring, and someone is left."""
    missing = [node is None for node in ring]
    pairs = zip(missing, [*missing[1:], missing[0]], strict=True)
    return not any(one and other for one, other in pairs)
