"""Baselines that templates are compared with: checkpoint and restart, and redundant computation, on equal pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.replay.replay_run import Busy, ReplayConstants, ReplayRun, TimeKind
from mmcompile.planner.resilience.template import Template


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineGrid:
    """Equal pipelines that share a step evenly: the layout of a system without templates."""

    template: Template
    num_pipelines: int
    num_microbatches: int
    """Number of microbatches of each pipeline in a step."""

    @property
    def step_s(self) -> float:
        """Seconds of a step of the pipelines."""
        return self.template.iteration_s(self.num_microbatches)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in pipelines."""
        return self.template.num_nodes * self.num_pipelines


def fastest_grid(job: Job, num_nodes: int) -> PipelineGrid | None:
    """Return the grid with the shortest step, ties to fewer nodes; None if the nodes are too few for a pipeline."""
    grids = [
        PipelineGrid(template=template, num_pipelines=count, num_microbatches=ceil(job.num_microbatches / count))
        for template in job.templates
        for count in range(1, min(num_nodes // template.num_nodes, job.num_microbatches) + 1)
    ]
    return min(grids, key=lambda grid: (grid.step_s, grid.num_nodes), default=None)


@final
class RestartRun(ReplayRun):
    """Replay of checkpoint and restart (as Varuna): after every loss, it restarts the best grid from the last checkpoint.

    New nodes are used from the next checkpoint on, and only if the step gets shorter.
    """

    name = "checkpoint-restart"
    joins_after_save = True
    _running: Sequence[int] = ()
    _idle: Sequence[int] = ()

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        """Restart without lost nodes; return delays (kind, seconds) before the next step, None if no node was in use."""
        self._idle = [node for node in self._idle if node not in nodes]
        if set(nodes).isdisjoint(self._running):
            return None
        self.roll_back()
        return self._place([node for node in (*self._running, *self._idle) if node not in nodes])

    def join(self, nodes: Sequence[int]) -> Busy:
        """Restart with new nodes if the step gets shorter; return delays (kind, seconds) before the next step."""
        alive = [*self._running, *self._idle, *nodes]
        grid = fastest_grid(self.job, len(alive))
        if self.step_s and grid is not None and grid.step_s >= self.step_s:
            self._idle = [*self._idle, *nodes]
            return ()
        return self._place(alive)

    def _place(self, alive: list[int]) -> Busy:
        grid = fastest_grid(self.job, len(alive))
        self.step_s = 0.0 if grid is None else grid.step_s
        used = 0 if grid is None else grid.num_nodes
        self._running, self._idle = alive[:used], alive[used:]
        return () if grid is None else ((TimeKind.PAUSED, self.constants.restart_s + self.state_s),)


@final
class RedundantRun(ReplayRun):
    """Replay of redundant computation (as Bamboo): every node also computes for its neighbour in a ring, and replaces it if lost.

    A pipeline with a replaced node takes twice its time for a microbatch. A pipeline that loses two neighbours is given up. When
    new nodes shorten the step, all nodes regroup; without any pipeline left, the last checkpoint is loaded.
    """

    name = "redundant computation"

    def __init__(self, job: Job, microbatch_samples: float, constants: ReplayConstants, save_interval_s: float) -> None:
        super().__init__(job, microbatch_samples, constants, save_interval_s)
        self.useful_share = 1 / constants.redundancy_slowdown
        self._grid: PipelineGrid | None = None
        self._rings: list[list[int | None]] = []
        self._standby: list[int] = []

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        """Let neighbours replace lost nodes; return delays (kind, seconds) before the next step, None if no node was in use."""
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
        return ((TimeKind.PAUSED, self.constants.rendezvous_s),)

    def join(self, nodes: Sequence[int]) -> Busy:
        """Regroup with new nodes if that shortens the step; return delays (kind, seconds) before the next step."""
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
        return ((TimeKind.PAUSED, pause_s),)

    def _set_step(self) -> None:
        assert self._grid is not None
        # Pipelines share the batch evenly, and the step ends with the slowest one.
        template, share = self._grid.template, ceil(self.job.num_microbatches / len(self._rings))
        holes = any(None in ring for ring in self._rings)
        step_s = template.iteration_s(share) + (share * template.slowest_s if holes else 0.0)
        self.step_s = self.constants.redundancy_slowdown * step_s


def _stands(ring: Sequence[int | None]) -> bool:
    """Return True if a ring of nodes can still train: a node is left, and no two neighbours are missing (None)."""
    missing = [node is None for node in ring]
    pairs = zip(missing, [*missing[1:], missing[0]], strict=True)
    return not any(one and other for one, other in pairs)
