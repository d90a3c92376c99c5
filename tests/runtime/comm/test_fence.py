"""Fences, in this process; and generations of real processes that are left while ranks wait for each other."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes.control_world import PREPARE
from support.processes.fence_ranks import run_world
from support.processes.spawn_ranks import JobProcess

from mmcompile.runtime.comm import fence as fence_module
from mmcompile.runtime.comm.fence import Fence, fence_works, of_gloo, of_store
from mmcompile.runtime.comm.groups import Groups, PeerLost, wait
from mmcompile.runtime.control.membership_client import MembershipClient
from mmcompile.runtime.control.messages import Release, Suspend
from mmcompile.runtime.control.stream import FRAME_BYTES, Stream
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.launch.session import Runner

CPU = torch.device("cpu")
RELEASED_MS = 2000.0
"""Typically 1; timeouts of the worlds are far above."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[JobProcess]:
    with JobProcess() as process:
        yield process


def pair(fence: Fence | None = None, meanwhile: Callable[[], None] = lambda: None) -> list[Groups]:
    """Two ranks of this process; none if they could not meet."""
    store, made = dist.HashStore(), dict[int, Groups]()

    def make(rank: int) -> None:
        with contextlib.suppress(RuntimeError):
            made[rank] = Groups.connect(store, rank, 2, CPU, local=True, timeout_s=20.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    with (fence or Fence(of_gloo)).around():
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join()
    return [made[rank] for rank in sorted(made)]


def receive(groups: Groups, caught: list[BaseException], *, rank: int = 1) -> threading.Thread:
    """A thread that waits for a message."""

    def work() -> None:
        try:
            wait(groups.receive_control(torch.empty(1), rank, 1))
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not groups.waiting:
        time.sleep(0.001)
    return thread


def talks(one: socket.socket, other: socket.socket) -> bool:
    one.settimeout(5.0)
    other.settimeout(5.0)
    one.sendall(b"ping")
    if other.recv(4) != b"ping":
        return False
    other.sendall(b"pong")
    return one.recv(4) == b"pong"


def accepted(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    one = socket.create_connection(server.getsockname())
    return one, server.accept()[0]


# One process


def test_fence_works_here_and_leaves_nothing(worlds: JobProcess) -> None:
    found = worlds.call(run_world, "tried")
    assert found["works"]
    assert found["after"]["fds"] == found["before"]["fds"]
    assert found["after"]["threads"] <= found["before"]["threads"]


def test_a_system_without_fences_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fence_module, "_FDS", "/no/such/folder")
    fence_works.cache_clear()
    assert not fence_works() and not fence_works()
    fence = Fence(of_gloo)
    with fence.around():
        fence.cut()
    assert capsys.readouterr().err.count("cannot be cut short") == 1
    fence_works.cache_clear()


def test_only_sockets_of_the_group_are_cut() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    old = accepted(server)
    unix = socket.socketpair()
    fence, new = Fence(of_gloo, num_ranks=2), list[socket.socket]()
    # Another thread of the user's connects, and is connected to, just when the group is made.
    groups = pair(fence, lambda: new.extend(accepted(server)))
    caught: list[BaseException] = []
    waiting = receive(groups[0], caught)
    fence.cut()
    waiting.join(10.0)
    assert len(caught) == 1
    later = accepted(server)
    assert talks(*old) and talks(*new) and talks(*unix) and talks(*later)
    for each in groups:
        each.close()
    for end in (server, *old, *new, *unix, *later):
        end.close()


def test_a_number_that_was_given_to_another_socket_is_not_touched() -> None:
    fence = Fence(of_gloo)
    groups = pair(fence)
    before = set(os.listdir("/proc/self/fd"))
    for each in groups:
        each.close()
    freed = before - set(os.listdir("/proc/self/fd"))
    server = socket.create_server(("127.0.0.1", 0))
    ends = [accepted(server) for _ in range(len(freed))]
    assert {str(end.fileno()) for both in ends for end in both} & freed, "no number was used again"
    fence.cut()
    assert all(talks(*both) for both in ends)
    for end in (server, *(end for both in ends for end in both)):
        end.close()


def test_cuts_repeat_and_may_come_before_the_group() -> None:
    fence = Fence(of_gloo, num_ranks=2)
    fence.cut()
    groups = pair(fence)
    fence.cut()
    # Either they did not meet, or they did and lost each other.
    for each in groups:
        with pytest.raises(PeerLost):
            wait(each.receive_control(torch.empty(1), 1 - each.rank, 1))
        each.close()
    assert fence.is_cut


def test_a_wait_for_a_key_is_cut() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fence, caught = Fence(of_store(server.port)), []

    def work() -> None:
        with fence.around():
            client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
            client.set("connected", "yes")
            try:
                client.get("never set")
            except RuntimeError as error:
                caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not server.check(["connected"]):
        time.sleep(0.001)
    fence.cut()
    thread.join(10.0)
    assert len(caught) == 1
    assert server.get("connected") == b"yes"


def test_gloo_can_be_interrupted_without_a_fence() -> None:
    groups = pair()
    caught: list[BaseException] = []
    waiting = receive(groups[0], caught)
    groups[0].interrupt()
    waiting.join(10.0)
    assert len(caught) == 1
    for each in groups:
        each.close()


def test_a_thread_left_behind_gets_an_error_for_a_message_that_comes_late() -> None:
    groups = pair()
    caught: list[BaseException] = []
    waiting = receive(groups[0], caught)
    groups[0].close()
    assert groups[0].waiting
    wait(groups[1].send_control(torch.ones(1), 0, 1))
    waiting.join(10.0)
    assert "left them" in str(caught[0])
    with pytest.raises(PeerLost, match="left them"):
        groups[0].send_control(torch.ones(1), 1, 1)
    groups[1].close()


def test_an_error_of_a_runner_keeps_nothing_alive() -> None:
    class Held:
        pass

    gone: list[weakref.ref[Held]] = []

    def work() -> None:
        held = Held()
        gone.append(weakref.ref(held))
        raise ValueError(str(held))

    runner = Runner()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="Held"):
            runner.call(work, lambda: None)
        runner.call(lambda: None, lambda: None)
        assert gone[0]() is None
    finally:
        gc.enable()
        runner.end(5.0)


