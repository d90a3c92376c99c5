"""Messages of a layer: a frame of fixed size with the header's length, the header, then the bytes of all tensors."""

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
    """Bytes of a layer's message changed during transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Name, shape, dtype and memory layout of a tensor in a layer's message."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in elements. They are preserved, since kernels may round differently for another memory layout."""
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def read(self, data: Tensor) -> Tensor:
        """Return the tensor in the source's memory layout.

        Args:
            data: uint8 [num_bytes], as `bytes_of` returns it. The result may share its memory.
        """
        values = data.view(torch_dtype(self.dtype)).view(self.shape)
        if values.stride() == self.stride:
            return values
        return torch.empty_strided(self.shape, self.stride, dtype=values.dtype).copy_(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Layer, digest and tensors of the bytes that follow in a layer's message."""

    layer: LayerId
    digest: str
    """Digest of all tensors, by `layer_store.digest_of`."""
    entries: tuple[Entry, ...]
    """Entries of all tensors, in the order of their bytes."""


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """Return entries sorted by descending element size, then name, so that each tensor is aligned to its dtype without gaps."""
    return tuple(
        Entry(name=name, shape=tuple(tensor.shape), stride=tensor.stride(), dtype=dtype_name(tensor.dtype))
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    )


def seal(header: Header) -> tuple[bytes, bytes]:
    """Return the frame (length and hashes of the header) and the header, as they are sent. The hashes detect a damaged length."""
    data = wire.encode(header)
    return _frame(data), data


def header_length(frame: bytes) -> int:
    """Return the number of bytes of the header, from the frame before it. Raises DamagedLayer if the frame is damaged."""
    head, check = frame[:-_HASH_BYTES], frame[-_HASH_BYTES:]
    if _hash(head) != check:
        raise DamagedLayer("the length of its header changed on the way")
    return frame_length(head)


def open_header(frame: bytes, data: bytes) -> Header:
    """Return the header that `seal` encoded as `data`, checked by the frame's hashes. Raises DamagedLayer."""
    if frame != _frame(data):
        raise DamagedLayer("its header changed on the way")
    return wire.decode(data, Header)


def chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[Tensor]:
    """Yield the bytes of all tensors in order (uint8), in chunks of `chunk_bytes`; the last may be shorter."""
    pieces: list[Tensor] = []
    room = chunk_bytes
    for tensor in tensors:
        data = bytes_of(tensor)
        for part in (data[:room], *data[room:].split(chunk_bytes)):
            if len(part):
                pieces.append(part)
                room -= len(part)
            if not room:
                yield _joined(pieces)
                pieces, room = [], chunk_bytes
    if pieces:
        yield _joined(pieces)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _frame(header: bytes) -> bytes:
    head = length_prefix(header) + _hash(header)
    return head + _hash(head)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
