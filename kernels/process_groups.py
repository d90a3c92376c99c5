"""Process groups that ops call by name, and the collectives they run: started now, waited for later, on any backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final
from weakref import WeakValueDictionary

import torch
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp

from mmcompile.errors import ConfigError

CONTEXT_GROUP = "cp"
"""Name, in the engine, of the group whose ranks share this process's sequences."""
TENSOR_GROUP = "tp"
"""Name, in the engine, of the group whose ranks share this process's weights."""
REPLICA_GROUP = "fsdp"
"""Name, in the engine, of the group of replicas that share their parameters."""

# An op names its group by a string, since a graph can hold no process group. Groups live as long as who made them.
_GROUPS: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def register_group(name: str, group: ProcessGroup) -> None:
    """Give the ops of this process a group by name, for as long as the caller keeps it; an earlier one is replaced.

    Args:
        name: name used in graphs.
        group: gloo or NCCL, made by `torch.distributed.new_group` or directly on a store. Its ranks are in the order in
            which keys are gathered, and in which parts of a weight follow each other.
    """
    _GROUPS[name] = group


def registered_group(name: str, num_ranks: int) -> ProcessGroup:
    """Return the group of a name. Raises ConfigError if no such group is alive, or if it has another size."""
    group = _GROUPS.get(name)
    if group is None:
        known = ", ".join(sorted(_GROUPS)) or "none"
        raise ConfigError(f"no process group is registered as {name!r} (there is: {known}); call register_group first")
    if group.size() != num_ranks:
        raise ConfigError(f"the process group {name!r} has {group.size()} ranks, and the call is for {num_ranks}")
    return group


class ExchangeLost(Exception):
    """A collective could not be finished: a rank of the group is gone."""


def all_reduce(target: torch.Tensor, group: ProcessGroup, op: ReduceOp.RedOpType = ReduceOp.SUM) -> torch.Tensor:
    """Replace a contiguous tensor by its sum (or maximum) over the ranks of a group, and return it.

    On CUDA the current stream waits, not this process. Raises ExchangeLost.
    """
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(op)
    try:
        group.allreduce([target], options).wait()
    except RuntimeError as error:
        raise ExchangeLost(str(error)) from error
    return target


class _Waitable(Protocol):
    def wait(self) -> object: ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """A collective under way. It holds the tensors that it reads and writes, which must not be freed before it is waited for."""

    target: torch.Tensor
    message: torch.Tensor
    done: _Waitable

    def wait(self) -> torch.Tensor:
        """Wait, and return the target: on CUDA, work queued later on the current stream may read it. Raises ExchangeLost."""
        try:
            self.done.wait()
        except RuntimeError as error:
            raise ExchangeLost(str(error)) from error
        return self.target


@final
class Channel:
    """Starts collectives that overlap with what the caller computes next.

    On CUDA they run on a stream of their own. Each starts when all work queued so far on the caller's stream is done:
    its message is complete then, and its target no longer read. `Transfer.wait` makes the caller's stream wait for its
    end. Each direction is one event.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._stream = _side_stream(device) if device.type == "cuda" else None

    def gather(self, target: torch.Tensor, message: torch.Tensor) -> Transfer:
        """Start to gather the messages of all ranks, in order, along dim 0 of `target`. Both are contiguous."""
        return self._start(self._group._allgather_base, target, message)

    def scatter_sum(self, target: torch.Tensor, message: torch.Tensor) -> Transfer:
        """Start to sum the messages of all ranks; `target` gets this rank's part along dim 0. Both are contiguous."""
        collective: Any = self._group._reduce_scatter_base  # its stub lacks a default
        return self._start(collective, target, message)

    def _start(self, collective: _Collective, target: torch.Tensor, message: torch.Tensor) -> Transfer:
        if self._stream is None:
            try:
                return Transfer(target=target, message=message, done=collective(target, message))
            except RuntimeError as error:
                raise ExchangeLost(str(error)) from error
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            collective(target, message).wait()  # of the side stream; this process goes on
            event = torch.cuda.Event()
            event.record()
            done = _Reached(event=event, device=target.device)
        return Transfer(target=target, message=message, done=done)


class _Collective(Protocol):
    def __call__(self, target: torch.Tensor, message: torch.Tensor, /) -> _Waitable: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reached:
    """A point of the side stream, as a CUDA event."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
