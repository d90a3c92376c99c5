"""Framing of messages on a byte stream: each message is preceded by its length, as four bytes in big-endian order."""

from __future__ import annotations

import socket

LENGTH_BYTES = 4
_READ_BYTES = 1 << 20


def length_prefix(data: bytes) -> bytes:
    """Return the length of a message as the bytes that precede it."""
    return len(data).to_bytes(LENGTH_BYTES, "big")


def frame(data: bytes) -> bytes:
    """Return a message preceded by its length."""
    return length_prefix(data) + data


def frame_length(data: bytes | bytearray) -> int:
    """Return the length in bytes of the message whose frame begins with `data` (at least `LENGTH_BYTES` bytes)."""
    return int.from_bytes(data[:LENGTH_BYTES], "big")


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove and return the first message in a buffer of received bytes; None while it is incomplete."""
    end = LENGTH_BYTES + frame_length(buffer)
    if len(buffer) < LENGTH_BYTES or len(buffer) < end:
        return None
    data = bytes(buffer[LENGTH_BYTES:end])
    del buffer[:end]
    return data


def receive_frame(line: socket.socket) -> bytes | None:
    """Wait for one message on a blocking socket; None at the end of the stream."""
    buffer = bytearray()
    wanted = LENGTH_BYTES
    while len(buffer) < wanted:
        data = line.recv(min(wanted - len(buffer), _READ_BYTES))
        if not data:
            return None
        buffer += data
        if len(buffer) == LENGTH_BYTES:
            wanted += frame_length(buffer)
    return take_frame(buffer)
