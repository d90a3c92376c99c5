"""`CheckpointIndex`: the tensors of a checkpoint, with file and bytes of each part.

Tensors are named as torch's own state dicts name them once they are flattened:

    model.<parameter>                       a trained parameter
    optimizer.state.<parameter>.<key>       a tensor of its optimizer state (`exp_avg`, `step`, ...)

A tensor is a list of *chunks*, boxes that do not overlap and fill it; a rank that holds a part of a parameter writes the chunks
of that part. The index has the contents of torch's `.metadata` file as JSON: nothing is unpickled on reading.
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
    """A chunk of a tensor (a box: a range of indices in each dim), and the file that has its bytes."""

    offsets: tuple[int, ...]
    """Index in the whole tensor of the chunk's first element, by dim."""
    sizes: tuple[int, ...]
    file: str
    position: int
    """Offset in bytes, from the start of `file`, of the chunk of a tensor stored there."""
    length: int
    """Number of bytes of the chunk in `file`, in the format of `torch.save`."""
    digest: str
    """BLAKE2b digest, in hex, of the `length` bytes of `file` that begin at `position`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Dtype, shape and chunks of a stored tensor; in a rank's part of the index, only the chunks that the rank wrote."""

    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint by key, with the file and bytes of each chunk."""

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str]
    """Stored name of a tied parameter, by each of its other names."""

    @classmethod
    def joined(cls, parts: Iterable[Mapping[str, StoredTensor]], tied: Mapping[str, str]) -> CheckpointIndex:
        """Join the parts of the index that the ranks wrote.

        Args:
            tied: first name of a tied parameter, by each further name. Ranks may have written it under any of them.

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
        """Return the name under which a parameter is stored, given any of its names."""
        return self.aliases.get(name, name)

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """Stored parameters by original name."""
        return {key.removeprefix(_WEIGHT): t for key, t in self.tensors.items() if key.startswith(_WEIGHT)}

    def states(self) -> dict[str, dict[str, StoredTensor]]:
        """Return the stored optimizer state: tensors by parameter name, then by key (`exp_avg`)."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for path, stored in self.tensors.items():
            if path.startswith(_STATE):
                name, key = path.removeprefix(_STATE).rsplit(".", 1)
                found.setdefault(name, {})[key] = stored
        return found

    def write(self, folder: Path) -> str:
        """Write the index to a folder, and return its digest."""
        data = msgspec.json.encode(self)
        (folder / _INDEX).write_bytes(data)
        return digest_of(data)

    @classmethod
    def read(cls, folder: Path, digest: str) -> CheckpointIndex:
        """Read the index of a checkpoint.

        Args:
            digest: expected digest of the index file.

        Raises:
            CheckpointError: the index is damaged or missing.
        """
        try:
            data = (folder / _INDEX).read_bytes()
            if digest_of(data) != digest:
                raise damaged(folder, f"{_INDEX} is not as it was written")
            return msgspec.json.decode(data, type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise damaged(folder, error) from error


def weight_key(name: str) -> str:
    """Return the index key of a parameter."""
    return _WEIGHT + name


def state_key(name: str, key: str) -> str:
    """Return the index key of a tensor of a parameter's optimizer state."""
    return f"{_STATE}{name}.{key}"


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of a tensor in a nested state dict, as torch has it before flattening."""
    if key.startswith(_WEIGHT):
        return ("model", key.removeprefix(_WEIGHT))
    name, state = key.removeprefix(_STATE).rsplit(".", 1)
    return ("optimizer", "state", name, state)


def digest_of(data: bytes | bytearray) -> str:
    """Return the 16-byte BLAKE2b digest of bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_in(path: Path, position: int, length: int) -> str:
    """Return the digest of `length` bytes of a file from `position` on. Raises OSError."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        file.seek(position)
        left = length
        while block := file.read(min(left, _BLOCK_BYTES)):
            found.update(block)
            left -= len(block)
    return found.hexdigest()


def damaged(place: Path, why: Exception | str) -> CheckpointError:
    """Return the error for a damaged checkpoint at `place`."""
    return CheckpointError(f"the checkpoint at {place} is damaged: {why}; load an older one")
