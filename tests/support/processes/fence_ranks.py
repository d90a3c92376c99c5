"""Ranks that go through generations as a test tells them: a store and ranks forked from a `JobProcess`."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmcompile.runtime.comm.groups import Groups, Lane, PeerLost, wait
from mmcompile.runtime.control.membership_client import Superseded
from mmcompile.runtime.control.messages import Generation
from mmcompile.runtime.control.store import forget_before, open_client, serve_store
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.connections import Connection, Connections

WAIT_S = 20.0
"""For what takes milliseconds."""
TIMES = Times(recovery_deadline_s=80.0)
"""No wait that ends because of a timeout ends before WAIT_S."""
TAG, NEVER_SENT = 5, 7
_BIG = 64 * 2**20
"""Bytes; more than a connection takes in while nobody reads."""


class Ordered:
    """A rank's view of what the test decides, as `MembershipClient` is its view of the coordinator."""

    def __init__(self, end: socket.socket) -> None:
        self.superseded = False
        self.on_superseded: Callable[[], None] | None = None
        self.times = TIMES
        self.heard_s = 0.0
        """When the last order came."""
        self._end = end
        self._orders: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def check(self) -> None:
        if self.superseded:
            raise Superseded("the test said so")

    def fault(self, error: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.superseded, WAIT_S), error
        self.check()

    def next(self) -> dict[str, Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._orders)
            order, self._orders = self._orders[-1], []
            self.superseded = False
        return order

    def say(self, **what: Any) -> None:
        self._end.sendall(json.dumps(what).encode() + b"\n")

    def _listen(self) -> None:
        for line in self._end.makefile():
            with self._changed:
                self.heard_s = time.monotonic()
                self._orders.append(json.loads(line))
                self.superseded = True
                if self.on_superseded is not None:
                    self.on_superseded()
                self._changed.notify_all()
        os._exit(0)


