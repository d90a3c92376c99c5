"""`MembershipClient`: a worker's connection to the control plane, for its main thread.

    while True:
        generation = membership.wait_generation()      # leave the last one before calling this
        try:
            connect groups on a store under generation.prefix;  membership.connected()
            copy the state that is missing;                     membership.ready()
            for each step after generation.committed:
                forward, backward, reduce;                      membership.reduced(step, ids)
                apply the gradients
            membership.finish()
            break
        except Superseded:
            pass

A failed message between workers is reported by `fault`, which raises Superseded once the coordinator has explained it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection

from mmcompile.runtime.control import messages as msg
from mmcompile.runtime.control.messages import Phase
from mmcompile.runtime.control.processes import last_lines
from mmcompile.runtime.control.stream import FRAME_BYTES, Stream
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.monitoring.fail_points import fail_point

_ORDER = list(Phase)


class Superseded(Exception):
    """The generation has ended: close its groups, keep the state, and call `wait_generation` again."""


class Released(Exception):
    """Training has ended, or the node was released: the worker may exit."""


class MembershipClient:
    """Informs a worker of its generation, and reports its progress to the coordinator. Made by the agent in each worker.

    Its methods are for the main thread; one daemon thread listens.

    Attributes:
        superseded: True once the generation has ended. A plain attribute, to be polled in every loop that blocks.
        draining: True if the node will be taken away soon.
        on_superseded: called by the listening thread when `superseded` becomes true, and again for each newer generation and at
            the end; must be quick. An exception it raises goes to stderr and has no other effect.
        times: timeouts of the control plane.
    """

    def __init__(self, end: socket.socket, index: int, times: Times, lost: Callable[[], None]) -> None:
        """Start a thread that reads messages of the node's agent from socket `end`; it calls `lost` once the agent has ended."""
        self.superseded = False
        self.draining = False
        self.on_superseded: Callable[[], None] | None = None
        self.times = times
        self.index = index
        """Index of the worker within its node."""
        self._lost = lost
        self._stream = Stream(end, FRAME_BYTES)
        self._changed = threading.Condition()
        self._newest: msg.Generation | None = None
        self._number = 0
        self._phase = Phase.WAITING
        self.committed = 0
        """Number of the last committed step."""
        self._released: msg.Release | None = None
        self._idle = False
        self._drain_asked = False
        threading.Thread(target=self._listen, name="mmcompile-membership", daemon=True).start()

    def check(self) -> None:
        """Raise Superseded if the generation has ended, Released if training has ended or the node was released."""
        if self.superseded:
            with self._changed:
                self._raise()

    def wait_generation(self) -> msg.Generation:
        """Return the next generation once all its members have left their previous one.

        The worker must have left its own: no thread may still use its groups, now or later.

        Raises:
            Released: training ended, or the node is released.
        """
        if not self._idle:
            self._idle = True
            self._send(msg.Idle())
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._released or (self._newest is not None and self._newest.number > self._number)
                )
                if self._released is not None:
                    raise Released(self._released.reason)
                assert self._newest is not None
                newest, self.superseded = self._newest, False
                self._number = newest.number
            try:
                self._reach(Phase.PREPARE)
            except Superseded:
                continue
            return newest

    def connected(self) -> None:
        """Report that all groups of this worker are connected, and wait until all workers have reported so. Raises Superseded."""
        self._reach(Phase.RENDEZVOUS)

    def ready(self) -> None:
        """Report that this worker has all its state, and wait until the generation is active. Raises Superseded.

        Only then may the worker drop state that this generation does not need.
        """
        self._reach(Phase.READY)

    def reduced(self, step: int, microbatches: Collection[int], *, cursor: str | None = None) -> None:
        """Report that this worker's gradients of a step are final, and wait until the step is committed.

        After this returns, apply them, without messages to other workers: every worker applies the same gradients.

        Args:
            step: `committed + 1`.
            microbatches: ids that this worker reports; each id of the step is reported by exactly one worker.
            cursor: JSON text from which a later run continues after this step; given by one worker, None by the others.

        Raises:
            Superseded: the step was not committed; its gradients must be dropped.
        """
        ids = tuple(microbatches)
        self._ask(
            msg.Reduced(generation=self._number, step=step, worker=self.index, microbatches=ids, cursor=cursor),
            lambda: self.committed >= step,
        )

    def finish(self) -> None:
        """Report that this worker has done all steps, and wait until all workers have reported so. Raises Superseded."""
        message = msg.Finished(generation=self._number, step=self.committed, worker=self.index)
        self._ask(message, lambda: self._released is not None and self._released.success)

    def fault(self, error: str) -> None:
        """Report that a message to or from another worker failed, and block until the coordinator answers.

        Raises:
            Superseded: the coordinator replaces this generation of workers by another one.
        """
        self._ask(msg.Fault(generation=self._number, worker=self.index, error=error), lambda: False)

    def abort(self, reason: str) -> None:
        """End training, since no membership could continue. Raises Released, or Superseded if the generation ends first."""
        self._ask(msg.Abort(generation=self._number, worker=self.index, reason=reason), lambda: False)

    def fail(self, error: str) -> None:
        """Report the error because of which this worker is about to exit."""
        self._send(msg.Failed(error=error))

    def drain(self) -> None:
        """Ask to drain the node after this step. May be called by a signal handler."""
        # Sent by the other thread: the signal may have interrupted a message half sent.
        self._drain_asked = True

    def _reach(self, phase: Phase) -> None:
        wanted = _ORDER.index(phase) + 1
        message = msg.Reached(generation=self._number, phase=phase, worker=self.index)
        rank = None if self._newest is None else self._newest.rank
        self._ask(
            message,
            lambda: not self.superseded and _ORDER.index(self._phase) >= wanted,
            lambda: fail_point(f"said-{phase}", rank=rank, generation=message.generation),
        )

    def _ask(self, message: msg.Message, answered: Callable[[], bool], said: Callable[[], None] = lambda: None) -> None:
        """Send a message and wait for its answer. An answer counts even if the generation ended right after it.

        Args:
            answered: returns true once the answer has arrived.
            said: called once the message is sent.
        """
        self.check()
        self._send(message)
        said()
        with self._changed:
            self._changed.wait_for(lambda: answered() or self.superseded)
            if not answered():
                self._raise()

    def _raise(self) -> None:
        if self._released is not None:
            raise Released(self._released.reason)
        raise Superseded(f"generation {self._number} is over")

    def _send(self, message: msg.Message) -> None:
        with self._changed:
            self._stream.send(message)

    def _listen(self) -> None:
        said_s = 0.0
        while not self._stream.closed:
            write = [self._stream] if self._stream.has_unsent else []
            select.select([self._stream], write, [], self.times.heartbeat_s / 2)
            with self._changed:
                self._stream.flush()
                for message in self._stream.read():
                    self._take(message)
                if self._drain_asked and not self.draining:
                    self.draining = True
                    self._stream.send(msg.Drain())
                if time.monotonic() - said_s >= self.times.heartbeat_s:
                    said_s = time.monotonic()
                    self._stream.send(msg.Heartbeat())
                self._changed.notify_all()
        self._lost()

    def _take(self, message: msg.Message) -> None:
        match message:
            case msg.Generation():
                if message.number > (self._newest.number if self._newest is not None else 0):
                    self._newest, self._phase = message, Phase.PREPARE
                    # Also an answer to `reduced`: what was committed before. After lost state it can be less.
                    self.committed = message.committed
                    self._supersede()
            case msg.Advance():
                current = self._newest is not None and message.generation == self._newest.number
                if current and _ORDER.index(message.phase) > _ORDER.index(self._phase):
                    self._phase = message.phase
            case msg.Commit():
                self.committed = max(self.committed, message.step)
            case msg.Suspend():
                self._phase = Phase.WAITING
                self._supersede()
            case msg.Release():
                self._released = message
                self._supersede()
            case msg.Drain():
                self.draining = True
            case _:
                raise AssertionError(f"{type(message).__name__} from an agent")

    def _supersede(self) -> None:
        # First: what the call lets go of looks here for the reason.
        self.superseded = True
        if self.on_superseded is not None:
            try:
                self.on_superseded()
            except Exception:
                # Without this thread the worker would hear nothing more; its main thread polls `superseded`.
                traceback.print_exc()


def serve(file: int, index: int, times: Times, work: Callable[[MembershipClient], None]) -> int:
    """Run a worker process: connect to its agent by the socket with descriptor `file`, call `work`, and return the exit code."""
    # Without its agent a worker cannot learn of the membership, so it kills itself and its children.
    membership = MembershipClient(
        socket.socket(fileno=file), index, times, lambda: os.killpg(os.getpgrp(), signal.SIGKILL)
    )
    signal.signal(signal.SIGTERM, lambda number, frame: membership.drain())
    try:
        work(membership)
    except Released:
        return 0
    except BaseException as error:
        membership.fail(f"{type(error).__name__}: {error}\n{last_lines(error)}")
        return 1
    return 0
