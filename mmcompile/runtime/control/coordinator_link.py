"""`CoordinatorLink`: an agent's connection to the coordinator, reopened when it breaks."""

from __future__ import annotations

import selectors
import socket
import time

from mmcompile.runtime.control import secret
from mmcompile.runtime.control.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Advice,
    Challenge,
    Heartbeat,
    Message,
    Proof,
    ProtocolError,
    Refused,
)
from mmcompile.runtime.control.stream import FRAME_BYTES, STRANGER_FRAME_BYTES, Stream

_RETRY_S = 0.05


class CoordinatorLink:
    """Connects to the coordinator, proves the secret, and sends heartbeats. No method blocks longer than a heartbeat.

    Args:
        selector: selector that the socket is registered with; `data` of its key is None.
    """

    def __init__(self, endpoint: secret.Endpoint, selector: selectors.BaseSelector) -> None:
        self._address = (endpoint.host, endpoint.port)
        self._key = endpoint.key
        self._times = endpoint.times
        self._selector = selector
        self._stream: Stream | None = None
        self._trusted = False
        self._announced = False
        self._challenge = ""
        self._nonce = ""
        self._inbox: list[Message] = []
        self._retry_s = 0.0
        self._heard_s = 0.0
        self._said_s = 0.0
        self._tried_s = 0.0
        self._alive_s = time.monotonic()
        self._why = "nobody listens"

    @property
    def lost(self) -> str | None:
        """Reason why the coordinator counts as lost, after too long a silence; None while it does not."""
        silent_s = time.monotonic() - self._alive_s
        if silent_s < self._times.recovery_deadline_s:
            return None
        host, port = self._address
        return f"no coordinator at {host}:{port} for {silent_s:.1f} s ({self._why}); start it there, or correct the address"

    def connect(self) -> bool:
        """Continue to open the connection. Return True once for each new usable connection, which must begin with a Hello."""
        now_s = time.monotonic()
        if now_s - self._tried_s > self._times.lease_s:
            # We did not try for a while: the silence is ours.
            self._alive_s = self._heard_s = now_s
        self._tried_s = now_s
        if self._stream is None and now_s >= self._retry_s:
            self._open(now_s)
        if self._stream is not None:
            self._collect(now_s)
        if self._stream is not None and self._trusted and not self._announced:
            self._announced = True
            return True
        return False

    def read(self) -> list[Message]:
        """Return the messages that have arrived since the last call."""
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, message: Message) -> None:
        """Send a message if connected, else drop it; the caller repeats important messages after the next connect."""
        if self._stream is not None and self._announced:
            self._stream.send(message)

    def close(self, *, retry_s: float = _RETRY_S) -> None:
        """End the connection; `connect` opens a new one after `retry_s` seconds."""
        if self._stream is not None:
            self._selector.unregister(self._stream)
            self._stream.flush()
            self._stream.close()
        self._stream = None
        self._trusted = self._announced = False
        self._inbox = []
        self._retry_s = time.monotonic() + retry_s

    def _open(self, now_s: float) -> None:
        self._retry_s = now_s + _RETRY_S
        try:
            end = socket.create_connection(self._address, timeout=self._times.heartbeat_s)
        except OSError as error:
            self._why = str(error)
            return
        self._stream = Stream(end, STRANGER_FRAME_BYTES)
        self._selector.register(self._stream, selectors.EVENT_READ)
        self._heard_s = self._said_s = time.monotonic()

    def _collect(self, now_s: float) -> None:
        assert self._stream is not None
        stream = self._stream
        stream.flush()
        try:
            messages = stream.read()
        except ProtocolError as error:
            self._why = str(error)
            self.close()
            return
        for message in messages:
            self._heard_s = now_s
            self._take(message)
        if self._trusted and now_s - self._said_s >= self._times.heartbeat_s:
            self._said_s = now_s
            stream.send(Heartbeat())
        if self._trusted:
            self._alive_s = self._heard_s
        if stream.closed or now_s - self._heard_s > self._times.lease_s:
            self._why = "it closed the connection" if stream.closed else "it accepts connections and says nothing"
            inbox = self._inbox
            self.close()
            self._inbox = inbox

    def _take(self, message: Message) -> None:
        match message:
            case Challenge():
                self._answer(message)
            case Accepted() if not self._trusted:
                if secret.proves(message.mac, self._key, "coordinator", self._challenge, self._nonce):
                    self._trusted = True
                    assert self._stream is not None
                    self._stream.limit_bytes = FRAME_BYTES
                else:
                    self._refuse("it does not know the secret of this job")
            case Refused() if message.advice is Advice.GIVE_UP or self._trusted:
                self._inbox.append(message)
            case Heartbeat():
                pass
            case _ if self._trusted:
                self._inbox.append(message)
            case _:
                self._refuse(f"it sent {type(message).__name__} before its proof of the secret")

    def _answer(self, challenge: Challenge) -> None:
        if challenge.version != PROTOCOL_VERSION:
            self._refuse(f"it speaks protocol {challenge.version}, we speak {PROTOCOL_VERSION}: install one version")
            return
        assert self._stream is not None
        self._challenge, self._nonce = challenge.nonce, secret.make_nonce()
        mac = secret.prove(self._key, "agent", self._challenge, self._nonce)
        self._stream.send(Proof(nonce=self._nonce, mac=mac))

    def _refuse(self, reason: str) -> None:
        self._inbox.append(Refused(reason=reason, advice=Advice.GIVE_UP))
