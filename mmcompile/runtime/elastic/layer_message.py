"""Messages of a layer: a frame of known size, the header that it announces, then the bytes of all tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcompile.ir.graph import dtype_name, torch_dtype
from mmcompile.planner.resilience.job import LayerId
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.framing import LENGTH_BYTES, frame_length, length_prefix
from mmcompile.runtime.elastic.layer_store import bytes_of

_HASH_BYTES = 16
FRAME_BYTES = LENGTH_BYTES + 2 * _HASH_BYTES


class DamagedLayer(Exception):
    """Bytes changed on their way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Name and layout of a tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Layout in memory, kept since kernels may round differently for another one."""
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def read(self, data: Tensor) -> Tensor:
        """The tensor, in the layout that the source has.

        Args:
            data: uint8 [num_bytes], as `bytes_of` gives it. The result may share its memory.
        """
        values = data.view(torch_dtype(self.dtype)).view(self.shape)
        if values.stride() == self.stride:
            return values
        return torch.empty_strided(self.shape, self.stride, dtype=values.dtype).copy_(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Content of the bytes that follow."""

    layer: LayerId
    digest: str
    """`layer_store.digest_of` all tensors."""
    entries: tuple[Entry, ...]
    """In the order in which their bytes follow."""


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """Entries by name, those with large elements first: each then starts where its dtype may, without a gap."""
    return tuple(
        Entry(name=name, shape=tuple(tensor.shape), stride=tensor.stride(), dtype=dtype_name(tensor.dtype))
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    )


def seal(header: Header) -> tuple[bytes, bytes]:
    """Frame and header as they travel. A damaged header would have its reader wait for bytes that never come."""
    data = wire.encode(header)
    return _frame(data), data


def header_length(frame: bytes) -> int:
    """Bytes of the header that comes next. Raises DamagedLayer."""
    head, check = frame[:-_HASH_BYTES], frame[-_HASH_BYTES:]
    if _hash(head) != check:
        raise DamagedLayer("the length of its header changed on the way")
    return frame_length(head)


def open_header(frame: bytes, data: bytes) -> Header:
    """Inverse of `seal`. Raises DamagedLayer."""
    if frame != _frame(data):
        raise DamagedLayer("its header changed on the way")
    return wire.decode(data, Header)


def chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[Tensor]:
    """All bytes of tensors one after the other, cut every `chunk_bytes`."""
    pieces: list[Tensor] = []
    room = chunk_bytes
    for tensor in tensors:
        for part in _cut(bytes_of(tensor), room, chunk_bytes):
            pieces.append(part)
            room -= len(part)
            if not room:
                yield _joined(pieces)
                pieces, room = [], chunk_bytes
    if pieces:
        yield _joined(pieces)


def _cut(data: Tensor, first: int, size: int) -> list[Tensor]:
    """Pieces of `size`, but the first of `first` at most; none are empty."""
    pieces = [data[:first], *data[first:].split(size)]
    return [piece for piece in pieces if len(piece)]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _frame(header: bytes) -> bytes:
    """Length and hash of a header, and a hash of these two."""
    head = length_prefix(header) + _hash(header)
    return head + _hash(head)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
