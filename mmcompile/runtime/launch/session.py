"""`ProcessGroupSession`: the connected ranks of one engine, started in any way, and the handling of a rank's failure."""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from mmcompile.errors import ConfigError, EngineError
from mmcompile.planner.plan.placement import PlacedStage
from mmcompile.planner.schedule.schedule import ActionKind
from mmcompile.runtime.comm.groups import Groups, PeerLost
from mmcompile.runtime.launch.local_workers import Failure, Workers
from mmcompile.runtime.monitoring.status import IDLE, Status, StatusBoard

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 0.03
_CAUSE_S = 2.0
"""Maximum seconds for which a rank that lost its connection to another rank waits for the cause."""
_CLOSE_S = 5.0
_ABORT_POLL_S = 0.25
_ABORT_KEY = "abort"
_ADVICE = "all ranks were stopped; start a new engine and engine.load() the last checkpoint"

_launched: Iterator[int] = itertools.count()
"""Counter of the engines that this process made under a launcher. It is the same on all ranks, so store keys contain it."""


class Runner:
    """Runs functions one at a time on a daemon thread of its own."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="mmcompile-step", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], check: Callable[[], None]) -> T:
        """Run a function on the thread, and return its result.

        Args:
            check: called every 30 ms while waiting; an exception it raises ends the wait, and the function keeps running.
        """
        future: Future[T] = Future()
        self._calls.put((function, future))
        while not wait((future,), _POLL_S).done:
            check()
        try:
            return future.result()
        finally:
            # The traceback of its error refers to this frame: a cycle would keep what the function worked on.
            del future

    def end(self, timeout_s: float) -> None:
        """Ask the thread to end, and wait up to `timeout_s`: it may be blocked in a message that never arrives."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            # Not keep the last step's tensors alive until the next call.
            del call, function, future


class ProcessGroupSession(ABC):
    """Connects the ranks of an engine. `call` runs functions that communicate, and raises EngineError if any rank fails."""

    groups: Groups
    board: StatusBoard

    def __init__(self, stages: tuple[PlacedStage, ...]) -> None:
        self._stages = stages
        self._runner = Runner()
        self._broken = ""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.groups.rank

    @property
    def is_over(self) -> bool:
        """True once the session was closed, or any rank failed."""
        return bool(self._broken)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that communicates with other ranks, and return its result.

        Raises:
            EngineError: any rank failed, in this call or an earlier one; the message names rank, stage, step and action.
            KeyboardInterrupt: Ctrl-C. All ranks are stopped.
        """
        if self._broken:
            raise EngineError(self._broken)
        try:
            return self._runner.call(lambda: function(*args, **kwargs), self._check)
        except PeerLost as error:
            self._fail(self._cause(error), None)
        except Exception as error:
            own = Failure(rank=self.rank, cause=f"failed: {type(error).__name__}: {error}")
            self._fail(str(error) if isinstance(error, EngineError) else self._describe(own), error)
        except BaseException as interrupt:
            self._stop(f"rank {self.rank} was interrupted by {type(interrupt).__name__}; {_ADVICE}")
            raise

    def check(self) -> None:
        """Check whether any rank failed, between calls.

        Raises:
            EngineError: a rank failed; all ranks are stopped.
        """
        if self._broken:
            raise EngineError(self._broken)
        try:
            self._check()
        except EngineError as error:
            self._fail(str(error), error)

    def close(self, farewell: Callable[[], None] | None) -> None:
        """End the session. Safe to call twice.

        Args:
            farewell: function that ends the other ranks; not called after a failure. None: they end by themselves.
        """
        if self._broken:
            return
        self._broken = "the engine is closed; start a new one"
        if farewell is not None:
            deadline = time.monotonic() + _CLOSE_S
            with contextlib.suppress(PeerLost, TimeoutError):
                self._runner.call(farewell, lambda: _expire(deadline))
        self._end(_CLOSE_S)
        self._runner.end(_CLOSE_S)

    def _fail(self, message: str, error: Exception | None) -> NoReturn:
        self._stop(message)
        raise EngineError(message) from error

    def _stop(self, message: str) -> None:
        self._broken = message
        self._abort(message)
        self._runner.end(1.0)
        # A thread that a peer's end releases only while Python shuts down would abort this process.
        atexit.register(self._runner.end, _CLOSE_S)

    def _describe(self, failure: Failure) -> str:
        """Return a failure in words: `rank 2 (stage language_model.1) died with signal 9 (SIGKILL) in step 5 while F3; ...`."""
        status = self.board.read(failure.rank)
        mine = [stage.name for stage in self._stages if failure.rank in stage.ranks]
        names = [self._stages[status.stage].name] if status.stage != IDLE else mine
        where = f"{'stage' if len(names) == 1 else 'stages'} {', '.join(names) or 'none'}"
        cause, _, rest = failure.cause.partition(": ")
        message = f"rank {failure.rank} ({where}) {cause} {_moment(status)}{': ' if rest else ''}{rest}; {_ADVICE}"
        return f"{message}\n{failure.traceback}" if failure.traceback else message

    @abstractmethod
    def _check(self) -> None:
        """Raise EngineError if another rank has failed."""

    @abstractmethod
    def _cause(self, error: PeerLost) -> str:
        """Return the error message for a lost connection to another rank, with the cause."""

    @abstractmethod
    def _abort(self, message: str) -> None:
        """Stop all ranks at once, with `message` as the reason."""

    @abstractmethod
    def _end(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds until the other ranks have ended."""


