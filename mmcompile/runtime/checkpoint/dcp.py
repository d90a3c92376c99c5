"""Checkpoint files in the format of `torch.distributed.checkpoint`, by its writer, metadata and read planning.

torch's own functions for saving require its default process group and pickle between ranks. So each rank runs torch's storage
writer by itself, and rank 0 makes the metadata out of `CheckpointIndex`. `torch.distributed.checkpoint.load` reads the folder.

Importing this module takes most of a second: import it where something is saved or loaded.
"""

# pyright: reportPrivateUsage=false
# Where bytes are in a file has no public name, and torch's reader wants this one.

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from mmcompile.ir.graph import dtype_name, torch_dtype
from mmcompile.runtime.checkpoint.index import (
    CheckpointIndex,
    StoredChunk,
    StoredTensor,
    damaged,
    digest_in,
    digest_of,
    path_of,
)
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, TensorBox


class _Pieces(DefaultSavePlanner):
    """Save planner that gives torch's checkpoint writer the contents of each box that it writes.

    A box is a range of indices in each dimension of a whole tensor. torch's own planner takes tensors from a state dict;
    this planner takes them from `pieces`, which compute a tensor only when it is written.
    """

    def __init__(self, pieces: Iterable[CheckpointPiece]) -> None:
        super().__init__()
        self._boxes = {(piece.key, box.offsets): (piece, box) for piece in pieces for box in piece.boxes}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        piece, box = self._boxes[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return box.of(piece.tensor())


def write_part(folder: Path, rank: int, pieces: Sequence[CheckpointPiece]) -> dict[str, StoredTensor]:
    """Write one rank's pieces to a file of its own, wait until it is on the disk, and return its part of the index.

    Raises:
        OSError: the file cannot be written.
    """
    items = [_item(p.key, p.dtype, p.shape, box.offsets, box.sizes) for p in pieces for box in p.boxes]
    # Copying ahead would start CUDA in processes that do not use it, and there is nothing to overlap with.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, SavePlan(items)])[rank]
    try:
        results: list[WriteResult] = writer.write_data(plan, _Pieces(pieces)).wait()
    except RuntimeError as error:
        # torch's zip writer has an error of its own for a disk that is full.
        raise OSError(str(error)) from error
    places = {(one.index.fqn, tuple(one.index.offset or ())): one.storage_data for one in results}
    return {
        piece.key: StoredTensor(
            dtype=dtype_name(piece.dtype),
            shape=piece.shape,
            chunks=tuple(_stored(folder, box, places[piece.key, box.offsets]) for box in piece.boxes),
        )
        for piece in pieces
    }


def write_metadata(folder: Path, index: CheckpointIndex) -> None:
    """Write torch's `.metadata` file from the index. Raises OSError."""
    items: list[WriteItem] = []
    results: list[WriteResult] = []
    for key, stored in index.tensors.items():
        for name in (key, *(f"model.{other}" for other, first in index.aliases.items() if key == f"model.{first}")):
            for chunk in stored.chunks:
                item = _item(name, torch_dtype(stored.dtype), stored.shape, chunk.offsets, chunk.sizes)
                place = _StorageInfo(chunk.file, chunk.position, chunk.length)
                items.append(item)
                results.append(WriteResult(index=item.index, size_in_bytes=chunk.length, storage_data=place))
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan([SavePlan(items)])
    metadata.planner_data = {name: path_of(name) for name in metadata.state_dict_metadata}
    FileSystemWriter(folder, sync_files=True).finish(metadata, [results])


def read_piece(folder: Path, index: CheckpointIndex, piece: CheckpointPiece) -> None:
    """Fill the tensor of a piece from a checkpoint, regardless of the parts in which it was written.

    Raises:
        CheckpointError: bytes that the piece needs are missing or differ from those written.
    """
    stored, target = index.tensors[piece.key], piece.tensor()
    saved = TensorStorageMetadata(
        properties=TensorProperties(dtype=piece.dtype),
        size=torch.Size(stored.shape),
        chunks=[_chunk(chunk.offsets, chunk.sizes) for chunk in stored.chunks],
    )
    wanted = [_chunk(box.offsets, box.sizes) for box in piece.boxes]
    chunks = {chunk.offsets: chunk for chunk in stored.chunks}
    boxes = {box.offsets: box for box in piece.boxes}
    by_chunk: defaultdict[StoredChunk, list[Any]] = defaultdict(list)
    for item in create_read_items_for_chunk_list(piece.key, saved, wanted):
        by_chunk[chunks[tuple(item.storage_index.offset or ())]].append(item)
    num_read = 0
    for chunk, items in by_chunk.items():
        tensor = _read(folder, piece.key, chunk)
        for item in items:
            box = boxes[tuple(item.dest_index.offset or ())].of(target)
            box[_slices(item.dest_offsets, item.lengths)] = tensor[_slices(item.storage_offsets, item.lengths)]
            num_read += math.prod(item.lengths)
    wanted_elements = sum(math.prod(box.sizes) for box in piece.boxes)
    if num_read != wanted_elements:
        raise damaged(folder, f"it has {num_read} of the {wanted_elements} elements of {piece.key} that are wanted")


def check_chunks(folder: Path, keys: Iterable[str], index: CheckpointIndex) -> None:
    """Check that the stored bytes of tensors have the digests in the index. Raises CheckpointError."""
    for key in keys:
        for chunk in index.tensors[key].chunks:
            try:
                found = digest_in(folder / chunk.file, chunk.position, chunk.length)
            except OSError as error:
                raise damaged(folder, error) from error
            if found != chunk.digest:
                raise _differs(folder, key, chunk)


def _read(folder: Path, key: str, chunk: StoredChunk) -> Tensor:
    try:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.position)
            data = file.read(chunk.length)
    except OSError as error:
        raise damaged(folder, error) from error
    if digest_of(data) != chunk.digest:
        raise _differs(folder, key, chunk)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise damaged(folder, error) from error


def _differs(folder: Path, key: str, chunk: StoredChunk) -> Exception:
    return damaged(
        folder,
        f"bytes {chunk.position} to {chunk.position + chunk.length} of {chunk.file}, of {key}, are not as written",
    )


def _item(
    key: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.TENSOR if sizes == shape else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(offsets, sizes), properties=TensorProperties(dtype=dtype), size=torch.Size(shape)
        ),
    )


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _stored(folder: Path, box: TensorBox, place: _StorageInfo) -> StoredChunk:
    return StoredChunk(
        offsets=box.offsets,
        sizes=box.sizes,
        file=place.relative_path,
        position=place.offset,
        length=place.length,
        digest=digest_in(folder / place.relative_path, place.offset, place.length),
    )


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
