"""Replay of training with templates over a trace of nodes that come and go, and of two baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import msgspec

from mmcompile.planner.resilience.copies import busiest_bytes
from mmcompile.planner.resilience.instantiate import instantiate
from mmcompile.planner.resilience.job import Job
from mmcompile.planner.resilience.membership import MembershipPlan, NodePipeline, StateLost, Stop
from mmcompile.planner.resilience.reconfigure import reconfigure
from mmcompile.planner.resilience.replay.replay_run import (
    Busy,
    ReplayConstants,
    ReplayRun,
    SystemReplay,
    TimeKind,
    save_interval_s,
)
from mmcompile.planner.resilience.replay.restart_baselines import RedundantRun, RestartRun
from mmcompile.planner.resilience.replay.spot_trace import SpotTrace

CURVE_WINDOWS = 120
"""Number of points of a throughput curve."""
_INTERVALS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Factors on Young's checkpoint interval that are tried for each simulated system; the best one counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceReplay:
    """Results of all systems over one trace."""

    trace: str
    duration_s: float
    max_nodes: int
    num_added: int
    num_removed: int
    fault_tolerance: int
    constants: ReplayConstants
    systems: tuple[SystemReplay, ...]

    def to_json(self) -> dict[str, object]:
        """Return the results as JSON data; each system has total seconds of each `TimeKind` and a curve of samples per second."""
        return msgspec.to_builtins(self) | {
            "systems": [
                {
                    "name": one.name,
                    "useful": one.useful,
                    "samples": one.samples,
                    "samples_per_s": one.samples_per_s,
                    "lost_samples": one.lost_samples,
                    "save_interval_s": one.save_interval_s,
                    "num_pauses": one.num_pauses,
                    "seconds": {spent.value: one.seconds(spent) for spent in TimeKind},
                    "curve": one.curve(CURVE_WINDOWS),
                }
                for one in self.systems
            ]
        }


def replay_trace(
    job: Job, trace: SpotTrace, *, microbatch_samples: float, constants: ReplayConstants | None = None
) -> TraceReplay:
    """Return the replay of a job over a trace, with templates and with two baselines that use the templates' times.

    Each system saves checkpoints at the interval with which it trains most samples.

    Args:
        constants: assumptions of the simulation; None: the defaults.
    """
    known = constants or ReplayConstants()
    ready = trace.delayed(known.creation_s)
    usual_s = save_interval_s(trace, int(job.bytes_of.sum()) / known.store_bytes_per_s)
    best = []
    for system in (TemplateRun, RestartRun, RedundantRun):
        runs = [system(job, microbatch_samples, known, part * usual_s).play(ready) for part in _INTERVALS]
        best.append(max(runs, key=lambda one: one.samples))
    return TraceReplay(
        trace=trace.name,
        duration_s=trace.duration_s,
        max_nodes=trace.max_nodes,
        num_added=trace.num_added,
        num_removed=trace.num_removed,
        fault_tolerance=job.fault_tolerance,
        constants=known,
        systems=tuple(best),
    )


@final
class TemplateRun(ReplayRun):
    """Replay of templates: regroup, copy missing layers, repeat the step.

    No committed sample is lost while each layer has a holder.
    """

    name = "templates"
    _pipelines: tuple[NodePipeline[int], ...] = ()
    _spares: Sequence[int] = ()

    def lose(self, nodes: Sequence[int]) -> Busy | None:
        """Reconfigure without lost nodes; return delays (kind, seconds) before the next step, None if no node was in use."""
        if set(nodes).isdisjoint(self._running()):
            self._spares = [node for node in self._spares if node not in nodes]
            return None
        alive = [node for node in (*self._running(), *self._spares) if node not in nodes]
        found = reconfigure(self.job, self._pipelines, lost=nodes, spares=self._spares)
        if isinstance(found, StateLost):
            self.roll_back()
            return self._begin(alive)
        return self._take(found, alive)

    def join(self, nodes: Sequence[int]) -> Busy:
        """Reconfigure with new nodes; return delays (kind, seconds) before the next step."""
        if not self._pipelines:
            return self._begin([*self._spares, *nodes])
        alive = [*self._running(), *self._spares, *nodes]
        return self._take(reconfigure(self.job, self._pipelines, joined=nodes, spares=self._spares), alive)

    def _begin(self, nodes: Sequence[int]) -> Busy:
        """Start new pipelines on `nodes` from the last checkpoint; return delays (kind, seconds) before the first step."""
        found = instantiate(self.job, nodes)
        if isinstance(found, Stop):
            self._pipelines, self._spares = (), list(nodes)
            self.step_s = 0.0
            return ()
        self._take(found, nodes)
        return ((TimeKind.PAUSED, self.constants.restart_s + self.state_s),)

    def _take(self, found: MembershipPlan[int] | Stop | StateLost, alive: Sequence[int]) -> Busy:
        if not isinstance(found, MembershipPlan):
            self._pipelines, self._spares = (), list(alive)
            self.step_s = 0.0
            return ((TimeKind.SAVING, self.state_s),)
        same = found.pipelines == self._pipelines
        self._pipelines, self._spares = found.pipelines, [spare.node for spare in found.spares]
        self.step_s = found.iteration_s
        copy_s = busiest_bytes(found.copies) / self.constants.bytes_per_s
        return () if same else ((TimeKind.PAUSED, self.constants.reconfigure_s + copy_s),)

    def _running(self) -> list[int]:
        return [node for pipeline in self._pipelines for node in pipeline.nodes]
