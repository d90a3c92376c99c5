"""A coordinator, or one node, as processes of their own machine: for runs over several machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mmcompile.errors import ConfigError, EngineError
from mmcompile.planner.resilience.resilience import Resilience
from mmcompile.runtime.control.agent import Agent, AgentOrder
from mmcompile.runtime.control.effects import EventKind
from mmcompile.runtime.control.events import Event
from mmcompile.runtime.control.processes import fork_process, kill_group
from mmcompile.runtime.control.supervisor import SupervisorOrder, listen, supervise
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.elastic_job import ElasticJob, checkpoints_in
from mmcompile.runtime.elastic.elastic_worker import work
from mmcompile.runtime.elastic.event_reader import EventReader, follow
from mmcompile.runtime.elastic.template_planner import TemplatePlanner


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a coordinator listens. `parse` reads `host:port`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError: another form, or an address that other machines cannot connect to."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"address {text!r} is not HOST:PORT, for example 10.0.0.1:29400")
        if host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"{host} is no address that workers can connect to; give the one that they reach this machine by"
            )
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAt:
    """How coordinator and nodes of a run find and know each other."""

    address: Address
    key: bytes
    """The secret of the run."""
    times: Times = field(default_factory=Times)


def coordinate(
    resilience: Resilience, folder: Path, at: RunAt, *, start_nodes: int, on_event: Callable[[Event], None]
) -> None:
    """Serve a run until it ends: store and coordinator, in processes that are started again if they die.

    Args:
        folder: of the log, the events and the checkpoint; the same for all nodes. With the log of an earlier coordinator
            of this run, it goes on.
        start_nodes: that must be there before training starts.

    Raises:
        ConfigError: the address cannot be used.
        EngineError: training ended before its last step.
    """
    planner = TemplatePlanner(resilience=resilience, start_nodes=start_nodes, checkpoints=checkpoints_in(folder))
    order = SupervisorOrder(folder=folder, key=at.key, host=at.address.host, times=at.times)
    reader = EventReader(order.events)
    with listen(at.address.host, at.address.port) as listener:
        pid = fork_process(lambda: supervise(order, listener, planner), keep=(listener.fileno(),))
    child = _Child(pid)
    try:
        for event in follow(reader, lambda: child.ended):
            on_event(event)
            if event.kind is EventKind.ENDED and child.wait() != 0:
                raise EngineError(f"training ended: {event.cause}")
    finally:
        child.kill()


def run_node(job: ElasticJob, node: str, at: RunAt, *, max_restarts: int) -> None:
    """Run the workers of a node until the run ends or the node is let go. SIGTERM is notice that it will be taken away.

    Raises:
        EngineError: the node was given up, or training ended before its last step.
    """
    order = AgentOrder(
        node=node,
        num_workers=job.resilience.devices_per_node,
        host=at.address.host,
        port=at.address.port,
        key=at.key,
        times=at.times,
        max_restarts=max_restarts,
    )
    child = _Child(fork_process(lambda: Agent(order, partial(work, job)).run(), keep=()))
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.tell(signal.SIGTERM))
    try:
        if child.wait() != 0:
            raise EngineError(f"{node} ended before training did; its errors are above")
    finally:
        signal.signal(signal.SIGTERM, before)
        child.kill()


class _Child:
    """A process that ends with this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    @property
    def ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self) -> int:
        """Its exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def tell(self, number: int) -> None:
        if not self.ended:
            os.kill(self._pid, number)

    def kill(self) -> None:
        if not self.ended:
            kill_group(self._pid)
            self.wait()
