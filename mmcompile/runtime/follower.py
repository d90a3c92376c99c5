"""`Follower`: a rank other than 0. It does what rank 0 announces."""

from __future__ import annotations

from mmcompile.lower.program import StageProgram
from mmcompile.runtime import wire
from mmcompile.runtime.commands import Close, Command, Events, Gather, Install, Load, Setup, Step, hear
from mmcompile.runtime.groups import Groups
from mmcompile.runtime.rank import Rank
from mmcompile.runtime.status import StatusBoard


class Follower:
    """Executes commands one by one."""

    def __init__(self, groups: Groups, board: StatusBoard) -> None:
        setup = hear(groups)
        assert isinstance(setup, Setup), f"the first command must be Setup, got {setup}"
        self._groups = groups
        self.rank = Rank(groups, setup, board)

    def follow(self) -> Command:
        """Wait for the next command, carry it out, and return it."""
        command = hear(self._groups)
        match command:
            case Install():
                programs = wire.decode(wire.receive_bytes(self._groups, 0), tuple[StageProgram, ...])
                self.rank.install(command, programs, wire.receive_tensors(self._groups, 0))
            case Step():
                self.rank.step(command)
            case Gather():
                self._send(command)
            case Events():
                wire.send_bytes(self._groups, 0, wire.encode(self.rank.events()))
            case Load():
                self.rank.load(wire.receive_tensors(self._groups, 0))
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
