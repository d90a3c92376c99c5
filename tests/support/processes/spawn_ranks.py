"""The one way in which tests start processes: a process that runs jobs one after the other, and ranks forked from one.

Started as a program (`python -m support.processes.spawn_ranks`) it loads torch once, then calls what it is sent.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from mmcompile.kernels.process_groups import register_group
from mmcompile.runtime.comm.groups import Groups
from support.paths import TESTS

J = TypeVar("J")
P = ParamSpec("P")
R = TypeVar("R")

_LENGTH = struct.Struct("!Q")
CALL_S = 300.0
"""Seconds that a call may take."""


def _start() -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", "-m", "support.processes.spawn_ranks"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0, start_new_session=True
    )


@dataclass(kw_only=True, slots=True)
class JobProcess:
    """A process that calls functions one after the other; functions, arguments and results are pickled."""

    process: subprocess.Popen[bytes] = field(default_factory=_start)

    def call(self, function: Callable[..., R], *arguments: Any, timeout_s: float = CALL_S, **options: Any) -> R:
        """Call a function in the process and return its result.

        Args:
            function: importable there by its module and name.
            arguments: given by position.
            timeout_s: seconds after which the process and all that it started are killed.
            options: given by name.

        Raises:
            AssertionError: the function raised an exception, the process died, or the time was up.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        _write(self.process.stdin, pickle.dumps((function, arguments, options)))
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            self.kill()
            raise AssertionError(f"{function.__name__} still ran after {timeout_s:g} s")
        answer = _read(self.process.stdout)
        if answer is None:
            raise AssertionError(f"the process that ran {function.__name__} died")
        error, result = pickle.loads(answer)
        if error:
            raise AssertionError(error)
        return result

    def kill(self) -> None:
        """Kill the process and everything that it started and that did not leave its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Let the process end; kill it when it does not within 60 s."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()


@dataclass(kw_only=True)
class RankContext:
    """One rank among those that run the same jobs; connections are made when first used."""

    rank: int
    num_ranks: int
    store: dist.Store  # pyright: ignore[reportPrivateImportUsage]

    @cached_property
    def groups(self) -> Groups:
        """Groups of the runtime over all ranks."""
        return self.connect("groups")

    def connect(self, name: str) -> Groups:
        """Return new groups over all ranks; every rank gives the same new name."""
        prefix = dist.PrefixStore(name, self.store)  # pyright: ignore[reportPrivateImportUsage]
        groups = Groups.connect(prefix, self.rank, self.num_ranks, torch.device("cpu"), local=True)
        # A rank that failed and closed its sockets now would fail others that still connect.
        self.store.set(f"{name}/connected/{self.rank}", "")
        self.store.wait([f"{name}/connected/{rank}" for rank in range(self.num_ranks)])
        return groups

    def register(self, name: str) -> None:
        """Register the gloo group of all ranks under a name that operators give."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.num_ranks)
            assert dist.group.WORLD is not None
            register_group(name, dist.group.WORLD)

    def leave(self) -> None:
        """Wait until all ranks have what they need, then close what was opened."""
        if "groups" in vars(self):
            self.groups.all_reduce(torch.zeros(1))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def spawn_ranks(
    work: Callable[[RankContext, J], R], jobs: Sequence[J], num_ranks: int, *, timeout_s: float = 240.0
) -> list[list[R]]:
    """Run all jobs in one set of ranks, each a process; per job, return the results of the ranks.

    Args:
        work: runs one rank's part of a job; importable by its module and name.
        jobs: run one after the other.
        num_ranks: processes.
        timeout_s: seconds from the start of the ranks, after which all are killed.

    Raises:
        AssertionError: a rank failed, with its traceback, or the ranks still run after `timeout_s`.
    """
    with JobProcess() as process:
        by_rank = process.call(_fork_ranks, work, list(jobs), num_ranks, timeout_s, timeout_s=timeout_s + 60)
    return [list(results) for results in zip(*by_rank, strict=True)] if jobs else []


def _fork_ranks(work: Callable[[RankContext, J], R], jobs: list[J], num_ranks: int, timeout_s: float) -> list[list[R]]:
    """Fork the ranks from this process, which has loaded torch for all; return the results by rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = start_processes(
            _rank, args=(num_ranks, folder, work, jobs), nprocs=num_ranks, join=False, start_method="fork"
        )
        assert running is not None
        deadline_s = time.monotonic() + timeout_s
        while not running.join(timeout=0.2):
            if time.monotonic() > deadline_s:
                for process in running.processes:
                    assert process is not None
                    process.kill()
                raise TimeoutError(f"ranks still run after {timeout_s:g} s")
        return [torch.load(folder / f"results_{rank}", weights_only=False) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, folder: Path, work: Callable[[RankContext, J], R], jobs: list[J]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    context = RankContext(rank=rank, num_ranks=num_ranks, store=store)
    torch.save([work(context, job) for job in jobs], folder / f"results_{rank}")
    context.leave()


def _write(stream: IO[bytes], data: bytes) -> None:
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[stream.write(data) :]


def _read(stream: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end of the stream."""
    head = _read_exactly(stream, _LENGTH.size)
    return None if head is None else _read_exactly(stream, _LENGTH.unpack(head)[0])


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _main() -> None:
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    # What the processes of a job print goes where errors go.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    while (request := _read(requests)) is not None:
        try:
            function, arguments, options = pickle.loads(request)
            answer = "", function(*arguments, **options)
        except Exception:  # reported to the caller, who raises it
            answer = traceback.format_exc(), None
        _write(answers, pickle.dumps(answer))


if __name__ == "__main__":
    _main()
