"""`BackgroundBalancer`: a balancer that assigns samples in a process of its own, at low priority.

A thread that plans the next step shares Python's lock with the thread that runs the current one; comparing assignments of
thousands of samples would delay the step. The process gets costs and returns an assignment, so it needs neither model nor
samples. It ends when its socket is closed, at the latest with the process that started it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import msgspec
import numpy as np

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.errors import ConfigError
from mmcompile.runtime.comm.framing import frame, receive_frame
from mmcompile.runtime.launch.background_process import BackgroundProcess

T = TypeVar("T")

_NICE = 10
_MODULE = "mmcompile.runtime.launch.background_balancer"
"""Name of this module. It is run as a process, with the file descriptor of a socket as its argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Names a function and its text arguments, by which another process makes an equal balancer."""

    module: str
    function: str
    arguments: tuple[str, ...]

    def make(self) -> Balancer:
        """Import and call the function, and return the balancer."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    costs: SampleCosts
    grid: Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    assignment: Assignment | None = None
    reason: str = ""
    error: str = ""
    """Message of a ConfigError, raised instead of an assignment; "" without an error."""


@final
class BackgroundBalancer(BackgroundProcess, Balancer):
    """Assigns samples in another process once that is ready, and in this one until then; both give the same assignment.

    Args:
        inner: balancer that runs in this process.
        recipe: makes an equal balancer in the other process.
    """

    name: ClassVar[str] = "aside"

    def __init__(self, inner: Balancer, recipe: Recipe) -> None:
        super().__init__(_MODULE, "the balancer's process ended; steps are balanced in this process from now on")
        self.inner = inner
        self._recipe = recipe

    @property
    def title(self) -> str:
        """Title of the balancer `inner`: its name, with options that are not the default."""
        return self.inner.title

    def start(self) -> None:
        """Start the process without waiting for it; a second call has no effect."""
        if self._process is None:
            self._start(_encoded(self._recipe))

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        """Return the assignment of samples to microbatches: made in the other process if that is ready, else by `self.inner`."""
        return self.explained(costs, grid)[0]

    def explained(self, costs: SampleCosts, grid: Grid) -> tuple[Assignment, str]:
        """Return the assignment of samples to microbatches as by `assign`, and the balancer's explanation of it as text."""
        if not self.is_up:
            return self.inner.explained(costs, grid)
        self._tell(_encoded(_Question(costs=costs, grid=grid)))
        data = self._heard()
        if data is None:
            return self.inner.explained(costs, grid)
        answer = _decoded(data, _Answer)
        if answer.assignment is None:
            raise ConfigError(answer.error)
        return answer.assignment, answer.reason


def serve(line: socket.socket) -> None:
    """Answer assignment requests on a socket until it is closed."""
    _yield_cores()
    recipe = _received(line, Recipe)
    if recipe is None:
        return
    balancer = recipe.make()
    line.sendall(frame(_encoded(_Answer())))
    while (question := _received(line, _Question)) is not None:
        try:
            assignment, reason = balancer.explained(question.costs, question.grid)
            line.sendall(frame(_encoded(_Answer(assignment=assignment, reason=reason))))
        except ConfigError as error:
            line.sendall(frame(_encoded(_Answer(error=str(error)))))


def _yield_cores() -> None:
    """Lower this process's priority below that of ranks on the same cores: its work may take a whole step."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(_NICE)


def _encoded(message: object) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes()))


def _decoded(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_array)


def _received(line: socket.socket, kind: type[T]) -> T | None:
    data = receive_frame(line)
    return None if data is None else _decoded(data, kind)


def _array(_: type, value: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as own_line:
        serve(own_line)