# MembershipClient


@pytest.fixture
def membership() -> Iterator[tuple[MembershipClient, Stream]]:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    membership = MembershipClient(theirs, 0, Times(recovery_deadline_s=2.0), lost.set)
    stream = Stream(ours, FRAME_BYTES)
    yield membership, stream
    stream.close()
    assert lost.wait(10.0)
    theirs.close()


def test_the_hook_is_called_when_a_generation_ends(membership: tuple[MembershipClient, Stream]) -> None:
    member, agent = membership
    seen: list[bool] = []
    called = threading.Semaphore(0)

    def hook() -> None:
        seen.append(member.superseded)
        called.release()

    member.on_superseded = hook
    messages = [
        PREPARE,
        replace(PREPARE, number=PREPARE.number + 1),
        Suspend(generation=PREPARE.number + 1, reason="too few"),
    ]
    for message in [*messages, Release(success=True, reason="done")]:
        agent.send(message)
        assert called.acquire(timeout=10.0), f"not called for {message}"
    assert seen == [True] * 4


def test_a_hook_that_fails_is_heard_of_and_stops_nothing(
    membership: tuple[MembershipClient, Stream], capfd: pytest.CaptureFixture[str]
) -> None:
    member, agent = membership
    calls: list[int] = []

    def hook() -> None:
        calls.append(1)
        raise ValueError("a bug in the hook")

    member.on_superseded = hook
    for number in (1, 2):
        agent.send(replace(PREPARE, number=PREPARE.number + number))
        deadline_s = time.monotonic() + 10.0
        while len(calls) < number and time.monotonic() < deadline_s:
            time.sleep(0.001)
    assert len(calls) == 2 and member.superseded
    assert "a bug in the hook" in capfd.readouterr().err


# Processes


def check(found: dict[str, Any], size: int, rest: int) -> None:
    """Sums of both generations are right, and all ranks were let go."""
    assert found["first"] == [sum(rank + 1 for rank in range(size))] * size
    assert found["second"] == [sum(rank + 2 for rank in range(rest))] * rest
    for left in found["left"]:
        assert left["leave_ms"] < RELEASED_MS
        assert left["released_ms"] is None or left["released_ms"] < RELEASED_MS


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize(
    "how",
    [["receive", "receive", "receive"], ["idle", "receive", "send"], ["idle", "broadcast", "broadcast"]],
    ids=" ".join,
)
def test_waits_for_live_ranks_end_at_once(worlds: JobProcess, how: list[str], fenced: bool) -> None:
    found = worlds.call(run_world, "blocked", how=how, fenced=fenced)
    check(found, 3, 3)
    released = [left["released_ms"] for left in found["left"]]
    assert [each is None for each in released] == [each == "idle" for each in how]


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_waits_for_dead_and_stopped_ranks_end_at_once(worlds: JobProcess, sign: signal.Signals, fenced: bool) -> None:
    found = worlds.call(run_world, "blocked", how=["receive", "send", "idle"], victim=2, sign=int(sign), fenced=fenced)
    check(found, 3, 2)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_thread_that_computes_is_waited_for(worlds: JobProcess, fenced: bool) -> None:
    found = worlds.call(run_world, "blocked", how=["receive", "compute", "broadcast"], fenced=fenced)
    check(found, 3, 3)
    assert found["left"][1]["count"] == -1


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("publishes", [False, True])
def test_a_rank_that_does_not_come_holds_up_nobody(worlds: JobProcess, publishes: bool, fenced: bool) -> None:
    found = worlds.call(run_world, "missing", publishes=publishes, fenced=fenced)
    assert found["second"] == [5.0, 5.0]
    for left in found["left"]:
        assert left["leave_ms"] < RELEASED_MS
    # Without a fence the thread that connects is left behind until its time is over.
    assert all((left["threads"] > 3) is not fenced for left in found["left"])


@pytest.mark.parametrize("fenced", [True, False])
def test_generations_leave_nothing_behind(worlds: JobProcess, fenced: bool) -> None:
    found = worlds.call(run_world, "many", num_generations=50, num_ranks=3, fenced=fenced)
    assert found["totals"] == [[sum(rank + number for rank in range(3))] * 3 for number in range(1, 51)]
    for member in range(3):
        lefts = [left[member] for left in found["lefts"]]
        early, late = lefts[5:15], lefts[-10:]
        assert max(left["fds"] for left in late) <= max(left["fds"] for left in early)
        # One may be on its way out.
        assert max(left["threads"] for left in late) <= max(left["threads"] for left in early) + 1
        assert late[-1]["rss_kb"] - early[0]["rss_kb"] < 20_000
        assert all(left["leave_ms"] < RELEASED_MS for left in lefts)
    assert max(found["keys"]) <= max(found["keys"][:5])
    assert all(before["left"] + 1 == after["left"] for before, after in pairwise(left[0] for left in found["lefts"]))
