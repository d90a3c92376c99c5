"""Process groups of one engine: a gloo group for control and CPU tensors, and NCCL pairs for CUDA tensors.

The groups are made directly on a store and never become torch's default group, so a user's own use of
torch.distributed is left alone, and two engines can live in one process one after the other.

gloo on torch 2.13 offers no way to wait for a message for a while and then go on waiting: a `wait` that times out closes
the pair, `is_completed` stays false, and an abort from another thread releases nobody. So waits block, and what ends
them is the end of the process on the other side (`launch` sees to that).
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members.

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_NEVER = timedelta(days=7)
"""Rank 0 may think for hours between two steps; a dead peer is noticed by other means."""

_STAR_TAG = 2**31 - 3
"""Above the tags of links, below those of gradients and of control messages."""


class PeerLost(Exception):
    """A message could not be sent or received because the other side is gone; another rank holds the cause."""


class Work(Protocol):
    """A message on its way (`torch.distributed.Work`, as far as we use it)."""

    def wait(self) -> bool: ...


class Backend(Protocol):
    """A process group made directly on a store (`ProcessGroupGloo`, `ProcessGroupNCCL`)."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...


def wait(work: Work) -> None:
    """Block until a message is through. Raises PeerLost."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One direction between two stages. Messages of a lane are sent and received in the same order on both sides."""

    source: int
    """Rank that sends."""
    target: int
    """Rank that receives."""
    name: str


@dataclass(kw_only=True, slots=True)
class Groups:
    """The groups of one rank.

    Args:
        store: shared by all ranks, fresh for this engine.
        device: where stages compute. On CUDA, lanes are pairs of ranks joined by NCCL, one communicator a lane since
            NCCL matches messages by order only; control messages and batch inputs stay on gloo.
    """

    store: dist.Store
    rank: int
    world_size: int
    device: torch.device
    control: Backend
    local: bool
    """All ranks are on this machine."""
    _lanes: dict[Lane, Backend] = field(default_factory=dict)
    _shards: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @classmethod
    def connect(cls, store: dist.Store, rank: int, world_size: int, device: torch.device, *, local: bool) -> Groups:
        """Meet all other ranks. `local`: all ranks are on this machine, so only its loopback address is used."""
        control = _gloo(dist.PrefixStore("control", store), rank, world_size, local)
        return cls(store=store, rank=rank, world_size=world_size, device=device, control=control, local=local)

    def shards(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks that share a stage, for collectives on the device; all of them must ask for it.

        Args:
            ranks: of the shards in order; this rank is one of them.
        """
        if ranks not in self._shards:
            store = dist.PrefixStore(f"shards/{'-'.join(map(str, ranks))}", self.store)
            index = ranks.index(self.rank)
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _NEVER
                self._shards[ranks] = dist.ProcessGroupNCCL(store, index, len(ranks), options)
            else:
                self._shards[ranks] = _gloo(store, index, len(ranks), self.local)
        return self._shards[ranks]

    def send(self, tensor: Tensor, lane: Lane, tag: int) -> Work:
        """Start to send. The tensor must be contiguous, kept and unchanged until the work is through."""
        if tensor.is_cuda:
            return self._pair(lane).send([tensor], 1, tag)
        return self.send_control(tensor, lane.target, tag)

    def receive(self, tensor: Tensor, lane: Lane, tag: int) -> Work:
        """Start to receive into a contiguous tensor."""
        if tensor.is_cuda:
            return self._pair(lane).recv([tensor], 0, tag)
        return self.receive_control(tensor, lane.source, tag)

    def send_control(self, tensor: Tensor, rank: int, tag: int) -> Work:
        """Start to send a CPU tensor to a rank."""
        try:
            return self.control.send([tensor], rank, tag)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def receive_control(self, tensor: Tensor, rank: int, tag: int) -> Work:
        """Start to receive a CPU tensor from a rank."""
        try:
            return self.control.recv([tensor], rank, tag)
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank rank 0's CPU tensor, of a size that all know.

        Straight from rank 0, as `all_reduce`: for what we send this way, gloo's collectives cost more in hops between
        threads and in rounds around a ring than they save.
        """
        if self.rank == 0:
            for work in [self.send_control(tensor, rank, _STAR_TAG) for rank in range(1, self.world_size)]:
                wait(work)
        else:
            wait(self.receive_control(tensor, 0, _STAR_TAG))

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a CPU tensor over all ranks, in place and in order of ranks, so that all get the same bits."""
        if self.rank == 0:
            parts = [torch.empty_like(tensor) for _ in range(1, self.world_size)]
            for work in [self.receive_control(part, rank, _STAR_TAG) for rank, part in enumerate(parts, 1)]:
                wait(work)
            for part in parts:
                tensor += part
            self.broadcast(tensor)
        else:
            mine = tensor.clone()
            # Posted first: rank 0's answer then needs no asking.
            answer = self.receive_control(tensor, 0, _STAR_TAG)
            wait(self.send_control(mine, 0, _STAR_TAG))
            wait(answer)

    def _pair(self, lane: Lane) -> Backend:
        if lane not in self._lanes:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            store = dist.PrefixStore(f"{lane.name}/{lane.source}/{lane.target}", self.store)
            self._lanes[lane] = dist.ProcessGroupNCCL(store, int(self.rank == lane.target), 2, options)
        return self._lanes[lane]


def _gloo(store: dist.Store, rank: int, world_size: int, local: bool) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _NEVER
    options._threads = 2
    create = dist.ProcessGroupGloo.create_device if local else dist.ProcessGroupGloo.create_default_device
    options._devices = [create(hostname="127.0.0.1") if local else create()]
    return dist.ProcessGroupGloo(store, rank, world_size, options)
