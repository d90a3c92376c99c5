"""Worker processes of a plain script: started, watched, and always stopped.

Each worker shares a socket with rank 0. A worker that fails writes the error to it; when a worker dies, the socket is closed. A
further process, from which workers are forked (`worker_main.py`), reports the exit of each worker, and stops all when rank 0
ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import site
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmcompile.runtime.control.processes import describe_code, kill_group

_GRACE_S = 0.3
"""Seconds to wait for the cause of a failure: other ranks often fail before the death of a rank is noticed."""
_POLL_S = 0.05
_STOP_S = 1.0
"""Maximum seconds to wait until workers stop. It takes milliseconds, unless the process that forks them is still loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """Rank, device, store port and inherited files of a worker process that is to be started."""

    rank: int
    world_size: int
    port: int
    """Port of rank 0's store, on this machine."""
    report: int
    """File descriptor of the worker's end of its socket to rank 0."""
    board: int
    """File descriptor of the memory shared by all ranks where each writes its current action (`StatusBoard`)."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrders:
    """Arguments of the process that forks workers, as JSON on its command line."""

    workers: tuple[WorkerOrder, ...]
    exits: int
    """File descriptor of the socket for one `Exit` per line; when it is closed, all workers are to be stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """Rank and exit code of a worker that ended."""

    rank: int
    code: int
    """Exit code of the process; -n if signal n killed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Rank and cause of the failure that ends an engine; a failing worker reports it itself."""

    rank: int
    cause: str
    traceback: str = ""
    peer_lost: bool = False
    """True if the rank only lost the connection to another rank, which is then the cause."""


class Workers:
    """Starts, watches and stops the worker processes of ranks 1 and up on this machine.

    A thread watches them. When one dies or reports an error, it stops all others and sets `failure`. This also releases rank 0:
    every message it waits for fails once the other rank is gone.
    """

    def __init__(self, num_ranks: int, port: int, board: int, devices: list[str]) -> None:
        self.failure: Failure | None = None
        self._closing = False
        self._over = threading.Event()
        self._reports: dict[int, bytes] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._exits, exits = socket.socketpair()
        with contextlib.ExitStack() as theirs:
            theirs.enter_context(exits)
            orders: list[WorkerOrder] = []
            for rank in range(1, num_ranks):
                self._sockets[rank], end = socket.socketpair()
                report = theirs.enter_context(end).fileno()
                orders.append(
                    WorkerOrder(
                        rank=rank, world_size=num_ranks, port=port, report=report, board=board, device=devices[rank]
                    )
                )
            self._parent = _start(WorkerOrders(workers=tuple(orders), exits=exits.fileno())) if orders else None
        self._watcher = threading.Thread(target=self._watch, name="mmcompile-watch", daemon=True)
        self._watcher.start()

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """Return the failure of a worker, waiting up to `timeout_s` for one; None if there is none."""
        self._over.wait(timeout_s)
        return self.failure

    def close(self, timeout_s: float) -> None:
        """Wait for workers to end, and stop those that have not after `timeout_s`. Safe to call twice."""
        self._closing = True
        if self._parent is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._parent.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Stop all workers and their children at once."""
        self._closing = True
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._exits.shutdown(socket.SHUT_WR)
            try:
                self._parent.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                # Still loading, so that it has forked nobody; or stopped, and those it forked are killed with it.
                kill_group(self._parent.pid)
                self._parent.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for end in (self._exits, *self._sockets.values()):
            end.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, end in self._sockets.items():
                selector.register(end, selectors.EVENT_READ, rank)
            first_s: float | None = None
            dead: set[int] = set()
            while not self._closing and (first_s is None or time.monotonic() < first_s + _GRACE_S):
                for key, _ in selector.select(_POLL_S):
                    data = self._sockets[key.data].recv(65536)
                    self._reports[key.data] = self._reports.get(key.data, b"") + data
                    if not data:
                        selector.unregister(key.fileobj)
                        dead.add(key.data)
                        first_s = first_s or time.monotonic()
        if not self._closing:
            self.failure = self._cause(dead)
            self.kill()
        self._over.set()

    def _cause(self, dead: set[int]) -> Failure:
        """Return the failure of the lowest rank in `dead`; ranks that only lost their connection to another rank come last."""
        codes = self._codes(dead)
        failures = [self._failure(rank, codes.get(rank)) for rank in sorted(dead)]
        return min(failures, key=lambda failure: failure.peer_lost)

    def _codes(self, dead: set[int]) -> dict[int, int]:
        # A dead forking process reports none.
        codes: dict[int, int] = {}
        self._exits.settimeout(_STOP_S)
        with self._exits.makefile("rb") as lines, contextlib.suppress(OSError):
            while dead - codes.keys() and (line := lines.readline()):
                end = msgspec.json.decode(line, type=Exit)
                codes[end.rank] = end.code
        return codes

    def _failure(self, rank: int, code: int | None) -> Failure:
        if self._reports.get(rank):
            return msgspec.json.decode(self._reports[rank], type=Failure)
        if code is None:
            assert self._parent is not None, "no worker died, since there is none"
            code = self._parent.wait()
        return Failure(rank=rank, cause=describe_code(code))


def _start(orders: WorkerOrders) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "mmcompile.runtime.worker_main", msgspec.json.encode(orders).decode()],
        env=worker_environment(),
        stdin=subprocess.DEVNULL,
        pass_fds=(orders.exits, *(file for order in orders.workers for file in (order.report, order.board))),
        # A session of its own: Ctrl-C in the terminal reaches rank 0 only, which then ends the workers.
        start_new_session=True,
    )


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: this process's, with one compute thread.

    PYTHONPATH gets this package's folder, which may be importable here from the current folder only; workers run with `-P`.
    """
    home = str(Path(__file__).parents[3])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in site.getsitepackages():
        paths.append(home)
    return {
        "OMP_NUM_THREADS": "1",
        # To count GPUs without using them: a process that has used one cannot fork workers that do.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
