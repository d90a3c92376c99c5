"""Control messages: msgpack for small data, raw bytes for tensors. No message is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from mmcompile.ir.graph import dtype_name, torch_dtype
from mmcompile.runtime.comm.framing import LENGTH_BYTES, frame, frame_length
from mmcompile.runtime.comm.groups import Groups, wait

_FIRST_BYTES = 16384
"""Bytes in the first broadcast of a message. If a message is longer, a second broadcast has the remaining bytes."""
_TAG = 2**31 - 1
"""Tag of control messages between two ranks; messages with values have smaller tags."""

T = TypeVar("T")


def encode(message: object) -> bytes:
    """Return a dataclass encoded as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Return a dataclass of type `kind`, decoded from msgpack."""
    return msgspec.msgpack.decode(data, type=kind)


def broadcast(groups: Groups, data: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank; the other ranks pass None."""
    whole = None if data is None else torch.frombuffer(bytearray(frame(data)), dtype=torch.uint8)
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    if whole is not None:
        first[: len(whole)] = whole[:_FIRST_BYTES]
    groups.broadcast(first)
    raw = first.numpy().tobytes()
    end = LENGTH_BYTES + frame_length(raw)
    if end <= _FIRST_BYTES:
        return raw[LENGTH_BYTES:end]
    rest = torch.empty(end - _FIRST_BYTES, dtype=torch.uint8)
    if whole is not None:
        rest.copy_(whole[_FIRST_BYTES:])
    groups.broadcast(rest)
    return raw[LENGTH_BYTES:] + rest.numpy().tobytes()


def announce(groups: Groups, message: object, kinds: Sequence[type]) -> None:
    """Broadcast a message from rank 0 to every rank.

    Args:
        kinds: dataclasses of all possible messages, the same on all ranks.
    """
    broadcast(groups, bytes([kinds.index(type(message))]) + encode(message))


def hear(groups: Groups, kinds: Sequence[type[T]]) -> T:
    """Wait for the message that rank 0 announces, and return it (on ranks other than 0)."""
    data = broadcast(groups, None)
    return decode(memoryview(data)[1:], kinds[data[0]])


def send_bytes(groups: Groups, rank: int, data: bytes) -> None:
    """Send bytes to one rank, which must call `receive_bytes`."""
    length = torch.tensor([len(data)])
    wait(groups.send_control(length, rank, _TAG))
    if data:
        wait(groups.send_control(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, _TAG))


def receive_bytes(groups: Groups, rank: int) -> bytes:
    """Return the bytes that a rank sends with `send_bytes`."""
    length = torch.zeros(1, dtype=torch.int64)
    wait(groups.receive_control(length, rank, _TAG))
    data = torch.empty(int(length), dtype=torch.uint8)
    if len(data):
        wait(groups.receive_control(data, rank, _TAG))
    return data.numpy().tobytes()


def send_tensors(groups: Groups, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Send named tensors to one rank: their names, shapes and dtypes, then each tensor's bytes."""
    table = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()]
    send_bytes(groups, rank, encode(table))
    for tensor in tensors.values():
        if tensor.numel():
            wait(groups.send_control(tensor.detach().cpu().contiguous(), rank, _TAG))


def receive_tensors(groups: Groups, rank: int) -> dict[str, Tensor]:
    """Return the CPU tensors that a rank sends with `send_tensors`, by name."""
    table: list[tuple[str, tuple[int, ...], str]] = decode(receive_bytes(groups, rank), list[Any])
    tensors = {name: torch.empty(tuple(shape), dtype=torch_dtype(dtype)) for name, shape, dtype in table}
    for tensor in tensors.values():
        if tensor.numel():
            wait(groups.receive_control(tensor, rank, _TAG))
    return tensors


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name begins with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
