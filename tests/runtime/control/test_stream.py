"""Frames, messages, secrets and times."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes.control_world import PREPARE

from mmcompile.errors import ConfigError
from mmcompile.runtime.control import secret
from mmcompile.runtime.control.messages import (
    Advice,
    Commit,
    Heartbeat,
    Message,
    ProtocolError,
    Reduced,
    Refused,
    decode,
    encode,
)
from mmcompile.runtime.control.stream import Stream
from mmcompile.runtime.control.times import Times

LIMIT = 2**20


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Stream]]:
    ours, theirs = socket.socketpair()
    stream = Stream(theirs, LIMIT)
    yield ours, stream
    ours.close()
    stream.close()


@pytest.mark.parametrize("message", [Heartbeat(), PREPARE, Refused(reason="no", advice=Advice.RETRY)])
def test_messages_come_back(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"kind":"Commit"}',
        b'{"kind":"Commit","body":{"step":"1"}}',
        b'{"kind":"Commit","body":{"step":1.5}}',
        b'{"kind":"Nothing","body":{}}',
        b'{"kind":"__class__","body":{}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(text)


def test_frames_arrive_byte_by_byte(ends: tuple[socket.socket, Stream]) -> None:
    ours, stream = ends
    data = encode(PREPARE)
    found: list[Message] = []
    for byte in len(data).to_bytes(4, "big") + data:
        ours.sendall(bytes([byte]))
        found += stream.read()
    assert found == [PREPARE]
    assert not stream.closed


def test_many_frames_at_once_and_the_end(ends: tuple[socket.socket, Stream]) -> None:
    ours, stream = ends
    other = Stream(ours, LIMIT)
    for step in range(50):
        other.send(Commit(step=step))
    other.close()
    assert stream.read() == [Commit(step=step) for step in range(50)]
    assert stream.read() == [] and stream.closed


def test_what_the_socket_does_not_take_is_sent_later(ends: tuple[socket.socket, Stream]) -> None:
    ours, stream = ends
    large = replace(PREPARE, payload="x" * (LIMIT // 2))
    for _ in range(4):
        stream.send(large)
    assert stream.has_unsent
    other, found = Stream(ours, LIMIT), []
    while len(found) < 4:
        stream.flush()
        found += other.read()
    assert found == [large] * 4 and not stream.has_unsent


def test_a_frame_over_the_limit(ends: tuple[socket.socket, Stream]) -> None:
    ours, stream = ends
    ours.sendall((LIMIT + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match=f"{LIMIT + 1} bytes, the limit is {LIMIT}"):
        stream.read()


def test_writing_to_a_peer_that_is_gone(ends: tuple[socket.socket, Stream]) -> None:
    ours, stream = ends
    ours.close()
    report = Reduced(generation=1, step=1, worker=0, microbatches=(), cursor=None)
    for _ in range(3):
        stream.send(report)
    assert stream.closed and not stream.has_unsent


def test_proofs() -> None:
    key, nonces = secret.make_secret(), (secret.make_nonce(), secret.make_nonce())
    mac = secret.prove(key, "agent", *nonces)
    assert secret.proves(mac, key, "agent", *nonces)
    assert not secret.proves(mac, key, "coordinator", *nonces)
    assert not secret.proves(mac, key, "agent", nonces[1], nonces[0])
    assert not secret.proves(mac, secret.make_secret(), "agent", *nonces)
    assert not secret.proves("ü", key, "agent", *nonces)


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot read the secret"):
        secret.read_secret(path)
    path.write_bytes(secret.make_secret() + b"\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode 640\): run chmod 600"):
        secret.read_secret(path)
    path.chmod(0o600)
    assert len(secret.read_secret(path)) == 64
    path.write_text("short")
    with pytest.raises(ConfigError, match="has 5 bytes, the least is 16"):
        secret.read_secret(path)


def test_times_follow_from_one_deadline() -> None:
    for deadline_s in (2.0, 20.0, 300.0):
        times = Times(recovery_deadline_s=deadline_s)
        assert times.tick_s <= times.heartbeat_s / 2 < times.lease_s / 5
        assert times.lease_s < times.fault_grace_s < times.attempt_s
        assert times.fault_grace_s + times.attempt_s == pytest.approx(deadline_s)
        assert times.resume_s < times.recovery_deadline_s
    for wrong in (1.9, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="recovery_deadline_s is"):
            Times(recovery_deadline_s=wrong)
    with pytest.raises(ConfigError, match="max_attempts"):
        Times(max_attempts=0)