@dataclass(kw_only=True)
class Stay:
    """A rank in one generation."""

    ordered: Ordered
    connection: Connection
    rank: int
    size: int
    number: int
    released_s: float = 0.0
    """When a function in `call` got its error."""
    count: int = 0

    @property
    def groups(self) -> Groups:
        return self.connection.groups

    def exchange(self) -> float:
        """Sum over all ranks of rank + number, by way of a ring, a broadcast and an all_reduce. Differs for each generation."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        mine, total = torch.tensor([float(self.rank + self.number)]), torch.zeros(1)
        total += mine
        for _ in range(self.size - 1):
            got = torch.empty(1)
            sent = self.groups.send(mine, Lane(source=self.rank, target=after, name="ring"), TAG)
            wait(self.groups.receive(got, Lane(source=before, target=self.rank, name="ring"), TAG))
            wait(sent)
            mine = got
            total += got
        again = torch.tensor([float(self.rank + self.number)])
        self.groups.all_reduce(again)
        first = total.clone()
        self.groups.broadcast(first)
        self.groups.flush()
        assert torch.equal(total, again) and torch.equal(first, again), f"{total} {again} {first}"
        return float(total)

    def block(self, how: str) -> None:
        """Wait until the generation ends."""
        peer = (self.rank + 1) % self.size
        self.ordered.say(waiting=how)
        try:
            match how:
                case "receive":
                    wait(self.groups.receive_control(torch.empty(1), peer, NEVER_SENT))
                case "send":
                    wait(self.groups.send_control(torch.empty(_BIG, dtype=torch.uint8), peer, NEVER_SENT))
                case "broadcast":
                    self.groups.broadcast(torch.empty(1))
                    self.groups.flush()
                case "idle":
                    while True:
                        self.connection.check()
                        time.sleep(0.001)
                case "compute":
                    # Looks at nothing; what it changes must be whole when the generation is left.
                    until_s = time.monotonic() + 0.3
                    while time.monotonic() < until_s:
                        self.count += 1
                        time.sleep(0.001)
                    self.count = -1
                case _:
                    raise ValueError(how)
        except PeerLost:
            self.released_s = time.monotonic()
            raise


def rank(end: socket.socket, *, fenced: bool) -> None:
    """Main function of a rank."""
    torch.set_num_threads(1)
    ordered = Ordered(end)
    connections = Connections(ordered, fenced=fenced)
    while True:
        order = ordered.next()
        if order.get("self_test"):
            ordered.say(**self_test())
            continue
        generation = _generation(order)
        stay: Stay | None = None
        start_s = time.monotonic()
        leave_s = 0.0
        try:
            with connections.open(generation) as connection:
                stay = Stay(
                    ordered=ordered,
                    connection=connection,
                    rank=generation.rank,
                    size=generation.world_size,
                    number=generation.number,
                )
                connect_s = time.monotonic() - start_s
                total = connection.call(stay.exchange)
                ordered.say(total=total, connect_ms=connect_s * 1e3)
                if order["forget"] and generation.rank == 0:
                    store = connection.groups.store
                    assert isinstance(store, dist.PrefixStore)
                    forget_before(store, generation.number)
                connection.call(functools.partial(stay.block, order["how"]))
        except Superseded:
            left_s = time.monotonic()
        else:
            raise AssertionError("the generation ended by itself")
        leave_s = left_s - ordered.heard_s
        closers = [t for t in threading.enumerate() if t.name == "mmcompile-close"]
        for thread in closers:
            thread.join(WAIT_S)
        close_s = time.monotonic() - left_s
        count = stay.count if stay is not None else 0
        released_s = stay.released_s - ordered.heard_s if stay is not None and stay.released_s else None
        ordered.say(
            left=generation.number,
            leave_ms=leave_s * 1e3,
            close_ms=close_s * 1e3,
            released_ms=None if released_s is None else released_s * 1e3,
            count=count,
            **usage(),
        )


def usage() -> dict[str, int]:
    """What this process holds, once threads that are ending have ended."""
    names = ("mmcompile-step", "mmcompile-fence")
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s and any(t.name in names for t in threading.enumerate()):
        time.sleep(0.002)
    rss = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_kb": int(rss.split()[1]),
    }


def self_test() -> dict[str, Any]:
    """Try the fence out among sockets of others, old and new."""
    from mmcompile.runtime.comm.fence import fence_works

    fence_works.cache_clear()
    fence_works()
    before = usage()
    fence_works.cache_clear()
    works = fence_works()
    return {"works": works, "before": before, "after": usage()}


def _generation(order: dict[str, Any]) -> Generation:
    return Generation(
        number=order["number"],
        rank=order["rank"],
        world_size=order["size"],
        nodes=(),
        joined=(),
        active=0,
        committed=0,
        cursor=None,
        payload="",
        store=order["store"],
        cause="",
    )


@dataclass(kw_only=True)
class World:
    """The test's side: a store and ranks, all of them forked from this process."""

    fenced: bool = True
    ends: list[socket.socket] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    files: list[Any] = field(default_factory=list)
    store: str = ""
    number: int = 0

    def start(self, num_ranks: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.store = f"127.0.0.1:{listener.getsockname()[1]}"
        self.pids.append(self._fork(lambda: serve_store(listener)))
        listener.close()
        for _ in range(num_ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(WAIT_S)

            def work(end: socket.socket = theirs, other: socket.socket = ours) -> object:
                for known in [*self.ends, other]:
                    known.close()
                return rank(end, fenced=self.fenced)

            self.pids.append(self._fork(work))
            theirs.close()
            self.ends.append(ours)
            self.files.append(ours.makefile())

    def order(self, members: Sequence[int], how: Sequence[str], *, size: int = 0, forget: bool = False) -> int:
        """Begin a generation of these processes, in order of ranks."""
        self.number += 1
        for index, (member, each) in enumerate(zip(members, how, strict=True)):
            order = {
                "number": self.number,
                "rank": index,
                "size": size or len(members),
                "store": self.store,
                "how": each,
                "forget": forget,
            }
            self.say(member, order)
        return self.number

    def say(self, member: int, order: dict[str, Any]) -> None:
        self.ends[member].sendall(json.dumps(order).encode() + b"\n")

    def hear(self, member: int, key: str) -> dict[str, Any]:
        """The next message with a key; others before it are dropped."""
        while True:
            message = json.loads(self.files[member].readline())
            if key in message:
                return message

    def signal(self, member: int, number: int) -> None:
        os.kill(self.pids[1 + member], number)

    def client(self) -> dist.TCPStore:
        return open_client(self.store, WAIT_S)

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for file, end in zip(self.files, self.ends, strict=True):
            file.close()
            end.close()

    @staticmethod
    def _fork(work: Callable[[], object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)


def blocked(world: World, *, how: list[str], victim: int | None = None, sign: int = 0) -> dict[str, Any]:
    """All ranks of a generation wait in some way; something happens to one; the others are told, and go on without it."""
    world.start(len(how))
    everyone = list(range(len(how)))
    world.order(everyone, how)
    first = [world.hear(member, "total")["total"] for member in everyone]
    for member in everyone:
        world.hear(member, "waiting")
    time.sleep(0.05)
    if victim is not None:
        world.signal(victim, sign)
        time.sleep(0.05)
    rest = [member for member in everyone if member != victim]
    world.order(rest, ["idle"] * len(rest))
    left = [world.hear(member, "left") for member in rest]
    second = [world.hear(member, "total")["total"] for member in rest]
    return {"first": first, "second": second, "left": left}


def missing(world: World, *, publishes: bool) -> dict[str, Any]:
    """Two of three ranks meet; the third never comes, or says where it is and then stops."""
    world.start(2)
    number = world.order([0, 1], ["idle", "idle"], size=3)
    client = world.client()
    keys = [f"generation/{number}/control/0/{index}" for index in range(3)]
    client.wait(keys[:2], timedelta(seconds=WAIT_S))
    if publishes:
        # As rank 0 says where it is, but with a port above: of two ranks the one with the higher port connects.
        says = bytearray(client.get(keys[0]))
        place = says.index(socket.inet_aton("127.0.0.1"))
        says[place - 2 : place] = (65535).to_bytes(2, "big")
        client.set(keys[2], bytes(says))  # pyright: ignore[reportArgumentType]  (its stub knows only str)
    time.sleep(0.2)
    world.order([0, 1], ["idle", "idle"])
    left = [world.hear(member, "left") for member in (0, 1)]
    second = [world.hear(member, "total")["total"] for member in (0, 1)]
    return {"left": left, "second": second}


def many(world: World, *, num_generations: int, num_ranks: int) -> dict[str, Any]:
    """The same processes go through many generations, each left with blocked ranks."""
    world.start(num_ranks)
    everyone = list(range(num_ranks))
    hows = ["receive", "send", "broadcast", "receive"]
    client = world.client()
    totals, lefts, connects, keys = [], [], [], []
    for index in range(num_generations):
        world.order(everyone, [hows[(index + member) % 4] for member in everyone], forget=True)
        if index:
            lefts.append([world.hear(member, "left") for member in everyone])
        said = [world.hear(member, "total") for member in everyone]
        totals.append([message["total"] for message in said])
        connects += [message["connect_ms"] for message in said]
        for member in everyone:
            world.hear(member, "waiting")
        keys.append(client.num_keys())
    released = [m["released_ms"] for left in lefts for m in left if m["released_ms"] is not None]
    timings = {
        "connect_ms": connects[num_ranks:],
        "released_ms": released,
        "leave_ms": [m["leave_ms"] for left in lefts for m in left],
        "close_ms": [m["close_ms"] for left in lefts for m in left],
    }
    median = {name: [round(statistics.median(times), 2), round(max(times), 2)] for name, times in timings.items()}
    return {"totals": totals, "lefts": lefts, "keys": keys, "median_max": median}


def tried(world: World) -> dict[str, Any]:
    """The self-test, in a process of its own."""
    world.start(1)
    world.say(0, {"self_test": True})
    return world.hear(0, "works")


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    "blocked": blocked,
    "missing": missing,
    "many": many,
    "tried": tried,
}


def run_world(scenario: str, *, fenced: bool = True, **options: Any) -> dict[str, Any]:
    """Run a scenario in a world forked from this process."""
    world = World(fenced=fenced)
    try:
        return SCENARIOS[scenario](world, **options)
    finally:
        with contextlib.suppress(ProcessLookupError):
            world.close()
