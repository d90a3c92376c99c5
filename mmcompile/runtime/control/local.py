"""`LocalCluster`: coordinator, store and agents as processes of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.agent import Agent, AgentOrder
from mmcompile.runtime.control.membership import Membership
from mmcompile.runtime.control.membership_planner import Planner
from mmcompile.runtime.control.processes import fork_process, kill_group
from mmcompile.runtime.control.secret import make_secret
from mmcompile.runtime.control.supervisor import SupervisorOrder, listen, supervise
from mmcompile.runtime.control.times import Times

_POLL_S = 0.01


@dataclass(kw_only=True, slots=True)
class LocalCluster:
    """Nodes on one machine. All processes end with the one that made it; use it as a context manager to end them earlier.

    Args:
        folder: of the coordinator's log and event log.
        work: what each worker does.
        max_restarts: of the workers of each node.
    """

    folder: Path
    planner: Planner
    work: Callable[[Membership], None]
    times: Times = field(default_factory=Times)
    max_restarts: int = 3
    supervisor: int = 0
    """Process id."""
    agents: dict[str, int] = field(default_factory=dict)
    """Node -> process id of its agent."""
    key: bytes = field(default_factory=make_secret)
    port: int = 0
    """Of the coordinator, once started."""
    _codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Start coordinator and store."""
        order = SupervisorOrder(folder=self.folder, key=self.key, times=self.times)
        with listen(order.host, 0) as listener:
            self.port = listener.getsockname()[1]
            file = listener.fileno()
            self.supervisor = fork_process(lambda: supervise(order, listener, self.planner), keep=(file,))

    def add(self, node: str, *, num_workers: int = 1) -> None:
        """Start the agent of a node. A name may be used again once its agent has ended.

        Raises:
            ConfigError: it has not.
        """
        if node in self.agents and not self._ended(self.agents[node]):
            raise ConfigError(f"{node} runs already; give another name, or wait until its agent has ended")
        order = AgentOrder(
            node=node,
            num_workers=num_workers,
            host="127.0.0.1",
            port=self.port,
            key=self.key,
            times=self.times,
            max_restarts=self.max_restarts,
        )
        self.agents[node] = fork_process(lambda: Agent(order, self.work).run(), keep=())

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of training and of all agents; returns whether it ended well.

        Agents that do not end in time, being stopped for example, are killed: the coordinator gave them up.

        Raises:
            TimeoutError: training did not end in time.
        """
        deadline_s = time.monotonic() + timeout_s
        pids = [self.supervisor, *self.agents.values()]
        while not all(self._ended(pid) for pid in pids):
            if time.monotonic() > deadline_s:
                if not self._ended(self.supervisor):
                    raise TimeoutError(f"training did not end in {timeout_s} s")
                self.kill()
            time.sleep(_POLL_S)
        return self._codes[self.supervisor] == 0

    @property
    def ended(self) -> bool:
        """The coordinator is gone for good."""
        return self._ended(self.supervisor)

    def drain(self, node: str) -> None:
        """Give a node notice that it will be taken away."""
        os.kill(self.agents[node], signal.SIGTERM)

    def kill(self) -> None:
        """End everything at once."""
        for pid in (*self.agents.values(), self.supervisor):
            if pid and not self._ended(pid):
                kill_group(pid)
                self._codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _ended(self, pid: int) -> bool:
        if pid not in self._codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        return pid in self._codes
