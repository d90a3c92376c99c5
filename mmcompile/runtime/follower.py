"""`Follower`: a rank other than 0. It does what rank 0 announces."""

from __future__ import annotations

from collections.abc import Callable

from mmcompile.codegen.program import StageProgram
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.commands import (
    Apply,
    Close,
    Command,
    Events,
    Gather,
    Install,
    Load,
    Refuse,
    Save,
    Setup,
    Step,
    hear,
)
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.rank import Rank
from mmcompile.runtime.rank_checkpoints import RankCheckpoints


class Follower:
    """Executes commands one by one.

    Args:
        check: called while the user waits for a save; what it raises ends the wait.
    """

    def __init__(self, groups: Groups, board: StatusBoard, check: Callable[[], None] = lambda: None) -> None:
        setup = hear(groups)
        assert isinstance(setup, Setup), f"the first command must be Setup, got {setup}"
        self._groups = groups
        self.rank = Rank(groups, setup, board)
        self.checkpoints = RankCheckpoints(rank=self.rank, groups=groups, check=check)

    def follow(self) -> Command:
        """Wait for the next command, carry it out, and return it."""
        command = hear(self._groups)
        match command:
            case Install():
                programs = wire.decode(wire.receive_bytes(self._groups, 0), tuple[StageProgram, ...])
                tensors = wire.receive_tensors(self._groups, 0)
                tensors |= self.checkpoints.restored(command, programs)
                self.rank.install(command, programs, tensors)
            case Step():
                self.rank.step(command)
            case Gather():
                self._send(command)
            case Events():
                wire.send_bytes(self._groups, 0, wire.encode(self.rank.events()))
            case Save():
                part = self.checkpoints.part(command)
                self.checkpoints.begin(command.step, part.run)
            case Load():
                wire.send_bytes(self._groups, 0, self.checkpoints.read(command.folder).encode())
            case Apply():
                self.checkpoints.apply()
            case Refuse():
                self.checkpoints.drop()
            case _:
                pass
        return command

    def serve(self) -> None:
        """Follow until rank 0 closes the engine."""
        while not isinstance(self.follow(), Close):
            pass

    def _send(self, command: Gather) -> None:
        names = command.names.get(self._groups.rank, ())
        tensors = self.rank.weights(names) if command.what == "weights" else self.rank.optimizer.state(names)
        wire.send_tensors(self._groups, 0, tensors)
