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
    """Simulated nodes on one machine. All processes end with the one that made them; a context manager ends them earlier.

    Args:
        folder: folder of the coordinator's log and event log.
        work: main function of each worker.
        max_restarts: maximum number of times that a node's workers are restarted.
    """

    folder: Path
    planner: Planner
    work: Callable[[MembershipClient], None]
    times: Times = field(default_factory=Times)
    max_restarts: int = 3
    agents: dict[str, ChildProcess] = field(default_factory=dict)
    """Agent process of each node, by node."""
    supervisor: ChildProcess = field(init=False)
    """Process that runs coordinator and store, and restarts them."""
    endpoint: Endpoint = field(init=False)
    """Address and secret of the coordinator, once started."""

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
        """Start the agent of a node. A name may be reused once its agent has ended.

        Raises:
            ConfigError: the agent of that name still runs.
        """
        if node in self.agents and self.agents[node].code is None:
            raise ConfigError(f"{node} runs already; give another name, or wait until its agent has ended")

        def run() -> int:
            return Agent(node, self.endpoint, self.work, num_workers=num_workers, max_restarts=self.max_restarts).run()

        self.agents[node] = ChildProcess(fork_process(run, keep=()))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of training and of all agents; return whether training ended well.

        Agents that do not end in time (stopped ones, for example) are killed: the coordinator counts them as lost.

        Raises:
            TimeoutError: training did not end within `timeout_s`.
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
        """True once the coordinator has ended and will not be restarted."""
        return self.supervisor.code is not None

    def drain(self, node: str) -> None:
        """Send a node the notice (SIGTERM) that it will be taken away."""
        self.agents[node].signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the cluster at once."""
        for process in (*self.agents.values(), self.supervisor):
            process.kill()

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
