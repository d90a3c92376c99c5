"""Control messages: msgpack for what is small, raw bytes for tensors. Nothing on the wire is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from mmcompile.ir.graph import dtype_name, torch_dtype
from mmcompile.runtime.comm.groups import Groups, wait

_FRAME = 16384
"""Bytes of the first broadcast; a longer message needs a second one."""
_LENGTH_BYTES = 8
_TAG = 2**31 - 1
"""Tag of control messages between two ranks; messages of links have smaller ones."""

T = TypeVar("T")


def encode(message: object) -> bytes:
    """Dataclasses to msgpack."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """msgpack to the dataclass `kind`."""
    return msgspec.msgpack.decode(data, type=kind)


def broadcast(groups: Groups, data: bytes | None) -> bytes:
    """Give every rank the bytes of rank 0 (the others pass None)."""
    frame = torch.zeros(_FRAME, dtype=torch.uint8)
    room = _FRAME - _LENGTH_BYTES
    if data is not None:
        head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    groups.broadcast(frame)
    raw = frame.numpy().tobytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if length <= room:
        return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]
    rest = torch.empty(length - room, dtype=torch.uint8)
    if data is not None:
        rest.copy_(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8))
    groups.broadcast(rest)
    return raw[_LENGTH_BYTES:] + rest.numpy().tobytes()


def send_bytes(groups: Groups, rank: int, data: bytes) -> None:
    """Send bytes to one rank, which must call `receive_bytes`."""
    length = torch.tensor([len(data)])
    wait(groups.send_control(length, rank, _TAG))
    if data:
        wait(groups.send_control(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, _TAG))


def receive_bytes(groups: Groups, rank: int) -> bytes:
    """The bytes one rank sends with `send_bytes`."""
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
    """The CPU tensors one rank sends with `send_tensors`."""
    table: list[tuple[str, tuple[int, ...], str]] = decode(receive_bytes(groups, rank), list[Any])
    tensors = {name: torch.empty(tuple(shape), dtype=torch_dtype(dtype)) for name, shape, dtype in table}
    for tensor in tensors.values():
        if tensor.numel():
            wait(groups.receive_control(tensor, rank, _TAG))
    return tensors


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose name begins with `prefix`, by the rest of it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
