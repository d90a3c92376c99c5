"""`Supervisor`: keeps a coordinator and a store running on one machine.

It holds the listening sockets of both and restarts a process that dies: connections meanwhile wait in the socket's queue.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.coordinator import Coordinator
from mmcompile.runtime.control.events import EventLog
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.membership_view import Planner
from mmcompile.runtime.control.processes import describe_exit, fork_process, kill_group
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
        store = self._start("store", self._serve_store, self._store_listener)
        coordinator = self._start("coordinator", self._coordinate, self._listener)
        try:
            while True:
                pid, status = os.wait()
                if pid == coordinator:
                    code = os.waitstatus_to_exitcode(status)
                    if code in (0, _FAILED):
                        return code
                    coordinator = self._again("coordinator", status, self._coordinate, self._listener)
                elif pid == store:
                    store = self._again("store", status, self._serve_store, self._store_listener)
                if coordinator == 0 or store == 0:
                    return 1
        finally:
            for pid in (coordinator, store):
                if pid:
                    kill_group(pid)

    def _serve_store(self) -> int:
        return serve_store(self._store_listener)

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

    def _start(self, name: str, function: Callable[[], int], listener: socket.socket) -> int:
        self._starts_s[name].append(time.monotonic())
        return fork_process(function, keep=(listener.fileno(),))

    def _again(self, name: str, status: int, function: Callable[[], int], listener: socket.socket) -> int:
        """Restart a process that died, and return its process id; 0 if it dies too often."""
        print(f"mmcompile: the {name} {describe_exit(status)}; starting it again", file=sys.stderr, flush=True)
        starts_s = self._starts_s[name][-_FAST_RESTARTS:]
        if len(starts_s) == _FAST_RESTARTS and time.monotonic() - starts_s[0] < _FAST_S:
            print(
                f"mmcompile: the {name} was started {_FAST_RESTARTS} times in {_FAST_S:.0f} s; giving up",
                file=sys.stderr,
            )
            return 0
        return self._start(name, function, listener)


_FAILED = 3
"""Exit code of a coordinator that ended training because of an error; it is not restarted, since that would not help."""
