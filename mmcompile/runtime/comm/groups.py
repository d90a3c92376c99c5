"""Process groups of one engine: a gloo group for control and CPU tensors, and NCCL pairs for CUDA tensors.

The groups are made directly on a store and never become torch's default group, so a user's own use of
torch.distributed is left alone, and two engines can live in one process one after the other.

gloo on torch 2.13 offers no way to wait for a message for a while and then continue to wait: a `wait` that times out closes the
pair, `is_completed` stays false, and an abort from another thread releases no wait. So waits block until the end
of the process on the other side (`launch` sees to that), or a `Fence`.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members.

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmcompile.runtime.comm.local_address import listen_at

_NEVER = timedelta(days=7)
"""Timeout of waits without a limit, as rank 0 may be idle for hours between steps. Dead ranks are noticed in other ways."""

_INTERRUPT_TAG = 2**31 - 5
"""Tag of receives whose message is never sent: their timeout ends all connections of the process group."""
_MOMENT = timedelta(milliseconds=1)

_BROADCASTS = 8
"""Maximum number of broadcasts that may be in transfer at a time."""

_NO_MORE = "the groups are closed: this rank left them"

FIRST_GRADIENT_TAG = 2**30
"""First tag of gradients; activations and batch inputs have lower tags."""
END_GRADIENT_TAG = 2**31 - 16
"""Upper bound (exclusive) of tags of gradients; control messages have higher tags."""
_STAR_TAG = 2**31 - 3
"""Tag of broadcasts and reductions through rank 0, between the smaller tags of gradients and the larger ones of commands."""


class PeerLost(Exception):
    """A message could not be sent or received because the other rank is gone. Another rank reports the cause."""


class Work(Protocol):
    """A message in transfer: the part of `torch.distributed.Work` that this package uses."""

    def wait(self) -> bool:
        """Block until the message has been sent or received, and return True. Raises RuntimeError if that fails."""
        ...


class _Arrived:
    """Stand-in for an empty message, which is not sent: waiting for it returns at once."""

    def wait(self) -> bool:
        return True


ARRIVED = _Arrived()


class Backend(Protocol):
    """A process group made directly on a store (`ProcessGroupGloo`, `ProcessGroupNCCL`)."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Start to send tensors to a rank of the group; return the work to wait for."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Any:
        """Start to receive into tensors from a rank of the group; return the work to wait for."""


class _Closed:
    """Stand-in for a closed process group, whose sends and receives raise RuntimeError."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work:
        raise RuntimeError(_NO_MORE)

    recv = send


def wait(work: Work) -> None:
    """Block until a message has been sent or received. Raises PeerLost."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction between two ranks, for one purpose (`name`). Its messages arrive in the order in which they are sent."""

    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    name: str


