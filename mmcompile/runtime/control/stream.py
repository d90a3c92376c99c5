"""`Stream`: control messages over a non-blocking socket, each of them JSON text preceded by its length."""

from __future__ import annotations

import contextlib
import socket

from mmcompile.runtime.comm.framing import LENGTH_BYTES, frame, frame_length, take_frame
from mmcompile.runtime.control.messages import Message, ProtocolError, decode, encode

FRAME_BYTES = 16 * 2**20
"""Maximum bytes of a message; a plan for a thousand stages is far smaller."""
STRANGER_FRAME_BYTES = 4096
"""Maximum bytes of a message from a peer that has not proved the secret."""
_READ_BYTES = 2**16
_BACKLOG_BYTES = 4 * FRAME_BYTES
"""Maximum unsent bytes for a peer that does not read; with more the connection counts as broken."""


class Stream:
    """Sends and receives messages at one end of a link, without blocking. Call `flush` when the socket is writable.

    Args:
        end: connected stream socket, made non-blocking here, and closed by `close`.
        limit_bytes: maximum bytes of a message that is accepted.
    """

    def __init__(self, end: socket.socket, limit_bytes: int) -> None:
        end.setblocking(False)
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.limit_bytes = limit_bytes
        self.closed = False
        """True once the peer closed the link, or it broke."""

    def fileno(self) -> int:
        """Return the file descriptor of the socket, as selectors require."""
        return self._end.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while messages are unsent and the link is open."""
        return bool(self._outgoing) and not self.closed

    def read(self) -> list[Message]:
        """Return the messages that have arrived completely.

        Raises:
            ProtocolError: a message is too long or malformed. Messages before it are lost too, since the link must be closed.
        """
        self._fill()
        messages: list[Message] = []
        while len(self._incoming) >= LENGTH_BYTES:
            length = frame_length(self._incoming)
            if length > self.limit_bytes:
                raise ProtocolError(f"a message of {length} bytes, the limit is {self.limit_bytes}")
            data = take_frame(self._incoming)
            if data is None:
                break
            messages.append(decode(data))
        return messages

    def send(self, message: Message) -> None:
        """Send a message as far as the socket accepts it now; `flush` sends the rest."""
        data = encode(message)
        assert len(data) <= FRAME_BYTES, f"{type(message).__name__} of {len(data)} bytes"
        self._outgoing += frame(data)
        if len(self._outgoing) > _BACKLOG_BYTES:
            self.closed = True
        self.flush()

    def flush(self) -> None:
        """Send unsent messages as far as the socket accepts them now."""
        while self.has_unsent:
            try:
                sent = self._end.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._outgoing[:sent]

    def finish(self) -> None:
        """Close the sending direction of the link; messages can still be received."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, without sending unsent messages. Safe to call twice."""
        self.closed = True
        self._end.close()

    def _fill(self) -> None:
        """Read the available bytes from the socket, at most about one message's, so that a peer cannot fill the memory."""
        while not self.closed and len(self._incoming) <= LENGTH_BYTES + self.limit_bytes:
            try:
                data = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
            self._incoming += data
            if len(data) < _READ_BYTES:
                return
