"""`Fence`: releases, in milliseconds, all waits for other ranks over the sockets of one group.

gloo has no abort. A thread that waits for a message is released only when its connection ends, so a fence ends the connections:
it records the sockets opened while a group was made and shuts them down. gloo then raises in every waiting thread, in any state
of its peers: alive and busy, stopped, or dead. A socket is shut down, never closed: its file descriptor stays gloo's, to be
closed by gloo.

Needs /proc/self/fd. `fence_works` tries it out; where it does not work, threads that wait must be left behind.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator

import torch
import torch.distributed as dist

from mmcompile.runtime.comm.groups import Groups, PeerLost, wait

_FDS = "/proc/self/fd"
_AGAIN_S = 0.005
"""Seconds until the sockets of a process group are shut down again, if the group is still opening sockets."""
_CLOSED, _LISTENING = 7, 10
"""States of a TCP socket, as the first byte of TCP_INFO."""

_TRY_S = 1.0
"""Maximum seconds of a wait that should take milliseconds: one in the self-test `fence_works`, or to connect to gloo."""
_TRY_TAG = 1

Mine = Callable[[socket.socket], bool]
"""Predicate on a TCP socket opened while a group was made: true if it belongs to the group, false if to another thread."""


def of_gloo(end: socket.socket) -> bool:
    """Return whether a socket is gloo's: gloo sets SO_REUSEADDR on all its sockets, others rarely on outgoing ones."""
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))


def of_store(port: int) -> Mine:
    """Return a predicate for connections to a store that listens at this port."""

    def mine(end: socket.socket) -> bool:
        try:
            return end.getpeername()[1] == port
        except OSError:  # Not connected yet.
            return False

    return mine


class Fence:
    """Records the sockets of one process group, or of one connection to a store, and shuts them down on request.

        fence = Fence(of_gloo, num_ranks=4)
        with fence.around():
            make the group
        ...
        fence.cut()     # by any thread, at any time, several times

    `around` records the sockets that this process opens while the context is active. Older sockets are never shut down, nor are
    connections that others make to listening sockets older than the context.

    Args:
        mine: predicate that is true for sockets of the group: `of_gloo`, or `of_store` with the port of the store.
        num_ranks: number of ranks in the gloo group; 0 for a store. A rank that waits for a peer to connect has no socket to
            shut down yet. `cut` makes such a rank fail by connecting to it itself, once for each rank of the group.
    """

    def __init__(self, mine: Mine, *, num_ranks: int = 0) -> None:
        self._mine = mine
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._is_making = False
        self._is_cut = False
        self._inodes: frozenset[int] = frozenset()
        """While the group is being made: inodes of the sockets that existed before. Afterwards: inodes of the group's sockets."""
        self._servers: frozenset[int] = frozenset()
        """Ports at which this process already listened before the group was made."""
        self._met: set[int] = set()
        """Inodes of listening sockets that a cut has connected to."""

    @property
    def is_cut(self) -> bool:
        """True once `cut` was called."""
        return self._is_cut

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """Return a context manager, used once, for making a process group. `cut`, at any time, shuts down sockets made in it."""
        with self._lock:
            self._inodes = frozenset(inode for _, inode in _sockets())
            self._servers = frozenset(_port(end) for _, end in _tcp_sockets() if _state(end) == _LISTENING)
            self._is_making = True
            if self._is_cut:
                self._keep_cutting()
        try:
            yield
        finally:
            with self._lock:
                if self._is_cut:
                    self._shut()
                mine = frozenset(inode for inode, _ in self._ours())
                self._is_making, self._inodes = False, mine

    def cut(self) -> None:
        """Release every thread that waits for another rank over the group's sockets, now or later."""
        with self._lock:
            first, self._is_cut = not self._is_cut, True
            self._shut()
            if first and self._is_making:
                self._keep_cutting()

    def _keep_cutting(self) -> None:
        threading.Thread(target=self._cut_while_making, name="mmcompile-fence", daemon=True).start()

    def _cut_while_making(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            with self._lock:
                if not self._is_making:
                    return
                self._shut()

    def _shut(self) -> None:
        for inode, end in self._ours():
            state = _state(end)
            if state == _LISTENING:
                # Shutting it down would end the process: gloo takes a failed `accept` for a bug.
                if self._is_making and inode not in self._met:
                    self._met.add(inode)
                    _connect_all(end, self._num_ranks)
            elif state != _CLOSED:
                with contextlib.suppress(OSError):  # It may have ended since.
                    end.shutdown(socket.SHUT_RDWR)

    def _ours(self) -> Iterator[tuple[int, socket.socket]]:
        for inode, end in _tcp_sockets():
            if not self._is_making:
                if inode in self._inodes:
                    yield inode, end
            elif inode not in self._inodes and _port(end) not in self._servers and self._mine(end):
                yield inode, end


@functools.cache
def fence_works() -> bool:
    """Return whether a fence releases gloo's waits on this system. Tried once per process (some 50 ms); warns if it fails."""
    works = os.path.isdir(_FDS) and _lets_go()
    if not works:
        print(
            "mmcompile: waits for other workers cannot be cut short on this system. After a failure each leaves a thread "
            "behind, which ends with the process on the other side; results are the same.",
            file=sys.stderr,
        )
    return works


def _lets_go() -> bool:
    """Return whether shutting down its sockets releases a gloo rank that waits for a message from a live rank."""
    store, fence = dist.HashStore(), Fence(of_gloo, num_ranks=2)
    made: dict[int, Groups] = {}

    def make(rank: int) -> None:
        made[rank] = Groups.connect(store, rank, 2, torch.device("cpu"), local=True, timeout_s=2 * _TRY_S)

    with fence.around():
        threads = [threading.Thread(target=make, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TRY_S)
    if len(made) < 2:
        return False

    def receive() -> None:
        with contextlib.suppress(PeerLost):
            wait(made[0].receive_control(torch.empty(1), 1, _TRY_TAG))

    waiting = threading.Thread(target=receive, daemon=True)
    waiting.start()
    waiting.join(0.01)
    waits = waiting.is_alive()
    fence.cut()
    waiting.join(_TRY_S)
    if waiting.is_alive():
        # Its end is a message that nobody minds.
        made[1].send_control(torch.zeros(1), 0, _TRY_TAG)
        waiting.join(_TRY_S)
        return False
    for groups in made.values():
        groups.close()
    return waits


def _sockets() -> Iterator[tuple[int, int]]:
    for name in os.listdir(_FDS) if os.path.isdir(_FDS) else ():
        with contextlib.suppress(OSError):  # Closed since, as the one that lists the folder.
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    for number, _ in _sockets():
        # Looked at only as a duplicate: the number may be another file's by the next line.
        try:
            copy = os.dup(number)
        except OSError:
            continue
        try:
            end = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                yield os.fstat(copy).st_ino, end


def _state(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _port(end: socket.socket) -> int:
    return end.getsockname()[1]


def _connect_all(listener: socket.socket, num_ranks: int) -> None:
    """End the waits of a gloo rank for connections: connect to its listener as every other rank, and disconnect.

    The first number sent on a connection is the index of the connecting rank.
    """
    for number in range(num_ranks):
        with contextlib.suppress(OSError), socket.socket(listener.family, socket.SOCK_STREAM) as end:
            end.settimeout(_TRY_S)
            end.connect(listener.getsockname())
            end.sendall(struct.pack("n", number))