@dataclass(kw_only=True, slots=True)
class Groups:
    """Sends and receives tensors between one rank and the others: by gloo for control and CPU tensors, NCCL for CUDA tensors.

    Args:
        store: store shared by all ranks, fresh for this engine.
        device: device on which stages compute. On CUDA, each lane has an NCCL communicator of its two ranks, since NCCL matches
            messages by order only; control messages and batch inputs stay on gloo.
    """

    store: dist.Store
    rank: int
    world_size: int
    device: torch.device
    control: Backend
    local: bool
    """True if all ranks are on this machine."""
    closed: bool = False
    waiting: bool = False
    """True while a thread waits for a message on gloo. If the groups are closed meanwhile, that wait raises PeerLost."""
    _broadcasts: deque[list[Work]] = field(default_factory=deque)
    """Rank 0's broadcasts that may not have arrived yet, oldest first; each is a list with one message per other rank."""
    _lanes: dict[Lane, Backend] = field(default_factory=dict)
    _shards: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def connect(
        cls,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        local: bool,
        timeout_s: float | None = None,
    ) -> Groups:
        """Connect to all other ranks, and return the groups.

        Args:
            local: all ranks are on this machine, so only its loopback address is used.
            timeout_s: seconds to wait for a rank to connect; None: no limit. Messages have no time limit.

        Raises:
            RuntimeError: a rank did not connect, or left meanwhile.
        """
        timeout = _NEVER if timeout_s is None else timedelta(seconds=timeout_s)
        control = _gloo(dist.PrefixStore("control", store), rank, world_size, local, timeout)
        return cls(store=store, rank=rank, world_size=world_size, device=device, control=control, local=local)

    def close(self) -> None:
        """Release the connections and threads of gloo; takes about 10 ms a group, in which other threads run.

        Waits, sends and receives afterwards raise PeerLost. A thread that waits now keeps its group until its wait ends (cut a
        `Fence` first). A message that is not waited for keeps it as long as the message is referenced. The store is the caller's
        to close. Safe to call twice.
        """
        self.closed = True
        self.control = _Closed()
        self._broadcasts.clear()
        self._lanes.clear()
        self._shards.clear()

    def interrupt(self) -> None:
        """Release every thread that waits for a message on gloo, with PeerLost, on any system; any thread may call this.

        When one wait times out, gloo ends all connections of the group one after the other: up to 10 ms a rank. A `Fence` is
        faster where it works.
        """
        for rank in range(self.world_size):
            if rank != self.rank:
                # Without a connection to this rank, one to the next will do.
                with contextlib.suppress(RuntimeError):
                    self.control.recv([torch.empty(1)], rank, _INTERRUPT_TAG).wait(_MOMENT)

    def shards(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of the ranks that share a stage, for collectives on the device; all of them must call this.

        Args:
            ranks: ranks of the shards in order; this rank is one of them.
        """
        if self.closed:
            raise PeerLost(_NO_MORE)
        if ranks not in self._shards:
            store = dist.PrefixStore(f"shards/{'-'.join(map(str, ranks))}", self.store)
            index = ranks.index(self.rank)
            if self.device.type == "cuda":
                self._shards[ranks] = _nccl(store, index, len(ranks))
            else:
                self._shards[ranks] = _gloo(store, index, len(ranks), self.local, _NEVER)
        return self._shards[ranks]

    def send(self, tensor: Tensor, lane: Lane, tag: int) -> Work:
        """Start to send a tensor over a lane. It must be contiguous, and alive and unchanged until the returned work is done."""
        if tensor.is_cuda:
            return self._pair(lane).send([tensor], 1, tag)
        return self.send_control(tensor, lane.target, tag)

    def receive(self, tensor: Tensor, lane: Lane, tag: int) -> Work:
        """Start to receive into a contiguous tensor over a lane; return the work to wait for."""
        if tensor.is_cuda:
            return self._pair(lane).recv([tensor], 0, tag)
        return self.receive_control(tensor, lane.source, tag)

    def send_control(self, tensor: Tensor, rank: int, tag: int) -> Work:
        """Start to send a CPU tensor to a rank over gloo; return the work to wait for."""
        try:
            return _Message(self.control.send([tensor], rank, tag), self)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def receive_control(self, tensor: Tensor, rank: int, tag: int) -> Work:
        """Start to receive into a CPU tensor from a rank over gloo; return the work to wait for."""
        try:
            return _Message(self.control.recv([tensor], rank, tag), self)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's CPU tensor, which must not change afterwards, into the tensor of the same size of every other rank.

        Rank 0 sends to each rank directly, also in `all_reduce`: for messages of the sizes used here, gloo's collectives cost
        more in hops between threads and in rounds around a ring than they save.
        """
        if self.rank == 0:
            # Not waited for now: gloo forgets a message that it has begun to write to a rank that just left, and a thread
            # that waits for that one is never let go. A receive is; so whoever hears from the others next learns of it.
            self._broadcasts.append([self.send_control(tensor, rank, _STAR_TAG) for rank in range(1, self.world_size)])
            while len(self._broadcasts) > _BROADCASTS:
                self._arrived()
        else:
            wait(self.receive_control(tensor, 0, _STAR_TAG))

    def flush(self) -> None:
        """Block rank 0 until the other ranks have received all broadcasts."""
        while self._broadcasts:
            self._arrived()

    def _arrived(self) -> None:
        for work in self._broadcasts.popleft():
            wait(work)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a CPU tensor over all ranks, in place and in order of ranks, so that all get the same bits."""
        if self.rank == 0:
            parts = [torch.empty_like(tensor) for _ in range(1, self.world_size)]
            for work in [self.receive_control(part, rank, _STAR_TAG) for rank, part in enumerate(parts, 1)]:
                wait(work)
            for part in parts:
                tensor += part
            self.broadcast(tensor.clone())
        else:
            mine = tensor.clone()
            # Posted first: rank 0's answer then needs no asking.
            answer = self.receive_control(tensor, 0, _STAR_TAG)
            given = self.send_control(mine, 0, _STAR_TAG)
            wait(answer)
            # Rank 0 answers when it has it.
            del given

    def _pair(self, lane: Lane) -> Backend:
        if self.closed:
            raise PeerLost(_NO_MORE)
        if lane not in self._lanes:
            store = dist.PrefixStore(f"{lane.name}/{lane.source}/{lane.target}", self.store)
            self._lanes[lane] = _nccl(store, int(self.rank == lane.target), 2)
        return self._lanes[lane]


class _Message:
    """A message in transfer by gloo. Waiting for it has no time limit, regardless of the process group's timeout."""

    __slots__ = ("_groups", "_work")

    def __init__(self, work: Any, groups: Groups) -> None:
        self._work = work
        self._groups = groups

    def wait(self) -> bool:
        groups = self._groups
        # Closing looks the other way round, closed first: a wait it sees can only end in the error below.
        groups.waiting = True
        try:
            if not groups.closed:
                self._work.wait(_NEVER)
        finally:
            groups.waiting = False
        if groups.closed:
            raise RuntimeError(_NO_MORE)
        return True


def _nccl(store: dist.Store, rank: int, world_size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _gloo(store: dist.Store, rank: int, world_size: int, local: bool, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._threads = 2
    options._devices = [_listener(local)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _listener(local: bool) -> Any:
    """Return the gloo device (network interface or address) to connect through; loopback if all ranks are `local`."""
    found = ("hostname", "127.0.0.1") if local else listen_at(os.environ)
    if found is None:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(**dict([found]))
