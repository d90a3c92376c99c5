"""`supervise`: keeps a coordinator and a store running on one machine.

It holds the listening sockets of both and starts again the one that dies: who connects meanwhile waits in the socket's queue.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mmcompile.errors import ConfigError
from mmcompile.runtime.control.coordinator import Coordinator
from mmcompile.runtime.control.events import EventLog
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.membership_planner import Planner
from mmcompile.runtime.control.processes import describe_exit, fork_process, kill_group
from mmcompile.runtime.control.store import serve_store
from mmcompile.runtime.control.times import Times

_BACKLOG = 512
_FAST_RESTARTS = 5
_FAST_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOrder:
    """What coordinator and store are started with."""

    folder: Path
    """Of the log and the event log. A folder with a log of an earlier run continues that run."""
    key: bytes
    """The secret of the job."""
    host: str = "127.0.0.1"
    """Address to listen at. Anything but this machine must be asked for."""
    port: int = 0
    store_port: int = 0
    times: Times = field(default_factory=Times)

    @property
    def log(self) -> Path:
        return self.folder / "coordinator.log"

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes one that is free.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port") from error


def supervise(order: SupervisorOrder, listener: socket.socket, planner: Planner) -> int:
    """Main function of the supervisor's process; returns 0 once training ended well.

    Args:
        listener: from `listen`.
    """
    return _Supervisor(order, listener, planner).run()


class _Supervisor:
    def __init__(self, order: SupervisorOrder, listener: socket.socket, planner: Planner) -> None:
        self._order = order
        self._listener = listener
        self._planner = planner
        self._store_listener = listen(order.host, order.store_port)
        self._store = f"{order.host}:{self._store_listener.getsockname()[1]}"
        self._starts_s: dict[str, list[float]] = {"coordinator": [], "store": []}

    def run(self) -> int:
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
        order = self._order
        coordinator = Coordinator(
            self._listener,
            Log.open(order.log),
            EventLog(order.events),
            self._planner,
            key=order.key,
            store=self._store,
            times=order.times,
        )
        return 0 if coordinator.run() else _FAILED

    def _start(self, name: str, function: Callable[[], int], listener: socket.socket) -> int:
        self._starts_s[name].append(time.monotonic())
        return fork_process(function, keep=(listener.fileno(),))

    def _again(self, name: str, status: int, function: Callable[[], int], listener: socket.socket) -> int:
        """Start a process again; 0 if it dies too often."""
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
"""Exit code of a coordinator that ended training for a reason; starting it again would not help."""
