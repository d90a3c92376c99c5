"""A worker's side, against an agent played by the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import pytest
from support.processes.control_world import PREPARE

from mmcompile.runtime.control.membership_client import MembershipClient, Released, Superseded
from mmcompile.runtime.control.messages import (
    Advance,
    Commit,
    Drain,
    Fault,
    Finished,
    Generation,
    Heartbeat,
    Idle,
    Message,
    Phase,
    Reached,
    Reduced,
    Release,
    Suspend,
)
from mmcompile.runtime.control.stream import FRAME_BYTES, Stream
from mmcompile.runtime.control.times import Times

T = TypeVar("T")
WAIT_S = 10.0
"""For what takes milliseconds."""


@dataclass(kw_only=True)
class Agent:
    """The other end."""

    stream: Stream
    membership: MembershipClient
    lost: threading.Event
    heard: list[Message] = field(default_factory=list)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.stream.send(message)

    def hear(self, kind: type[T]) -> T:
        """Wait for a message of a kind; others before it are dropped."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            self.heard += self.stream.read()
            while self.heard:
                message = self.heard.pop(0)
                if isinstance(message, kind):
                    return message
            time.sleep(0.001)
        raise TimeoutError(f"no {kind.__name__}")

    def activate(self, prepare: Generation) -> None:
        """Take the worker through all phases."""
        self.say(prepare)
        number = prepare.number
        for phase in (Phase.RENDEZVOUS, Phase.READY, Phase.ACTIVE):
            self.hear(Reached)
            self.say(Advance(generation=number, phase=phase))


@pytest.fixture
def agent() -> Iterator[Agent]:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    membership = MembershipClient(theirs, 1, Times(recovery_deadline_s=2.0), lost.set)
    stream = Stream(ours, FRAME_BYTES)
    yield Agent(stream=stream, membership=membership, lost=lost)
    stream.close()
    assert lost.wait(WAIT_S)
    theirs.close()


class Call(Generic[T]):
    """A function of the membership, running while the test talks."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._result: list[T | Exception] = []
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def result(self) -> T:
        """What it returned; raises what it raised."""
        self._thread.join(WAIT_S)
        assert self._result, "it still waits"
        result = self._result[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except Exception as error:
            self._result.append(error)


def activated(agent: Agent) -> None:
    """An active generation, number 3, seven steps committed."""

    def work() -> None:
        agent.membership.wait_generation()
        agent.membership.connected()
        agent.membership.ready()

    call = Call(work)
    agent.activate(PREPARE)
    call.result()


def test_a_generation_from_start_to_end(agent: Agent) -> None:
    call = Call(agent.membership.wait_generation)
    agent.hear(Idle)
    agent.say(PREPARE)
    assert agent.hear(Reached) == Reached(generation=3, phase=Phase.PREPARE, worker=1)
    agent.say(Advance(generation=3, phase=Phase.RENDEZVOUS))
    generation = call.result()
    assert (generation.number, generation.rank, generation.prefix) == (3, 1, "generation/3")
    for wait, done, following in (
        (agent.membership.connected, Phase.RENDEZVOUS, Phase.READY),
        (agent.membership.ready, Phase.READY, Phase.ACTIVE),
    ):
        call = Call(wait)
        assert agent.hear(Reached).phase is done
        agent.say(Advance(generation=3, phase=following))
        call.result()
    call = Call(lambda: agent.membership.reduced(8, (4, 5), cursor="c"))
    report = Reduced(generation=3, step=8, worker=1, microbatches=(4, 5), cursor="c")
    assert agent.hear(Reduced) == report
    agent.say(Commit(step=8))
    call.result()
    assert agent.membership.committed == 8 and not agent.membership.superseded
    call = Call(agent.membership.finish)
    assert agent.hear(Finished) == Finished(generation=3, step=8, worker=1)
    agent.say(Release(reason="done", success=True))
    call.result()


def test_a_commit_counts_even_if_the_generation_ends_at_once(agent: Agent) -> None:
    activated(agent)
    call = Call(lambda: agent.membership.reduced(8, ()))
    agent.hear(Reduced)
    agent.say(Commit(step=8), replace(PREPARE, number=4, committed=8))
    call.result()
    end_s = time.monotonic() + WAIT_S
    with pytest.raises(Superseded):  # the second message may be read a moment after the first
        while time.monotonic() < end_s:
            agent.membership.check()


@pytest.mark.parametrize(("committed", "done"), [(8, True), (7, False), (5, False)])
def test_a_new_generation_says_what_was_committed(agent: Agent, committed: int, done: bool) -> None:
    activated(agent)
    call = Call(lambda: agent.membership.reduced(8, ()))
    agent.hear(Reduced)
    agent.say(replace(PREPARE, number=4, committed=committed))
    if done:
        call.result()
    else:
        with pytest.raises(Superseded, match="generation 3 is over"):
            call.result()
    assert agent.membership.committed == committed


def test_a_fault_is_reported_and_ends_in_a_new_generation(agent: Agent) -> None:
    activated(agent)
    call = Call(lambda: agent.membership.fault("reset by peer"))
    assert agent.hear(Fault) == Fault(generation=3, worker=1, error="reset by peer")
    agent.say(Suspend(generation=3, reason="too few"))
    with pytest.raises(Superseded):
        call.result()


def test_a_generation_superseded_while_it_is_prepared(agent: Agent) -> None:
    call = Call(agent.membership.wait_generation)
    agent.say(PREPARE)
    assert agent.hear(Reached).generation == 3
    agent.say(replace(PREPARE, number=4), Advance(generation=3, phase=Phase.RENDEZVOUS))
    assert agent.hear(Reached).generation == 4
    # Repeated by a coordinator that was restarted; an old one, and one that went before.
    agent.say(replace(PREPARE, number=4), PREPARE, Advance(generation=4, phase=Phase.RENDEZVOUS))
    assert call.result().number == 4


def test_release_ends_every_wait(agent: Agent) -> None:
    activated(agent)
    call = Call(lambda: agent.membership.reduced(8, ()))
    agent.say(Release(reason="no node holds x", success=False))
    for wait in (call.result, agent.membership.wait_generation, agent.membership.finish, agent.membership.check):
        with pytest.raises(Released, match="no node holds x"):
            wait()


def test_notice_goes_both_ways(agent: Agent) -> None:
    agent.membership.drain()
    agent.hear(Drain)
    assert agent.membership.draining
    agent.hear(Heartbeat)


def test_notice_from_the_agent(agent: Agent) -> None:
    agent.say(Drain())
    deadline_s = time.monotonic() + WAIT_S
    while not agent.membership.draining:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
