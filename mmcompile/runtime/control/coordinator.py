"""`Coordinator`: runs the decisions of `Generations` with sockets, files and a clock. One thread, one process."""

from __future__ import annotations

import selectors
import socket
import time
from dataclasses import dataclass, field

from mmcompile.runtime.control import messages as msg
from mmcompile.runtime.control import secret
from mmcompile.runtime.control.effects import Arm, CloseLink, Effect, Send, TimerKind, Write
from mmcompile.runtime.control.events import EventKind, EventLog, RunEvent
from mmcompile.runtime.control.generations import Generations
from mmcompile.runtime.control.log import Committed, Log
from mmcompile.runtime.control.membership_view import Planner
from mmcompile.runtime.control.messages import Phase
from mmcompile.runtime.control.stream import FRAME_BYTES, STRANGER_FRAME_BYTES, Stream
from mmcompile.runtime.monitoring.fail_points import fail_point

_MAX_STRANGERS = 64
"""Maximum number of connections whose peer has not proved yet that it has the job's secret."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Peer:
    stream: Stream
    address: str
    heard_s: float
    nonce: str = field(default_factory=secret.make_nonce)
    trusted: bool = False
    node: str = ""
    incarnation: str = ""
    leaving: bool = False
    """True if the connection is to end: only the peer's end of file is awaited."""


