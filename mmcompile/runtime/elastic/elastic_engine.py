"""`ElasticEngine`: starts and watches a training run that continues when nodes die. Its own process does not compute."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from mmcompile.errors import ConfigError, EngineError
from mmcompile.planner.schedule.simulate import Event as StepEvent
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.checkpoint.export import export
from mmcompile.runtime.control.events import EventKind, EventReader, Recovery, RunEvent, recoveries
from mmcompile.runtime.control.local_cluster import LocalCluster
from mmcompile.runtime.control.supervisor import EVENTS_FILE, LOG_FILE
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.elastic_worker import work
from mmcompile.runtime.elastic.generation_plan import StepRecord
from mmcompile.runtime.elastic.template_planner import TemplatePlanner
from mmcompile.runtime.monitoring.metrics import StepMetrics
from mmcompile.runtime.monitoring.tracing import read_trace

_END_S = 10.0


class ElasticEngine:
    """Trains by the templates of a plan: runs a coordinator, a store, and one agent per node, which runs the node's workers.

    Every step is committed once, on the same samples, for any failures of nodes; see `mmcompile.runtime.elastic`. All processes
    end with this one.

    Args:
        nodes, max_restarts, on_event: as for `mmcompile.elastic_run.elastic`.
        times: timeouts after which workers and nodes count as lost.

    Raises:
        ConfigError: there are fewer nodes than the fault tolerance needs, or the folder belongs to another run.
    """

    def __init__(
        self,
        job: ElasticJob,
        nodes: Sequence[str],
        *,
        times: Times | None = None,
        max_restarts: int = 3,
        on_event: Callable[[RunEvent], None] | None = None,
    ) -> None:
        least = job.resilience.job.min_nodes
        if len(nodes) < least or len(set(nodes)) < len(nodes):
            raise ConfigError(
                f"{len(nodes)} nodes ({', '.join(nodes)}) cannot keep the plan's promise, which needs {least} or more of "
                "different names"
            )
        if (job.folder / LOG_FILE).exists():
            raise ConfigError(f"{job.folder} holds a run already; give a new folder, or move it away")
        self._job = job
        self._on_event = on_event
        self._events: list[RunEvent] = []
        self._reader = EventReader(job.folder / EVENTS_FILE)
        self._cluster = LocalCluster(
            folder=job.folder,
            planner=TemplatePlanner(resilience=job.resilience, start_nodes=len(nodes), checkpoints=job.checkpoints),
            work=partial(work, job),
            times=times or Times(),
            max_restarts=max_restarts,
        )
        # What workers share with this process must not be touched by their garbage collection, or it is copied.
        gc.collect()
        gc.freeze()
        try:
            self._cluster.start()
            for node in nodes:
                self._cluster.add(node, num_workers=job.resilience.devices_per_node)
        finally:
            gc.unfreeze()
        self._closed = False

    @property
    def events(self) -> Sequence[RunEvent]:
        """Events of the event log that `train` has read so far."""
        return self._events

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Membership changes that training recovered from, with the seconds of each phase."""
        return recoveries(self.events)

    @property
    def processes(self) -> dict[str, int]:
        """Process id of each node's agent, by node."""
        return {node: agent.pid for node, agent in self._cluster.agents.items()}

    @property
    def coordinator(self) -> int:
        """Process id of the supervisor, which keeps store and coordinator running."""
        return self._cluster.supervisor.pid

    def train(self) -> Iterator[StepMetrics]:
        """Yield the metrics of each step once it is committed, until training ends.

        After state was lost and read from a checkpoint, the steps since the checkpoint are yielded again.

        Raises:
            EngineError: training ended before its last step; the message has the reason, and what was saved.
        """
        for event in self._reader.follow(lambda: self._cluster.ended):
            self._events.append(event)
            if self._on_event is not None:
                self._on_event(event)
            if event.kind is EventKind.COMMITTED and event.cursor is not None:
                yield StepRecord.decode(event.cursor).metrics
            # All were told; they need a moment.
            if event.kind is EventKind.ENDED and not self._cluster.wait(_END_S):
                raise EngineError(f"training ended: {event.cause}")

    def add(self, node: str) -> None:
        """Start a node, which joins after the current step."""
        self._cluster.add(node, num_workers=self._job.resilience.devices_per_node)

    def drain(self, node: str) -> None:
        """Send a node notice that it will be taken away; it leaves after the current step."""
        self._cluster.drain(node)

    def kill(self, node: str) -> None:
        """Kill the workers of a node at once, to rehearse a failure. Its agent starts new ones, up to `max_restarts` times."""
        agent = self._cluster.agents[node].pid
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def trace(self) -> list[StepEvent]:
        """Return the measured actions of all ranks in the last step, on one clock, once training has ended successfully."""
        return read_trace(self._job.trace)

    def pull(self) -> None:
        """Copy the trained weights into the model, once training has ended successfully.

        Raises:
            CheckpointError: no step was saved.
        """
        self._job.user.put(checkpoint.read(self._job.checkpoints).weights)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the last checkpoint to another folder, from which `Engine.load` continues.

        Raises:
            CheckpointError: no step was saved, or the folder cannot be written.
        """
        checkpoint.write(Path(folder), checkpoint.read(self._job.checkpoints), self._job.user.tied())

    def export(self, folder: str | os.PathLike[str]) -> None:
        """Write the model of the last checkpoint, as `Engine.export` does.

        Raises:
            CheckpointError: no step was saved, or the folder cannot be written.
        """
        content = checkpoint.read(self._job.checkpoints)
        export(Path(folder), self._job.model, self._job.user.complete(content.weights, self._job.user.tied()))

    def close(self) -> None:
        """Kill the coordinator, store, agents and workers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._cluster.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