class _SpawnedSession(ProcessGroupSession):
    """Session without a launcher: rank 0 is the user's process, which starts the other ranks on the same machine."""

    def __init__(self, stages: tuple[PlacedStage, ...], num_ranks: int, devices: list[str]) -> None:
        super().__init__(stages)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file = StatusBoard.create(num_ranks)
        try:
            self.board = StatusBoard(file, num_ranks)
            self._workers = Workers(num_ranks, store.port, file, devices)
        finally:
            os.close(file)
        try:
            # All workers have started, so that connecting to them cannot block.
            keys = [f"ready/{rank}" for rank in range(1, num_ranks)]
            while keys and not store.check(keys):
                self._check()
                time.sleep(0.02)
            self.groups = Groups.connect(store, 0, num_ranks, torch.device(devices[0]), local=True)
        except BaseException:
            self._workers.kill()
            raise

    def _check(self) -> None:
        if self._workers.failure is not None:
            raise EngineError(self._describe(self._workers.failure))

    def _cause(self, error: PeerLost) -> str:
        failure = self._workers.wait_for_failure(_CAUSE_S)
        return self._describe(failure) if failure is not None else f"rank 0 lost a peer: {error}; {_ADVICE}"

    def _abort(self, message: str) -> None:
        self._workers.kill()

    def _end(self, timeout_s: float) -> None:
        self._workers.close(timeout_s)


class _LaunchedSession(ProcessGroupSession):
    """Session of ranks started by torchrun, or by another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, stages: tuple[PlacedStage, ...], num_ranks: int, device: str) -> None:
        super().__init__(stages)
        store, rank, world_size = next(iter(dist.rendezvous("env://")))
        if world_size != num_ranks:
            raise ConfigError(
                f"the plan has stages on {num_ranks} ranks, the launcher started {world_size}: "
                f"start {num_ranks} processes, or make a plan for {world_size}"
            )
        self._store = dist.PrefixStore(f"mmcompile/{next(_launched)}", store)
        self.board = StatusBoard.private(world_size)
        self.groups = Groups.connect(self._store, rank, world_size, torch.device(device), local=False)
        self._next_poll_s = 0.0

    def _check(self) -> None:
        if time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + _ABORT_POLL_S
            if message := self._heard():
                raise EngineError(message)

    def _cause(self, error: PeerLost) -> str:
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            if message := self._heard():
                return message
            time.sleep(0.05)
        return f"rank {self.rank} lost a peer: {error}; {_ADVICE}"

    def _abort(self, message: str) -> None:
        # The first message is the cause; what others say after it is its consequence.
        # The store may be gone with the launcher; then there is nobody to tell.
        with contextlib.suppress(dist.DistError):
            self._store.compare_set(_ABORT_KEY, "", message)

    def _end(self, timeout_s: float) -> None:
        pass

    def _heard(self) -> str:
        return self._store.get(_ABORT_KEY).decode() if self._store.check([_ABORT_KEY]) else ""


def open_session(stages: tuple[PlacedStage, ...], device: str | None) -> ProcessGroupSession:
    """Return a session of the ranks that a launcher started, or start the ranks on this machine.

    Args:
        device: "cpu" or "cuda"; None chooses cuda if every rank gets a GPU.
    """
    num_ranks = 1 + max(rank for stage in stages for rank in stage.ranks)
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        kind = device or ("cuda" if torch.cuda.device_count() > local else "cpu")
        return _LaunchedSession(stages, num_ranks, "cpu" if kind == "cpu" else f"cuda:{local}")
    kind = device or ("cuda" if torch.cuda.device_count() >= num_ranks else "cpu")
    return _SpawnedSession(stages, num_ranks, ["cpu" if kind == "cpu" else f"cuda:{rank}" for rank in range(num_ranks)])


def _moment(status: Status) -> str:
    if status.stage == IDLE:
        return f"between actions, after those of step {status.step}" if status.step else "before its first action"
    return f"in step {status.step} while {tuple(ActionKind)[status.kind]}{status.microbatch}"


def _expire(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
