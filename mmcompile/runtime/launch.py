"""Worker processes of a plain script: started, watched, and never left behind.

Each worker shares a socket with rank 0. Rank 0 sees its end of file when the worker dies; the worker sees it when rank 0
dies, and exits. A worker that fails writes what went wrong first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

_GRACE_S = 0.3
"""How long to wait for the first cause: a neighbour of a dead rank often complains before the death is seen."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """What a worker is started with, as JSON on its command line."""

    rank: int
    world_size: int
    port: int
    """Of rank 0's store, on this machine."""
    lifeline: int
    """File descriptor of the worker's end of the socket."""
    board: int
    """File descriptor of the status board."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Why a rank failed, in its own words."""

    rank: int
    error: str
    """Type and message."""
    traceback: str
    peer_lost: bool
    """It only noticed that another rank was gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why the engine ended."""

    rank: int
    cause: str
    traceback: str = ""
    peer_lost: bool = False


class Workers:
    """Ranks 1 and up, as child processes of rank 0.

    A thread watches them. When one dies or reports an error, it stops all others and sets `failure`, which also
    releases rank 0: every message it waits for fails once the other side is gone.
    """

    def __init__(self, num_ranks: int, port: int, board: int, devices: list[str]) -> None:
        self.failure: Failure | None = None
        self._closing = False
        self._over = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._reports: dict[int, bytes] = {}
        for rank in range(1, num_ranks):
            self._start(rank, num_ranks, port, board, devices[rank])
        self._watcher = threading.Thread(target=self._watch, name="mmcompile-watch", daemon=True)
        self._watcher.start()

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """The failure, if one is found within a time."""
        self._over.wait(timeout_s)
        return self.failure

    def close(self, timeout_s: float) -> None:
        """Wait for workers that were told to end; stop those that do not. Safe to call twice."""
        self._closing = True
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Stop all workers and their children at once."""
        self._closing = True
        for process in self._processes.values():
            if process.returncode is None:
                _kill_group(process)
        for process in self._processes.values():
            process.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for end in self._sockets.values():
            end.close()

    def _start(self, rank: int, num_ranks: int, port: int, board: int, device: str) -> None:
        ours, theirs = socket.socketpair()
        order = WorkerOrder(
            rank=rank, world_size=num_ranks, port=port, lifeline=theirs.fileno(), board=board, device=device
        )
        with theirs:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", "mmcompile.runtime.worker", msgspec.json.encode(order).decode()],
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), board),
                # A session of its own: Ctrl-C in the terminal reaches rank 0 only, which then ends the workers.
                start_new_session=True,
            )
        self._sockets[rank] = ours

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
        """The failure that explains the others: not one that only lost its peer, if there is another."""
        failures = [self._failure(rank) for rank in sorted(dead)]
        return min(failures, key=lambda failure: failure.peer_lost)

    def _failure(self, rank: int) -> Failure:
        if self._reports.get(rank):
            report = msgspec.json.decode(self._reports[rank], type=Report)
            return Failure(
                rank=rank, cause=f"failed: {report.error}", traceback=report.traceback, peer_lost=report.peer_lost
            )
        code = self._processes[rank].wait()
        how = f"died with signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        return Failure(rank=rank, cause=how)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def worker_environment() -> dict[str, str]:
    """Ours, with one thread a worker, and with this package importable though `-P` leaves out the current folder."""
    home = str(Path(__file__).parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in site.getsitepackages():
        paths.append(home)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
