"""Frames over sockets."""

from __future__ import annotations

import socket
import threading

from mmcompile.runtime.comm.framing import frame, receive_frame, take_frame


def test_frames_are_taken_one_by_one_once_they_are_complete() -> None:
    buffer = bytearray(frame(b"one") + frame(b"") + frame(b"three")[:-1])
    assert (take_frame(buffer), take_frame(buffer), take_frame(buffer)) == (b"one", b"", None)
    buffer += b"e"
    assert take_frame(buffer) == b"three" and not buffer


def test_a_long_frame_an_empty_one_and_the_end_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    long = bytes(range(256)) * 2**14

    def send() -> None:
        with theirs:
            theirs.sendall(frame(long) + frame(b""))
            theirs.sendall(frame(b"cut off")[:-1])

    sender = threading.Thread(target=send)
    sender.start()
    with ours:
        assert receive_frame(ours) == long
        assert receive_frame(ours) == b""
        assert receive_frame(ours) is None
    sender.join()