class Coordinator:
    """Serves agents until training ends.

    Args:
        listener: bound and listening socket. A supervisor keeps it open over restarts, so that agents can always connect.
        log: log with the history of the run.
        endpoint: the secret and the timeouts; the address is the listener's.
        store: host:port of the store, for workers.
    """

    def __init__(
        self,
        listener: socket.socket,
        log: Log,
        events: EventLog,
        planner: Planner,
        *,
        endpoint: secret.Endpoint,
        store: str,
    ) -> None:
        self._listener = listener
        self._log = log
        self._events = events
        self._key = endpoint.key
        self._times = endpoint.times
        self._generations = Generations(planner, log.history, store=store, max_attempts=self._times.max_attempts)
        self._selector = selectors.DefaultSelector()
        self._peers: set[_Peer] = set()
        self._nodes: dict[str, _Peer] = {}
        self._timers: list[tuple[float, TimerKind, int]] = []
        self._seen_s = time.monotonic()
        self._linger_s = 0.0
        self._excused_s = 0.0
        """Monotonic time until which nodes that lost this coordinator may reconnect without counting as lost."""
        self._away: dict[str, tuple[str, str]] = {}
        """Incarnation and cause of each node that lost its connection and may still reconnect, by node."""

    def run(self) -> bool:
        """Serve until all nodes were released; return whether training ended well."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._events.complete(self._generations.history)
        self._execute(self._generations.start())
        if self._generations.phase is Phase.ENDED:
            # It died with this left to tell.
            self._linger()
        while self._generations.phase is not Phase.ENDED or self._peers or time.monotonic() < self._linger_s:
            self._turn()
        self._selector.close()
        ended = self._generations.history.ended
        assert ended is not None
        return ended.success

    def _linger(self) -> None:
        """Continue to serve agents for `resume_s` seconds after training, so that nodes that reconnect receive its result."""
        self._linger_s = time.monotonic() + self._times.resume_s

    def _turn(self) -> None:
        ready = self._selector.select(self._times.tick_s)
        now_s = time.monotonic()
        if now_s - self._seen_s > self._times.lease_s / 2:
            # This process did not run for a while (a slow disk, a stopped process): the silence of peers is its own.
            self._excused_s = now_s + self._times.resume_s
            for peer in self._peers:
                peer.heard_s = now_s
        self._seen_s = now_s
        for key, mask in ready:
            if key.data is None:
                self._accept()
            else:
                self._serve(key.data, mask)
        for peer in [peer for peer in self._peers if peer.stream.closed]:
            self._drop(peer, f"{peer.node} does not read what it is sent")
        self._check_leases(now_s)
        self._check_timers(now_s)
        if self._away and now_s > self._excused_s:
            for node, (incarnation, cause) in self._away.items():
                self._execute(self._generations.leave(node, incarnation, cause))
            self._away.clear()

    def _accept(self) -> None:
        try:
            end, address = self._listener.accept()
        except OSError:
            return
        where = f"{address[0]}:{address[1]}"
        if sum(not peer.trusted for peer in self._peers) >= _MAX_STRANGERS:
            self._refused(where, f"{_MAX_STRANGERS} connections are waiting already")
            end.close()
            return
        peer = _Peer(stream=Stream(end, STRANGER_FRAME_BYTES), address=where, heard_s=time.monotonic())
        self._peers.add(peer)
        self._selector.register(peer.stream, selectors.EVENT_READ, peer)
        self._tell(peer, msg.Challenge(nonce=peer.nonce))

    def _serve(self, peer: _Peer, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(peer)
        if not mask & selectors.EVENT_READ or peer not in self._peers:
            return
        try:
            for message in peer.stream.read():
                if not peer.leaving:
                    self._receive(peer, message)
                if peer not in self._peers:
                    return
        except msg.ProtocolError as error:
            self._refused(peer.address, str(error))
            self._drop(peer, f"{peer.node} broke the protocol: {error}")
            return
        if peer.stream.closed:
            self._drop(peer, f"the connection of {peer.node} ended")

    def _receive(self, peer: _Peer, message: msg.Message) -> None:
        if not peer.trusted:
            self._examine(peer, message)
            return
        peer.heard_s = time.monotonic()
        match message:
            case msg.Hello() if not peer.node:
                self._welcome(peer, message)
            case msg.Heartbeat():
                self._tell(peer, msg.Heartbeat())
            case msg.Lost() if peer.node:
                if message.returns:
                    self._linger()
                self._drop(peer, message.cause)
            case msg.Drain() if peer.node:
                self._execute(self._generations.drain(peer.node))
            case msg.Reached() | msg.Reduced() | msg.Fault() | msg.Finished() | msg.Abort() if peer.node:
                self._execute(self._generations.heard(peer.node, message))
            case _:
                raise msg.ProtocolError(f"{type(message).__name__} from an agent at this point")

    def _examine(self, peer: _Peer, message: msg.Message) -> None:
        """Accept an agent whose message proves that it has the job's secret, and refuse any other peer."""
        if not isinstance(message, msg.Proof):
            raise msg.ProtocolError(f"{type(message).__name__} before the proof of the secret")
        reason = "it does not know the secret of this job"
        if message.version != msg.PROTOCOL_VERSION:
            reason = f"protocol {message.version}, the coordinator speaks {msg.PROTOCOL_VERSION}: install one version everywhere"
        elif secret.proves(message.mac, self._key, "agent", peer.nonce, message.nonce):
            peer.trusted = True
            peer.stream.limit_bytes = FRAME_BYTES
            self._tell(peer, msg.Accepted(mac=secret.prove(self._key, "coordinator", peer.nonce, message.nonce)))
            return
        self._turn_away(peer, msg.Refused(reason=reason, advice=msg.Advice.GIVE_UP))

    def _welcome(self, peer: _Peer, hello: msg.Hello) -> None:
        if (refused := self._generations.refusal(hello)) is not None:
            self._turn_away(peer, refused)
            return
        if (old := self._nodes.get(hello.node)) is not None:
            # The same workers on a new connection: the old one is a half-open link.
            self._forget(old)
        self._away.pop(hello.node, None)
        peer.node, peer.incarnation = hello.node, hello.incarnation
        self._nodes[hello.node] = peer
        self._execute(self._generations.join(hello))

    def _turn_away(self, peer: _Peer, refused: msg.Refused) -> None:
        self._refused(peer.address, refused.reason)
        self._tell(peer, refused)
        self._part(peer)

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self._write(effect)
                case Send() if effect.node in self._nodes:
                    self._tell(self._nodes[effect.node], effect.message)
                case CloseLink() if effect.node in self._nodes:
                    self._part(self._nodes[effect.node])
                case Arm():
                    seconds = {
                        TimerKind.ATTEMPT: self._times.attempt_s,
                        TimerKind.FAULT: self._times.fault_grace_s,
                        TimerKind.RESUME: self._times.resume_s,
                    }[effect.timer]
                    self._timers.append((time.monotonic() + seconds, effect.timer, effect.generation))
                case RunEvent():
                    self._events.add(effect)
                case _:
                    pass

    def _write(self, write: Write) -> None:
        step = write.record.step if isinstance(write.record, Committed) else None
        name = type(write.record).__name__.lower()
        generation = self._generations.generation
        fail_point(f"before-log-{name}", step=step, generation=generation)
        self._log.append(write.record)
        fail_point(f"after-log-{name}", step=step, generation=generation)

    def _check_leases(self, now_s: float) -> None:
        for peer in [peer for peer in self._peers if now_s - peer.heard_s > self._times.lease_s]:
            if peer not in self._peers:
                continue
            if not peer.trusted:
                self._refused(peer.address, f"silent for {self._times.lease_s:.2f} s before it said who it is")
            self._linger()
            self._drop(peer, f"{peer.node} was silent for {self._times.lease_s:.2f} s")

    def _check_timers(self, now_s: float) -> None:
        due = [timer for timer in self._timers if timer[0] <= now_s]
        self._timers = [timer for timer in self._timers if timer[0] > now_s]
        for _, timer, generation in due:
            self._execute(self._generations.expired(timer, generation))

    def _tell(self, peer: _Peer, message: msg.Message) -> None:
        peer.stream.send(message)
        self._watch(peer)

    def _flush(self, peer: _Peer) -> None:
        peer.stream.flush()
        if peer.leaving and not peer.stream.has_unsent:
            peer.stream.finish()
        self._watch(peer)

    def _part(self, peer: _Peer) -> None:
        """End a connection once the peer has read all messages sent to it: closing at once could discard them."""
        if self._nodes.get(peer.node) is peer:
            del self._nodes[peer.node]
        peer.node, peer.leaving, peer.heard_s = "", True, time.monotonic()
        self._flush(peer)

    def _watch(self, peer: _Peer) -> None:
        # A broken socket is found by the next read.
        write = selectors.EVENT_WRITE if peer.stream.has_unsent else 0
        self._selector.modify(peer.stream, selectors.EVENT_READ | write, peer)

    def _drop(self, peer: _Peer, cause: str) -> None:
        """Close a connection, and count its node as lost unless it may still reconnect after a restart of the coordinator."""
        node, ended = peer.node, peer.stream.closed
        self._forget(peer)
        if node and ended and time.monotonic() < self._excused_s:
            self._away[node] = (peer.incarnation, cause)
        elif node:
            self._execute(self._generations.leave(node, peer.incarnation, cause))

    def _forget(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._selector.unregister(peer.stream)
        peer.stream.close()
        if self._nodes.get(peer.node) is peer:
            del self._nodes[peer.node]

    def _refused(self, address: str, reason: str) -> None:
        generation = self._generations.history.generation
        self._events.add(RunEvent(kind=EventKind.REFUSED, generation=generation, node=address, cause=reason))
