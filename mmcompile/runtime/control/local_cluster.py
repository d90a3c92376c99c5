"""`LocalCluster`: coordinator, store and agents as processes of this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.agent import Agent
from mmcompile.runtime.control.membership_client import MembershipClient
from mmcompile.runtime.control.membership_view import Planner
from mmcompile.runtime.control.processes import ChildProcess, fork_process
from mmcompile.runtime.control.secret import Endpoint, make_secret
from mmcompile.runtime.control.supervisor import Supervisor, listen
from mmcompile.runtime.control.times import Times

_HOST = "127.0.0.1"
_POLL_S = 0.01


@dataclass(kw_only=True, slots=True)
class LocalCluster:
    """Nodes on one machine. All processes end with the one that made it; use it as a context manager to end them earlier.

    Args:
        folder: folder of the coordinator's log and event log.
        planner: chooses what members do.
        work: main function of each worker.
        max_restarts: restarts of the workers of each node.
    """

    folder: Path
    planner: Planner
    work: Callable[[MembershipClient], None]
    times: Times = field(default_factory=Times)
    max_restarts: int = 3
    agents: dict[str, ChildProcess] = field(default_factory=dict)
    """Node -> its agent."""
    supervisor: ChildProcess = field(init=False)
    """Process that keeps coordinator and store running."""
    endpoint: Endpoint = field(init=False)
    """Address of the coordinator, once started."""

    def start(self) -> None:
        """Start coordinator and store."""
        with listen(_HOST, 0) as listener:
            port = listener.getsockname()[1]
            self.endpoint = endpoint = Endpoint(host=_HOST, port=port, key=make_secret(), times=self.times)
            pid = fork_process(
                lambda: Supervisor(self.folder, endpoint, listener, self.planner).run(), keep=(listener.fileno(),)
            )
        self.supervisor = ChildProcess(pid)

    def add(self, node: str, *, num_workers: int = 1) -> None:
        """Start the agent of a node. A name may be used again once its agent has ended.

        Raises:
            ConfigError: it has not.
        """
        if node in self.agents and self.agents[node].code is None:
            raise ConfigError(f"{node} runs already; give another name, or wait until its agent has ended")

        def run() -> int:
            return Agent(node, self.endpoint, self.work, num_workers=num_workers, max_restarts=self.max_restarts).run()

        self.agents[node] = ChildProcess(fork_process(run, keep=()))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of training and of all agents; returns whether it ended well.

        Agents that do not end in time, being stopped for example, are killed: the coordinator gave them up.

        Raises:
            TimeoutError: training did not end in time.
        """
        deadline_s = time.monotonic() + timeout_s
        processes = [self.supervisor, *self.agents.values()]
        while any(process.code is None for process in processes):
            if time.monotonic() > deadline_s:
                if self.supervisor.code is None:
                    raise TimeoutError(f"training did not end in {timeout_s} s")
                self.kill()
            time.sleep(_POLL_S)
        return self.supervisor.code == 0

    @property
    def ended(self) -> bool:
        """True once the coordinator has ended for good."""
        return self.supervisor.code is not None

    def drain(self, node: str) -> None:
        """Give a node notice that it will be taken away."""
        self.agents[node].signal(signal.SIGTERM)

    def kill(self) -> None:
        """End everything at once."""
        for process in (*self.agents.values(), self.supervisor):
            process.kill()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
