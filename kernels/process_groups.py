"""Process groups that ops find by name, and asynchronous collectives on them, for gloo and NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final
from weakref import WeakValueDictionary

import torch
from torch.distributed import AllreduceOptions, ProcessGroup, ReduceOp

from mmcompile.errors import ConfigError

CONTEXT_GROUP = "cp"
"""Name of the process group whose ranks share the tokens of this process's sequences."""
TENSOR_GROUP = "tp"
"""Name of the process group whose ranks share this process's weights by tensor parallelism."""
REPLICA_GROUP = "fsdp"
"""Name of the process group of replicas that share their parameters (FSDP)."""

# An op names its group by a string, since a graph can hold no process group. Groups live as long as who made them.
_GROUPS: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def register_group(name: str, group: ProcessGroup) -> None:
    """Register a process group under a name for the ops of this process; an earlier group of this name is replaced.

    Args:
        name: name used in graphs.
        group: gloo or NCCL group, made by `torch.distributed.new_group` or directly on a store. The caller must keep a
            reference. The order of its ranks is that of gathered keys and of the parts of a weight.
    """
    _GROUPS[name] = group


def registered_group(name: str, num_ranks: int) -> ProcessGroup:
    """Return the process group registered under a name. Raises ConfigError if it does not exist or has another size."""
    group = _GROUPS.get(name)
    if group is None:
        known = ", ".join(sorted(_GROUPS)) or "none"
        raise ConfigError(f"no process group is registered as {name!r} (there is: {known}); call register_group first")
    if group.size() != num_ranks:
        raise ConfigError(f"the process group {name!r} has {group.size()} ranks, and the call is for {num_ranks}")
    return group


class ExchangeLost(Exception):
    """Error: a collective failed because another rank of the process group is gone."""


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
    """A collective in flight. It holds the tensors it reads and writes, which must not be freed before `wait`."""

    target: torch.Tensor
    message: torch.Tensor
    done: _Waitable

    def wait(self) -> torch.Tensor:
        """Wait for the collective, and return its target. On CUDA only the current stream waits. Raises ExchangeLost."""
        try:
            self.done.wait()
        except RuntimeError as error:
            raise ExchangeLost(str(error)) from error
        return self.target


@final
class Channel:
    """Starts collectives that overlap with the caller's next computations.

    On CUDA they run on a stream of their own. Each starts when all work queued so far on the caller's stream is done:
    at that point the message is complete and the target is no longer read. `Transfer.wait` makes the caller's stream
    wait for the end of the collective. Each direction of waiting uses one CUDA event.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._stream = _side_stream(device) if device.type == "cuda" else None

    def gather(self, target: torch.Tensor, message: torch.Tensor) -> Transfer:
        """Start to gather the messages of all ranks, in rank order, along dim 0 of `target`. Both tensors are contiguous."""
        return self._start(self._group._allgather_base, target, message)

    def scatter_sum(self, target: torch.Tensor, message: torch.Tensor) -> Transfer:
        """Start to sum the messages of all ranks; `target` receives this rank's part along dim 0. Both tensors are contiguous."""
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
    """A point on the CUDA stream of the collectives; another stream can wait until the work before it is done."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
