"""Processes of a coordinator, or of one node, on their own machine, for runs over several machines."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mmcompile.errors import EngineError
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.control.agent import Agent
from mmcompile.runtime.control.events import EventKind, EventReader, RunEvent
from mmcompile.runtime.control.processes import ChildProcess, fork_process
from mmcompile.runtime.control.secret import Endpoint
from mmcompile.runtime.control.supervisor import EVENTS_FILE, Supervisor, listen
from mmcompile.runtime.elastic.elastic_job import ElasticJob, checkpoints_in
from mmcompile.runtime.elastic.elastic_worker import work
from mmcompile.runtime.elastic.template_planner import TemplatePlanner


def coordinate(
    resilience: Resilience, folder: Path, at: Endpoint, *, start_nodes: int, on_event: Callable[[RunEvent], None]
) -> None:
    """Serve a run until it ends, with a store and a coordinator in processes that are restarted if they die.

    Args:
        folder: folder of the log, the events and the checkpoint; the same for all nodes. If it has the log of an earlier
            coordinator, that run continues.
        at: address to listen at, and the secret.
        start_nodes: number of nodes that must be connected before training starts.
        on_event: called with each line of the event log.

    Raises:
        ConfigError: the address cannot be used.
        EngineError: training ended before its last step.
    """
    planner = TemplatePlanner(resilience=resilience, start_nodes=start_nodes, checkpoints=checkpoints_in(folder))
    reader = EventReader(folder / EVENTS_FILE)
    with listen(at.host, at.port) as listener:
        child = ChildProcess(
            fork_process(lambda: Supervisor(folder, at, listener, planner).run(), keep=(listener.fileno(),))
        )
    try:
        for event in reader.follow(lambda: child.code is not None):
            on_event(event)
            if event.kind is EventKind.ENDED and child.wait() != 0:
                raise EngineError(f"training ended: {event.cause}")
    finally:
        child.kill()


def run_node(job: ElasticJob, node: str, at: Endpoint, *, max_restarts: int) -> None:
    """Run the workers of a node until the run ends or the node is released. SIGTERM announces that it will be taken away.

    Raises:
        EngineError: the node counted as lost, or training ended before its last step.
    """

    def run() -> int:
        num_workers = job.resilience.devices_per_node
        return Agent(node, at, partial(work, job), num_workers=num_workers, max_restarts=max_restarts).run()

    child = ChildProcess(fork_process(run, keep=()))
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.signal(signal.SIGTERM))
    try:
        if child.wait() != 0:
            raise EngineError(f"{node} ended before training did; its errors are above")
    finally:
        signal.signal(signal.SIGTERM, before)
        child.kill()
