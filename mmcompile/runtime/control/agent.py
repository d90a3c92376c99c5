"""`Agent`: starts, watches and ends the workers of one node, and connects them to the coordinator.

One thread, one process. A worker that dies, hangs or fails takes the others of its node with it: they are killed before the
coordinator is informed, so no process of a lost node can act any more. The agent can then join again with new workers.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mmcompile.runtime.control import messages as msg
from mmcompile.runtime.control.coordinator_link import CoordinatorLink
from mmcompile.runtime.control.membership_client import MembershipClient, serve
from mmcompile.runtime.control.processes import ChildProcess, describe_code, fork_process, kill_group
from mmcompile.runtime.control.secret import Endpoint
from mmcompile.runtime.control.stream import FRAME_BYTES, Stream


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    index: int
    process: ChildProcess
    end: int
    """File descriptor that becomes readable once the worker's process has ended."""
    stream: Stream
    heard_s: float
    idle: bool = False
    asked: msg.Message | None = None
    """Last message of the worker that is not answered yet; sent again if the coordinator restarts. None: no message."""
    error: str = ""
    ended: bool = False


class Agent:
    """Runs the workers of a node until the coordinator releases them or too many were lost.

    Args:
        node: name of the node, unique in the job.
        work: main function of a worker; it runs in a process of its own, forked from this one.
        max_restarts: number of times that new workers are started after the node's workers were lost.
    """

    def __init__(
        self,
        node: str,
        endpoint: Endpoint,
        work: Callable[[MembershipClient], None],
        *,
        num_workers: int,
        max_restarts: int,
    ) -> None:
        self._node = node
        self._times = endpoint.times
        self._work = work
        self._num_workers = num_workers
        self._max_restarts = max_restarts
        self._selector = selectors.DefaultSelector()
        self._link = CoordinatorLink(endpoint, self._selector)
        self._workers: list[_Worker] = []
        self._incarnation = ""
        self._generation = 0
        self._committed = 0
        self._restarts = 0
        self._drain_asked = False
        self._draining = False
        self._released: msg.Release | None = None
        self._end_s = 0.0
        """Monotonic time until which workers may take to exit after a release."""
        self._code: int | None = None
        self._seen_s = time.monotonic()

    def run(self) -> int:
        """Serve until the end; return 0 if training ended well or the node was drained, else 1."""
        wake, wakened = socket.socketpair()
        for end in (wake, wakened):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGTERM, lambda number, frame: self._ask_to_drain())
        self._selector.register(wakened, selectors.EVENT_READ, wakened)
        try:
            self._start()
            while self._code is None:
                self._turn()
        finally:
            self._kill()
            self._link.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._selector.close()
            wake.close()
            wakened.close()
        return self._code

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._times.tick_s):
            if isinstance(key.data, _Worker) and key.data in self._workers:
                self._hear(key.data)
            elif isinstance(key.data, socket.socket):
                key.data.recv(4096)
        if self._drain_asked:
            self._drain()
        now_s = time.monotonic()
        if now_s - self._seen_s > self._times.lease_s / 2:
            # We did not look for a while: the silence is ours.
            for worker in self._workers:
                worker.heard_s = now_s
        self._seen_s = now_s
        self._find_dead()
        self._find_silent(now_s)
        if self._released is not None:
            if now_s > self._end_s or all(worker.ended for worker in self._workers):
                self._code = 0 if self._released.success else 1
        elif self._code is None:
            self._talk()

    def _start(self) -> None:
        self._incarnation, self._generation, self._committed = secrets.token_hex(8), 0, 0
        for index in range(self._num_workers):
            ours, theirs = socket.socketpair()
            with theirs:
                run = partial(serve, theirs.fileno(), index, self._times, self._work)
                process = ChildProcess(fork_process(run, keep=(theirs.fileno(),)))
            worker = _Worker(
                index=index,
                process=process,
                end=os.pidfd_open(process.pid),
                stream=Stream(ours, FRAME_BYTES),
                heard_s=time.monotonic(),
            )
            self._workers.append(worker)
            self._selector.register(worker.stream, selectors.EVENT_READ, worker)
            self._selector.register(worker.end, selectors.EVENT_READ, worker)

    def _hear(self, worker: _Worker) -> None:
        worker.stream.flush()
        for message in worker.stream.read():
            worker.heard_s = time.monotonic()
            match message:
                case msg.Heartbeat():
                    pass
                case msg.Idle():
                    worker.idle = True
                case msg.Drain():
                    self._drain()
                case msg.Failed():
                    worker.error = message.error
                case msg.Reached() | msg.Reduced() | msg.Fault() | msg.Finished() | msg.Abort():
                    worker.asked = message
                    self._link.send(message)
                case _:
                    raise AssertionError(f"{type(message).__name__} from a worker")
        if worker.stream.closed and worker.stream.fileno() in self._selector.get_map():
            self._selector.unregister(worker.stream)

    def _find_dead(self) -> None:
        dead = [worker for worker in self._workers if not worker.ended and worker.process.code is not None]
        for worker in dead:
            worker.ended = True
            self._hear(worker)
            self._selector.unregister(worker.end)
        if dead and self._released is None:
            first = min(dead, key=lambda worker: not worker.error)
            how = f"failed: {first.error}" if first.error else describe_code(first.process.wait())
            self._lose(f"worker {first.index} of {self._node} {how}")

    def _find_silent(self, now_s: float) -> None:
        """End all workers of the node if one sent no heartbeat for `lease_s` seconds, e.g. because its process is stopped."""
        for worker in self._workers:
            if not worker.ended and now_s - worker.heard_s > self._times.lease_s:
                self._lose(f"worker {worker.index} of {self._node} was silent for {self._times.lease_s:.2f} s")
                return

    def _lose(self, cause: str) -> None:
        """Kill the node's workers, report their loss to the coordinator, and start new workers if restarts are left."""
        print(f"mmcompile: {cause}", file=sys.stderr, flush=True)
        self._kill()
        self._link.send(msg.Lost(cause=cause, returns=self._may_restart))
        self._link.close()
        self._restart()

    @property
    def _may_restart(self) -> bool:
        return self._restarts < self._max_restarts and not self._draining

    def _restart(self) -> None:
        if not self._may_restart:
            self._code = 1
            return
        self._restarts += 1
        self._start()

    def _kill(self) -> None:
        for worker in self._workers:
            for file in (worker.stream, worker.end):
                if file in self._selector.get_map():
                    self._selector.unregister(file)
            # Also the children of one that has ended.
            kill_group(worker.process.pid)
            worker.process.wait()
            os.close(worker.end)
            worker.stream.close()
        self._workers = []

    def _talk(self) -> None:
        if not all(worker.idle for worker in self._workers):
            return
        if self._link.connect():
            self._link.send(
                msg.Hello(
                    node=self._node,
                    incarnation=self._incarnation,
                    num_workers=self._num_workers,
                    generation=self._generation,
                    committed=self._committed,
                )
            )
            if self._draining:
                self._link.send(msg.Drain())
            for worker in self._workers:
                if worker.asked is not None:
                    self._link.send(worker.asked)
        for message in self._link.read():
            self._obey(message)
            if self._code is not None or self._released is not None:
                return
        if (reason := self._link.lost) is not None:
            self._give_up(reason)

    def _obey(self, message: msg.Message) -> None:
        match message:
            case msg.Refused(advice=msg.Advice.GIVE_UP):
                self._give_up(f"the coordinator refused {self._node}: {message.reason}")
            case msg.Refused(advice=msg.Advice.RESTART):
                print(f"mmcompile: {message.reason}", file=sys.stderr, flush=True)
                self._kill()
                self._link.close()
                self._restart()
            case msg.Refused():
                self._link.close(retry_s=self._times.heartbeat_s)
            case msg.Release():
                self._released, self._end_s = message, time.monotonic() + self._times.lease_s
                self._link.close()
                self._pass_on(message)
            case _:
                # For a coordinator that is restarted.
                if isinstance(message, msg.Advance) and message.phase is msg.Phase.ACTIVE:
                    self._generation = message.generation
                elif isinstance(message, msg.Commit | msg.Generation):
                    self._committed = message.step if isinstance(message, msg.Commit) else message.committed
                self._pass_on(message)

    def _pass_on(self, message: msg.Message) -> None:
        for worker in self._workers:
            sent = message
            if isinstance(message, msg.Generation):
                sent = replace(message, rank=message.rank + worker.index)
            worker.stream.send(sent)

    def _ask_to_drain(self) -> None:
        # A signal handler may do no more: it may interrupt a message half sent.
        self._drain_asked = True

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._link.send(msg.Drain())
            self._pass_on(msg.Drain())

    def _give_up(self, reason: str) -> None:
        print(f"mmcompile: {self._node} ends its workers: {reason}", file=sys.stderr, flush=True)
        self._code = 1
