"""`Supervisor`: keeps a coordinator and a store running on one machine.

It holds the listening sockets of both and restarts a process that dies: connections meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.coordinator import Coordinator
from mmcompile.runtime.control.events import EventLog
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.membership_view import Planner
from mmcompile.runtime.control.processes import describe_code, fork_process, kill_group
from mmcompile.runtime.control.secret import Endpoint
from mmcompile.runtime.control.store import serve_store

LOG_FILE = "coordinator.log"
EVENTS_FILE = "events.jsonl"
_BACKLOG = 512
_FAST_RESTARTS = 5
_FAST_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 chooses a free port.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port") from error


class Supervisor:
    """Keeps a coordinator and a store running, in processes of their own.

    Args:
        folder: folder of the log and the event log. With the log of an earlier run, that run continues.
        endpoint: the address to listen at, and the secret; its port is not used.
        listener: the listening socket for agents, from `listen`.
        planner: plans the work of each generation's members.
    """

    def __init__(self, folder: Path, endpoint: Endpoint, listener: socket.socket, planner: Planner) -> None:
        self._folder = folder
        self._endpoint = endpoint
        self._listener = listener
        self._planner = planner
        self._store_listener = listen(endpoint.host, 0)
        self._store = f"{endpoint.host}:{self._store_listener.getsockname()[1]}"
        self._starts_s: dict[str, list[float]] = {"coordinator": [], "store": []}

    def run(self) -> int:
        """Run coordinator and store until training has ended; return 0 if it ended well. Main function of the process."""
        names = {self._start(name): name for name in ("store", "coordinator")}
        try:
            while True:
                pid, status = os.wait()
                if (name := names.pop(pid, None)) is None:
                    continue
                code = os.waitstatus_to_exitcode(status)
                if name == "coordinator" and code in (0, _FAILED):
                    return code
                print(f"mmcompile: the {name} {describe_code(code)}; starting it again", file=sys.stderr, flush=True)
                if self._starts_too_often(name):
                    return 1
                names[self._start(name)] = name
        finally:
            for pid in names:
                kill_group(pid)

    def _coordinate(self) -> int:
        coordinator = Coordinator(
            self._listener,
            Log.open(self._folder / LOG_FILE),
            EventLog(self._folder / EVENTS_FILE),
            self._planner,
            endpoint=self._endpoint,
            store=self._store,
        )
        return 0 if coordinator.run() else _FAILED

    def _start(self, name: str) -> int:
        self._starts_s[name].append(time.monotonic())
        if name == "coordinator":
            return fork_process(self._coordinate, keep=(self._listener.fileno(),))
        return fork_process(lambda: serve_store(self._store_listener), keep=(self._store_listener.fileno(),))

    def _starts_too_often(self, name: str) -> bool:
        starts_s = self._starts_s[name][-_FAST_RESTARTS:]
        often = len(starts_s) == _FAST_RESTARTS and time.monotonic() - starts_s[0] < _FAST_S
        if often:
            print(
                f"mmcompile: the {name} was started {_FAST_RESTARTS} times in {_FAST_S:.0f} s; giving up",
                file=sys.stderr,
            )
        return often


_FAILED = 3
"""Exit code of a coordinator that ended training because of an error. It is not restarted: that would not help."""
