"""`RankCheckpoints`: the tensors that one rank writes to and reads from checkpoints."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmcompile.codegen.program import StageProgram
from mmcompile.errors import CheckpointError
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, Holding, state_piece, wanted_by, weight_piece
from mmcompile.runtime.checkpoint.saving import PartJob, SaveCheckpoint, Saving
from mmcompile.runtime.checkpoint.trainer_state import Stored, TrainerState
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.optim.optimizer import RankState
from mmcompile.runtime.optim.sharded_optimizer import assign_updaters


@dataclass(kw_only=True, slots=True)
class RankCheckpoints:
    """Saves one rank's tensors to checkpoints, on a thread of its own. Tensors read stay in memory until `take` removes them."""

    state: RankState
    """Parameters and optimizer of the rank."""
    groups: Groups
    check: Callable[[], None] = lambda: None
    """Called while the user waits for a save; an exception it raises ends the wait."""
    saving: Saving | None = None
    """The last save that began; None before the first."""
    trainer: TrainerState | None = None
    """Training state in the checkpoint loaded last; None before the first."""
    data: object = None
    """State of the user's data in the checkpoint loaded last; None if it has none."""
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _read: dict[str, Tensor] = field(default_factory=dict)
    """Tensors read from a checkpoint, by path, which `take` has not returned yet."""

    def part(self, command: SaveCheckpoint, more: Callable[[], Sequence[CheckpointPiece]] = tuple) -> PartJob:
        """Return the job that writes this rank's part of a checkpoint.

        Args:
            more: on rank 0, returns the pieces of parameters that no rank holds; it may raise CheckpointError.
        """
        try:
            pieces, refused = [*self._pieces(command.names.get(self.groups.rank, ())), *more()], ""
            if command.copies:
                pieces = [_copied(piece) if piece.trains else piece for piece in pieces]
                if self.groups.device.type == "cuda":
                    torch.cuda.synchronize(self.groups.device)
        except CheckpointError as error:
            pieces, refused = [], str(error)
        return PartJob(
            folder=Path(command.folder),
            rank=self.groups.rank,
            step=command.step,
            pieces=pieces,
            refused=refused,
            # Over a connection of its own, which no other thread blocks on.
            store=dist.PrefixStore(f"checkpoint/{command.number}", self.groups.store.clone()),
        )

    def begin(self, step: int, write: Callable[[Saving], None]) -> Saving:
        """Start a thread that runs `write`, which writes this rank's part of a save after `step` updates; return the save."""
        self.saving = Saving(step, write, self.check)
        return self.saving

    def read(self, folder: str) -> str:
        """Read the tensors that this rank holds into memory, without changing the model.

        Args:
            folder: folder of a complete checkpoint.

        Returns:
            "", or the error message if reading failed.
        """
        try:
            stored = Stored.find(Path(folder))
            buffers = self.state.buffers.keys() & stored.index.weights.keys()
            self._holdings |= {name: Holding(whole=name) for name in buffers}
            held = self.state.trainable.keys() | buffers
            self._read = self._tensors(stored, weights=held, states=held & self.state.optimizer.updated.keys())
            self.trainer, self.data = stored.trainer, stored.data()
        except CheckpointError as error:
            self._read = {}
            return str(error)
        return ""

    def take(self) -> dict[str, Tensor]:
        """Return the tensors that `read` read, by path, and drop them here."""
        found, self._read = self._read, {}
        return found

    def restored(
        self, folder: str, waiting: Iterable[str], updaters: Mapping[str, int], programs: Sequence[StageProgram]
    ) -> dict[str, Tensor]:
        """Return optimizer state of parameters that this rank is about to hold and update, as `state/<key>/<name>`.

        Also records which parts of parameters the rank holds.

        Args:
            folder: folder of the checkpoint.
            waiting: original names of the parameters whose state is still in the checkpoint.
            updaters: rank that updates a parameter, by name, where not all its owners do.
            programs: stage programs that this rank is about to run.

        Raises:
            CheckpointError: the checkpoint no longer exists, or is damaged.
        """
        specs = [spec for program in programs for spec in program.parameters]
        self._holdings |= {spec.name: Holding.of(spec) for spec in specs}
        known, rank = set(waiting), self.groups.rank
        names = [
            spec.name
            for spec in specs
            if spec.trainable
            and spec.name not in self.state.parameters
            and spec.whole_name in known
            and updaters.get(spec.name, rank) == rank
        ]
        if not names:
            return {}
        return self._tensors(Stored.find(Path(folder)), weights=(), states=dict.fromkeys(names))

    def _tensors(self, stored: Stored, *, weights: Iterable[str], states: Iterable[str]) -> dict[str, Tensor]:
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        wanted = wanted_by(self._holdings, stored.index, weights=weights, states=states)
        for piece in wanted.values():
            dcp.read_piece(stored.place, stored.index, piece)
        return {path: piece.tensor() for path, piece in wanted.items()}

    def _pieces(self, names: Iterable[str]) -> Iterable[CheckpointPiece]:
        written = list(names)
        for name in written:
            yield weight_piece(self._holdings[name], self.state.parameters[name].detach())
        for path, tensor in self.state.optimizer.state(written).items():
            key, name = path.split("/", 1)
            part = tuple(self.state.parameters[name].shape)
            if (piece := state_piece(self._holdings[name], key, tensor.detach(), part)) is not None:
                yield piece


def _copied(piece: CheckpointPiece) -> CheckpointPiece:
    tensor = piece.tensor()
    if tensor.is_cuda:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
    else:
        copy = tensor.detach().clone()
    return replace(piece, tensor=lambda: copy, trains=False)


def balanced(holders: Mapping[str, Collection[int]], num_bytes: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Return the names of the parameters that each rank writes, by rank. One of its `holders` writes each; bytes are balanced."""
    writers = assign_updaters(holders, num_bytes, {})
    return {
        rank: tuple(name for name, writer in writers.items() if writer == rank)
        for rank in sorted(set(writers.values()))
    }
