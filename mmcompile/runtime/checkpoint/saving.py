"""`Saving`: a checkpoint that is written while training continues.

Every rank has a thread that writes the rank's tensors to a file of its own in a fresh folder, and reports it in the store that
all ranks share. Rank 0's thread waits for all, joins their parts to one index, and puts the folder in the place of the old one.
The other threads wait for the result. No message uses the process groups, which the steps use meanwhile.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed re-exports its C++ classes without saying so.

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from mmcompile.errors import CheckpointError
from mmcompile.files import sync
from mmcompile.runtime.checkpoint.checkpoint_folder import swap, unwritable
from mmcompile.runtime.checkpoint.index import CheckpointIndex, StoredTensor, digest_of
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece
from mmcompile.runtime.checkpoint.restored import Restored
from mmcompile.runtime.checkpoint.trainer_state import TrainerState, files_of, write_state
from mmcompile.runtime.monitoring.fail_points import fail_point

_POLL_S = 0.03


class Saving:
    """A save in progress, on a thread. Its error is raised by `wait`, or by the next call of the engine."""

    def __init__(self, step: int, write: Callable[[Saving], None], check: Callable[[], None]) -> None:
        self.step = step
        """Number of updates before the save."""
        self._check = check
        self._error: Exception | None = None
        self._abandoned = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(write,), name=f"mmcompile-save-{step}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once the save has ended: the checkpoint is on the disk, or the save failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Block until the checkpoint is on the disk.

        Raises:
            CheckpointError: the checkpoint could not be written; the previous one is untouched.
            EngineError: a rank failed meanwhile.
        """
        try:
            while not self._done.wait(_POLL_S):
                self._check()
        except BaseException:
            # The thread stops waiting for other ranks, since some have failed.
            self._abandoned = True
            raise
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Block until the save has ended, without raising its error, which a later call raises."""
        self._done.wait()

    def until(self, found: Callable[[], bool]) -> None:
        """Block the save's thread until `found` returns true. Raises CheckpointError if the save is abandoned."""
        while not found():
            if self._abandoned:
                raise CheckpointError(f"the save of step {self.step} was cut off, since a rank failed")
            time.sleep(_POLL_S)

    def _work(self, write: Callable[[Saving], None]) -> None:
        try:
            write(self)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCheckpoint:
    """Command of rank 0: write the rank's part of a checkpoint on a thread, and report to rank 0 through the store."""

    folder: str
    """Empty folder to write to, visible to all ranks."""
    number: int
    """Number of saves of this engine so far, including this one."""
    step: int
    """Number of updates so far."""
    copies: bool
    """True to write copies of tensors, made at once, since training changes the tensors meanwhile."""
    names: dict[int, tuple[str, ...]]
    """Parameters that each rank writes, with their optimizer state, by rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartJob:
    """Writes one rank's part of a save: the tensors that the rank writes to a file of its own."""

    folder: Path
    """Folder to write to, which exists and is empty."""
    rank: int
    step: int
    pieces: Sequence[CheckpointPiece]
    refused: str = ""
    """Error met while collecting the pieces, reported to rank 0 instead of writing; "" if there is none."""
    store: dist.Store
    """Section of the store for this save, used by this thread only."""

    def run(self, saving: Saving) -> None:
        """Run the job of a rank other than 0: write its part, then wait for the outcome. Raises CheckpointError."""
        self.write()
        saving.until(lambda: self.store.check([_OUTCOME]))
        error = self.store.get(_OUTCOME).decode()
        self.store.set(_heard_by(self.rank), "")
        if error:
            raise CheckpointError(error)

    def write(self) -> None:
        """Write this rank's pieces, and report success or the error to rank 0."""
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        if self.refused:
            self._say(_Said(error=self.refused))
            return
        try:
            fail_point("checkpoint-writing", rank=self.rank, step=self.step)
            part = dcp.write_part(self.folder, self.rank, self.pieces)
            data = msgspec.json.encode(part)
            path = _part_file(self.folder, self.rank)
            path.write_bytes(data)
            sync(path)
            fail_point("checkpoint-written", rank=self.rank, step=self.step)
        except Exception as error:
            hint = "" if self.folder.is_dir() else "; save to a folder that all machines share"
            self._say(_Said(error=f"rank {self.rank} failed with {type(error).__name__}: {error}{hint}"))
            return
        self._say(_Said(digest=digest_of(data)))

    def _say(self, said: _Said) -> None:
        self.store.set(str(self.rank), msgspec.json.encode(said).decode())


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOrder:
    """Folder, training state and options of a save that the user requested."""

    folder: Path
    fresh: Path
    """Empty folder beside `folder` to write to; it takes the place of `folder` in the end."""
    trainer: TrainerState
    tied: Mapping[str, str]
    """First name of a tied parameter, by each further name."""
    data: bytes | None
    """Encoded state of the user's data; None if it is not saved."""
    copies: bool
    """True if ranks write copies, since training continues meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeJob:
    """Writes rank 0's part of a save, waits for the parts of all ranks, and joins them to a checkpoint."""

    order: SaveOrder
    part: PartJob
    num_ranks: int
    restored: Restored
    """Optimizer state that no rank has read from the loaded checkpoint yet. It is copied to the new checkpoint."""

    def run(self, saving: Saving) -> None:
        """Write rank 0's part, then join the parts of all ranks and report the outcome. Raises CheckpointError."""
        try:
            self.part.write()
            self._join(saving)
        except Exception as error:
            shutil.rmtree(self.part.folder, ignore_errors=True)
            failure = error if isinstance(error, CheckpointError) else unwritable(self.order.folder, error)
            self._tell(saving, str(failure))
            raise failure from error
        # The user may delete the loaded checkpoint.
        self.restored.folder = self.order.folder
        self._tell(saving, "")

    def _tell(self, saving: Saving, outcome: str) -> None:
        """Write the outcome to the store for all ranks, and wait until they have read it: the store may end with this process."""
        store = self.part.store
        store.set(_OUTCOME, outcome)
        # Whoever does not hear it is gone, which does not change how it ended.
        with contextlib.suppress(CheckpointError):
            for rank in range(1, self.num_ranks):
                saving.until(lambda rank=rank: store.check([_heard_by(rank)]))
                store.delete_key(_heard_by(rank))
            store.delete_key(_OUTCOME)

    def _join(self, saving: Saving) -> None:
        from mmcompile.runtime.checkpoint import dcp

        fresh, store = self.part.folder, self.part.store
        parts: list[dict[str, StoredTensor]] = []
        for rank in range(self.num_ranks):
            saving.until(lambda rank=rank: store.check([str(rank)]))
            said = msgspec.json.decode(store.get(str(rank)), type=_Said)
            store.delete_key(str(rank))
            if said.error:
                raise unwritable(self.order.folder, said.error)
            parts.append(_part(fresh, rank, said.digest))
        fail_point("checkpoint-joining", rank=0, step=saving.step)
        for rank in range(self.num_ranks):
            _part_file(fresh, rank).unlink()
        index = CheckpointIndex.joined(parts, self.order.tied)
        dcp.write_metadata(fresh, index)
        write_state(fresh, self.order.trainer, index.write(fresh), self.order.data)
        swap(fresh, self.order.folder, files_of(self.order.folder).__contains__)
        fail_point("checkpoint-saved", rank=0, step=saving.step)


_OUTCOME = "outcome"


def _heard_by(rank: int) -> str:
    return f"heard by {rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """Report of one rank to rank 0 after writing its part of a checkpoint; it is left in the store."""

    digest: str = ""
    """Hash of the part of the checkpoint's index that the rank wrote."""
    error: str = ""


def _part_file(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.json"


def _part(folder: Path, rank: int, digest: str) -> dict[str, StoredTensor]:
    path = _part_file(folder, rank)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} wrote to {folder}, and rank 0 does not see it there: save to a folder that all machines share"
        ) from error
    if digest_of(data) != digest:
        raise CheckpointError(
            f"rank 0 sees another {path} than rank {rank} wrote: save to a folder that all machines share"
        )
    return msgspec.json.decode(data, type=dict[str, StoredTensor])
