"""`Connections`: process groups of successive generations, each left in milliseconds even while ranks wait for each other.

    connections = Connections(membership)
    while True:
        generation = membership.wait_generation()
        with contextlib.suppress(Superseded), connections.open(generation) as connection:
            connection.call(function that uses connection.groups)

When the generation ends, waits of this rank for others are cut by the thread that receives the message, while the main thread may
still be in `call`. After `open` no function of the generation runs any more.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from mmcompile.runtime.comm.fence import Fence, fence_works, of_gloo, of_store
from mmcompile.runtime.comm.groups import Groups, PeerLost
from mmcompile.runtime.control.membership_client import Superseded
from mmcompile.runtime.control.messages import Generation
from mmcompile.runtime.control.store import open_client
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.launch.session import Runner

T = TypeVar("T")

_LEAVE_S = 0.002
"""Seconds between two checks for the end of a thread."""
_STUCK_S = 0.5
"""Maximum seconds to wait for a thread that still waits for a message after its connections were shut down.

gloo ends every wait, except for a send that it had begun to write when the connection ended (seen with torch 2.13).
"""


class Watch(Protocol):
    """Interface by which `Connections` learns that a generation has ended, and reports failed messages: a `MembershipClient`."""

    superseded: bool
    on_superseded: Callable[[], None] | None
    times: Times

    def check(self) -> None:
        """Raise Superseded if the generation has ended."""

    def fault(self, error: str) -> None:
        """Report a failed message, wait until the coordinator explains it, and raise Superseded."""


class Connections:
    """Opens and leaves the process groups of a worker's successive generations.

    Args:
        watch: reports that a generation has ended: it then calls `watch.on_superseded`, which is set to `cut` here.
        fenced: True: at the end of a generation a `Fence` shuts down its sockets, which releases threads that wait for other
            ranks at once. False: gloo releases them a little later, except that a thread which waits for ranks to connect is
            left behind until `times.attempt_s` is over (for a rank that connected and then stopped, five times as long).
            None: as True if a fence works on this system, else as False.
    """

    def __init__(self, watch: Watch, *, fenced: bool | None = None) -> None:
        self._watch = watch
        self._fenced = fence_works() if fenced is None else fenced
        self._store = _StoreClient(watch.times.attempt_s)
        self._current: Connection | None = None
        watch.on_superseded = self.cut

    @contextlib.contextmanager
    def open(self, generation: Generation) -> Generator[Connection]:
        """Return a context with connections to all members of a generation, which are left at its end.

        Raises:
            Superseded: the generation ended before all were connected. Also Released, as by `MembershipClient.check`.
        """
        connection = Connection(self._watch, self._store, generation, fenced=self._fenced)
        self._current = connection
        try:
            # What ended the generation before this line found nothing to cut.
            self._watch.check()
            connection.meet()
            yield connection
        finally:
            self._current = None
            if not connection.leave():
                # Whoever is left behind may use it.
                self._store = _StoreClient(self._watch.times.attempt_s)

    def cut(self) -> None:
        """End all waits of the current generation for other ranks. Any thread may call this, several times."""
        if (connection := self._current) is not None:
            connection.cut()


class Connection:
    """Runs functions that use the process groups of one generation, on a thread where they may block.

    Attributes:
        groups: process groups that join this rank to all other ranks of the generation.
    """

    groups: Groups

    def __init__(self, watch: Watch, store: _StoreClient, generation: Generation, *, fenced: bool) -> None:
        self._watch = watch
        self._store = store
        self._generation = generation
        self._fenced = fenced
        self._fence = Fence(of_gloo, num_ranks=generation.world_size)
        self._runner = Runner()
        self._idle = threading.Event()
        self._idle.set()
        self._made: Groups | None = None
        self._is_cut = False
        self._over = False

    def check(self) -> None:
        """Raise Superseded if the generation has ended. Functions that run in `call` call this between two messages."""
        if self._over or self._watch.superseded:
            raise Superseded(f"generation {self._generation.number} is over")

    def call(self, function: Callable[[], T]) -> T:
        """Run a function that uses the groups, on their thread, and return its result.

        Raises:
            Superseded: the generation ended meanwhile; or a message failed, once the coordinator has explained the failure.
        """
        self._idle.clear()
        try:
            return self._runner.call(partial(self._run, function), self._watch.check)
        except PeerLost as error:
            lost = str(error).partition("\n")[0]
        # Out here the error is gone, and with it the messages that its traceback refers to.
        self._watch.fault(lost)
        raise AssertionError(f"no generation came after a fault: {lost}")

    def meet(self) -> None:
        """Connect to all members of the generation."""
        self.groups = self.call(self._connect)

    def cut(self) -> None:
        """End all waits of this generation for other ranks. Any thread may call this, several times."""
        self._is_cut = True
        if self._fenced:
            self._fence.cut()
            if self._made is None:
                self._store.cut()
        elif self._made is not None:
            self._made.interrupt()

    def leave(self) -> bool:
        """Wait until no function of the generation runs, and close its groups; return False if a thread was left behind.

        A thread that computes is awaited without limit: it may change parameters that the next generation uses.
        """
        self._over = True
        if self._made is not None:
            self._made.closed = True
        self.cut()
        stuck_s = 0.0
        while not self._idle.wait(_LEAVE_S) and stuck_s < (_STUCK_S if self._fenced or self._made is not None else 0.0):
            waits = self._made is None or self._made.waiting
            stuck_s = stuck_s + _LEAVE_S if waits else 0.0
        self._runner.end(0.0)
        if self._made is not None:
            # Nobody needs to wait for gloo's threads to end.
            threading.Thread(target=self._made.close, name="mmcompile-close").start()
        return self._idle.is_set()

    def _run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        finally:
            self._idle.set()

    def _connect(self) -> Groups:
        generation, timeout_s = self._generation, self._watch.times.attempt_s
        try:
            client = self._store.client(generation.store, lambda: self._is_cut)
            with self._fence.around():
                made = Groups.connect(
                    dist.PrefixStore(generation.prefix, client),
                    generation.rank,
                    generation.world_size,
                    torch.device("cpu"),
                    local=_is_local(generation.store),
                    timeout_s=timeout_s,
                )
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        self._made = made
        if self._over or self._is_cut:
            made.close()
            raise PeerLost("the generation is over")
        return made


class _StoreClient:
    """Connection to the store, kept over generations. `cut` shuts it down, which ends waits of threads that use it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._address = ""
        self._client: dist.TCPStore | None = None
        self._fence: Fence | None = None

    def client(self, address: str, is_cut: Callable[[], bool]) -> dist.TCPStore:
        """Return the connection to the store at `address` (host:port). A new one is shut down if `is_cut()` is true."""
        if not self._is_usable(address):
            self._client, self._address = None, address
            self._fence = Fence(of_store(int(address.rsplit(":", 1)[1])))
            if is_cut():
                self._fence.cut()
            with self._fence.around():
                self._client = open_client(address, self._timeout_s)
        assert self._client is not None
        return self._client

    def cut(self) -> None:
        if (fence := self._fence) is not None:
            fence.cut()

    def _is_usable(self, address: str) -> bool:
        if self._client is None or self._fence is None or self._fence.is_cut or address != self._address:
            return False
        try:
            self._client.check(["anything"])
        except RuntimeError:  # The store was started anew.
            return False
        return True


def _is_local(store: str) -> bool:
    # All workers of a store at the loopback address are on its machine.
    host = store.rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
