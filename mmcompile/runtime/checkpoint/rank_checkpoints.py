"""`RankCheckpoints`: one rank's part of saves and loads."""

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
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, Holding, state_piece, wanted_by, weight_piece
from mmcompile.runtime.checkpoint.saving import PartJob, Saving
from mmcompile.runtime.checkpoint.trainer_state import Stored, TrainerState
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.optim.optimizer import RankState


@dataclass(kw_only=True, slots=True)
class RankCheckpoints:
    """The checkpoints of one rank."""

    state: RankState
    """Parameters and optimizer of the rank."""
    groups: Groups
    check: Callable[[], None] = lambda: None
    """Called while the user waits for a save; what it raises ends the wait."""
    saving: Saving | None = None
    """The last save."""
    trainer: TrainerState | None = None
    """State of training in the checkpoint that was loaded last."""
    data: object = None
    """State of the user's data in that checkpoint."""
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _read: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by path, for `take`."""

    def note(self, programs: Iterable[StageProgram]) -> None:
        """Learn what parameters are, by the programs that read them."""
        for program in programs:
            for spec in program.parameters:
                self._holdings[spec.name] = Holding.of(spec)

    def part(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        number: int,
        step: int,
        copies: bool,
        more: Callable[[], Sequence[CheckpointPiece]] = tuple,
    ) -> PartJob:
        """Return what this rank writes in a save.

        Args:
            folder: to write to; all ranks see it.
            names: of parameters that this rank writes, with their optimizer state.
            number: of saves so far.
            step: updates so far.
            copies: write copies made now, since training continues meanwhile.
            more: makes further pieces. Raises CheckpointError.
        """
        try:
            pieces, refused = [*self._pieces(names), *more()], ""
            if copies:
                pieces = [_copied(piece) if piece.trains else piece for piece in pieces]
                if self.groups.device.type == "cuda":
                    torch.cuda.synchronize(self.groups.device)
        except CheckpointError as error:
            pieces, refused = [], str(error)
        return PartJob(
            folder=folder,
            rank=self.groups.rank,
            step=step,
            pieces=pieces,
            refused=refused,
            store=_store(self.groups, number),
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
            held = self.state.trainable.keys()
            self._read = self._tensors(stored, weights=held, states=held & self.state.optimizer.updated.keys())
            self.trainer, self.data = stored.trainer, stored.data()
        except CheckpointError as error:
            self._read = {}
            return str(error)
        return ""

    def take(self) -> dict[str, Tensor]:
        """Return what was read, by path; it is forgotten here."""
        found, self._read = self._read, {}
        return found

    def restored(
        self, folder: str, waiting: Iterable[str], updaters: Mapping[str, int], programs: Sequence[StageProgram]
    ) -> dict[str, Tensor]:
        """Return optimizer state of parameters that this rank is about to hold and update, as `state/<key>/<name>`.

        Args:
            folder: of the checkpoint.
            waiting: original names of the parameters whose state is there.
            updaters: the rank that updates a parameter, where not all that hold it do.
            programs: that this rank is about to run.

        Raises:
            CheckpointError: the checkpoint is not there any more, or damaged.
        """
        self.note(programs)
        known, rank = set(waiting), self.groups.rank
        names = [
            spec.name
            for program in programs
            for spec in program.parameters
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
    return CheckpointPiece(key=piece.key, dtype=piece.dtype, shape=piece.shape, boxes=piece.boxes, tensor=lambda: copy)


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
