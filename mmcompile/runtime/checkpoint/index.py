"""`CheckpointIndex`: the tensors of a checkpoint, with file and bytes of each part.

Tensors are named as torch's own state dicts name them once they are flattened:

    model.<parameter>                       a trained parameter
    optimizer.state.<parameter>.<key>       a tensor of its optimizer state (`exp_avg`, `step`, ...)

A tensor is a list of *chunks*, boxes that do not overlap and fill it; a rank that holds a part of a parameter writes its own.
The index has the contents of torch's `.metadata` file as JSON: nothing is unpickled on reading.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from mmcompile.errors import CheckpointError

_INDEX = "index.json"
_WEIGHT = "model."
_STATE = "optimizer.state."
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChunk:
    """A box of a tensor, in a file."""

    offsets: tuple[int, ...]
    """Its first element, by dim."""
    sizes: tuple[int, ...]
    file: str
    position: int
    """Position of its first byte in the file."""
    length: int
    """Bytes, as `torch.save` writes a tensor of these sizes."""
    digest: str
    """Digest of these bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor, or the chunks of it that one rank wrote."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole."""
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint."""

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    """Other name of a tied parameter -> the name it is stored under."""

    @classmethod
    def joined(cls, parts: Iterable[Mapping[str, StoredTensor]], tied: Mapping[str, str]) -> CheckpointIndex:
        """From what each rank wrote.

        Args:
            tied: further name of a parameter -> its first one. Ranks may have written it under any.

        Raises:
            CheckpointError: the chunks of a tensor do not fill it.
        """
        tensors: dict[str, StoredTensor] = {}
        for part in parts:
            for key, stored in part.items():
                if (known := tensors.get(key)) is None:
                    tensors[key] = stored
                elif (known.dtype, known.shape) == (stored.dtype, stored.shape):
                    tensors[key] = replace(known, chunks=(*known.chunks, *stored.chunks))
                else:
                    raise CheckpointError(
                        f"two ranks hold parts of different tensors as {key}: {known.dtype} {known.shape} and {stored.dtype} "
                        f"{stored.shape}"
                    )
        for key, stored in tensors.items():
            written, wanted = sum(math.prod(chunk.sizes) for chunk in stored.chunks), math.prod(stored.shape)
            if written != wanted:
                raise CheckpointError(f"{key} has {wanted} elements, and ranks wrote {written} of it")
        aliases: dict[str, str] = {}
        for first in set(tied.values()):
            names = [first, *(name for name, other in tied.items() if other == first)]
            stored_as = next((name for name in names if weight_key(name) in tensors), None)
            if stored_as is not None:
                aliases |= {name: stored_as for name in names if name != stored_as}
        return cls(tensors=dict(sorted(tensors.items())), aliases=dict(sorted(aliases.items())))

    def name_of(self, name: str) -> str:
        """Return the name that a parameter is stored under, from any of its names."""
        return self.aliases.get(name, name)

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """Parameters by name."""
        return {key.removeprefix(_WEIGHT): t for key, t in self.tensors.items() if key.startswith(_WEIGHT)}

    def states(self) -> dict[str, dict[str, StoredTensor]]:
        """Return optimizer state: parameter -> key -> tensor."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for path, stored in self.tensors.items():
            if path.startswith(_STATE):
                name, key = path.removeprefix(_STATE).rsplit(".", 1)
                found.setdefault(name, {})[key] = stored
        return found

    def write(self, folder: Path) -> str:
        """Write the index; returns its digest."""
        data = msgspec.json.encode(self)
        (folder / _INDEX).write_bytes(data)
        return digest_of(data)

    @classmethod
    def read(cls, folder: Path, digest: str) -> CheckpointIndex:
        """Read the index of a checkpoint.

        Args:
            digest: that it must have.

        Raises:
            CheckpointError: it is damaged, or missing.
        """
        try:
            data = (folder / _INDEX).read_bytes()
            if digest_of(data) != digest:
                raise damaged(folder, f"{_INDEX} is not as it was written")
            return msgspec.json.decode(data, type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise damaged(folder, error) from error


def weight_key(name: str) -> str:
    """Return the key of a weight."""
    return _WEIGHT + name


def state_key(name: str, key: str) -> str:
    """Return the key of a tensor of optimizer state."""
    return f"{_STATE}{name}.{key}"


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of a tensor in a nested state dict, as torch has it before flattening."""
    if key.startswith(_WEIGHT):
        return ("model", key.removeprefix(_WEIGHT))
    name, state = key.removeprefix(_STATE).rsplit(".", 1)
    return ("optimizer", "state", name, state)


def digest_of(data: bytes | bytearray) -> str:
    """Return the digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_in(path: Path, position: int, length: int) -> str:
    """Digest of some bytes of a file. Raises OSError."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(position)
        left = length
        while block := file.read(min(left, _BLOCK_BYTES)):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def damaged(place: Path, why: Exception | str) -> CheckpointError:
    """Return the error of a damaged checkpoint."""
    return CheckpointError(f"the checkpoint at {place} is damaged: {why}; load an older one")
