"""`FillingCache`: holes' values of earlier batches, for batches that are equal in all that a replay reads."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mmcompile.ir.inputs import FlatBatch

_MAX_BYTES = 64 * 2**20
"""Most bytes of values kept; the oldest are dropped first."""


@dataclass(slots=True)
class FillingCache:
    """Holes' values by digest of a batch, at most `_MAX_BYTES` of them."""

    max_bytes: int = _MAX_BYTES
    _found: dict[bytes, Mapping[str, Tensor]] = field(default_factory=dict)
    """Digest -> values of the holes, the one used last at the end."""
    _num_bytes: int = 0

    def get(self, digest: bytes) -> Mapping[str, Tensor] | None:
        """Return the values kept for a digest; None if there are none."""
        if (found := self._found.pop(digest, None)) is not None:
            self._found[digest] = found
        return found

    def put(self, digest: bytes, values: Mapping[str, Tensor]) -> None:
        """Keep the values of a new digest, and drop others, oldest first, where they are too many bytes."""
        self._found[digest] = values
        self._num_bytes += _num_bytes(values)
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= _num_bytes(self._found.pop(next(iter(self._found))))

    def clear(self) -> None:
        """Drop all values."""
        self._found.clear()
        self._num_bytes = 0


def digest_of(batch: FlatBatch) -> bytes:
    """Return a digest of the integers of a batch and the shapes of its floats, which decide a replay that reads no float."""
    made = hashlib.blake2b(digest_size=16)
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            made.update(f"{name} {value!r};".encode())
            continue
        made.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        if not (value.is_floating_point() or value.is_complex()):
            made.update(value.detach().contiguous().numpy().data)
    return made.digest()


def _num_bytes(values: Mapping[str, Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in values.values())
