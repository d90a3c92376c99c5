"""`RankCheckpoints`: what one rank does in saves and loads."""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmcompile.codegen.program import StageProgram
from mmcompile.errors import CheckpointError
from mmcompile.runtime.checkpoint.holding import Holding
from mmcompile.runtime.checkpoint.pieces import Piece, state_piece, wanted_by, weight_piece
from mmcompile.runtime.checkpoint.saving import PartJob, Saving
from mmcompile.runtime.checkpoint.trainer_state import Stored, TrainerState
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.commands import Install, Save
from mmcompile.runtime.rank import Rank


def _never() -> None:
    """Nothing else is known that could have failed."""


@dataclass(kw_only=True, slots=True)
class RankCheckpoints:
    """The checkpoints of one rank.

    Args:
        check: called while the user waits for a save; what it raises ends the wait.
    """

    rank: Rank
    groups: Groups
    check: Callable[[], None] = _never
    saving: Saving | None = None
    """The last save."""
    trainer: TrainerState | None = None
    """Of the checkpoint that was loaded last."""
    data: object = None
    """What was saved of the user's data there."""
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _read: dict[str, Tensor] = field(default_factory=dict)
    """By path, for `apply`."""

    def note(self, programs: Iterable[StageProgram]) -> None:
        """Learn what parameters are, by the programs that read them."""
        for program in programs:
            for spec in program.parameters:
                self._holdings[spec.name] = Holding.of(spec)

    def part(self, command: Save, more: Callable[[], Sequence[Piece]] = tuple) -> PartJob:
        """What this rank writes: as copies, if training goes on meanwhile.

        Args:
            more: makes pieces beside those that the command names. Raises CheckpointError.
        """
        try:
            pieces, refused = [*self._pieces(command), *more()], ""
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
            store=_store(self.groups, command.number),
        )

    def begin(self, step: int, write: Callable[[Saving], None]) -> Saving:
        """Write from now on, on a thread."""
        self.saving = Saving(step, write, self.check)
        return self.saving

    def settle(self) -> None:
        """Wait until the last save is over, however it ended."""
        if self.saving is not None:
            self.saving.settle()

    def read(self, folder: str) -> str:
        """Read what this rank holds, without a change to anything; "" or why that failed.

        Args:
            folder: of a whole checkpoint.
        """
        try:
            stored = Stored.find(Path(folder))
            held = self.rank.state.trainable.keys()
            self._read = self._tensors(stored, weights=held, states=held & self.rank.optimizer.updated.keys())
            self.trainer, self.data = stored.trainer, stored.data()
        except CheckpointError as error:
            self._read = {}
            return str(error)
        return ""

    def apply(self) -> None:
        """Take over what was read."""
        self.rank.load(self._read)
        self._read = {}

    def drop(self) -> None:
        """Forget what was read: rank 0 refuses the checkpoint."""
        self._read = {}

    def restored(self, command: Install, programs: Iterable[StageProgram]) -> dict[str, Tensor]:
        """Optimizer state of parameters that this rank is about to hold and update, as `state/<key>/<name>`.

        Raises:
            CheckpointError: the checkpoint is not there any more, or damaged.
        """
        self.note(programs)
        known, rank = set(command.waiting), self.groups.rank
        names = [
            spec.name
            for program in programs
            for spec in program.parameters
            if spec.trainable
            and spec.name not in self.rank.parameters
            and spec.whole_name in known
            and command.updaters.get(spec.name, rank) == rank
        ]
        if not names:
            return {}
        return self._tensors(Stored.find(Path(command.restored)), weights=(), states=dict.fromkeys(names))

    def _tensors(self, stored: Stored, *, weights: Iterable[str], states: Iterable[str]) -> dict[str, Tensor]:
        # It takes most of a second to import.
        from mmcompile.runtime.checkpoint import dcp

        wanted = wanted_by(self._holdings, stored.index, weights=weights, states=states)
        for piece in wanted.values():
            dcp.read_piece(stored.place, stored.index, piece)
        return {path: piece.tensor() for path, piece in wanted.items()}

    def _pieces(self, command: Save) -> Iterable[Piece]:
        rank = self.groups.rank
        for name, tensor in self.rank.weights(command.names.get(rank, ())).items():
            yield weight_piece(self._holdings[name], tensor)
        for path, tensor in self.rank.optimizer.state(command.names.get(rank, ())).items():
            key, name = path.split("/", 1)
            part = tuple(self.rank.parameters[name].shape)
            if (piece := state_piece(self._holdings[name], key, tensor.detach(), part)) is not None:
                yield piece


def _copied(piece: Piece) -> Piece:
    tensor = piece.tensor()
    if tensor.is_cuda:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
    else:
        copy = tensor.detach().clone()
    return Piece(key=piece.key, dtype=piece.dtype, shape=piece.shape, boxes=piece.boxes, tensor=lambda: copy)


def _store(groups: Groups, number: int) -> dist.Store:
    """The part of the store that belongs to one save, over a connection of its own: no other thread waits on it."""
    return dist.PrefixStore(f"checkpoint/{number}", groups.store.clone())


def balanced(holders: Mapping[str, Iterable[int]], num_bytes: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    """Rank -> names it writes: each name once, by a rank that has it, so that ranks write about the same number of bytes.

    Names that only one rank has are settled first, then the large ones; of equally busy ranks the lowest takes it.
    """
    load: dict[int, int] = {}
    chosen: dict[int, list[str]] = {}
    ranks = {name: sorted(found) for name, found in holders.items()}
    for name in sorted(ranks, key=lambda name: (len(ranks[name]) > 1, -num_bytes[name], name)):
        rank = min(ranks[name], key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + num_bytes[name]
        chosen.setdefault(rank, []).append(name)
    return {rank: tuple(names) for rank, names in sorted(chosen.items())}
