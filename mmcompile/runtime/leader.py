"""`Leader`: rank 0's side of every command. It knows which rank holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from mmcompile.lower.program import PatternPrograms, StageProgram
from mmcompile.plan.simulator.simulate import Event
from mmcompile.runtime import wire
from mmcompile.runtime.commands import Command, Events, Gather, Install, Load, Setup, Step, announce
from mmcompile.runtime.groups import Groups
from mmcompile.runtime.metrics import StepTotals
from mmcompile.runtime.rank import Rank, RootValues
from mmcompile.runtime.stages import root_names
from mmcompile.runtime.status import StatusBoard


class Leader:
    """Installs patterns, runs steps, and moves weights and optimizer state between rank 0 and the others."""

    def __init__(self, groups: Groups, setup: Setup, board: StatusBoard) -> None:
        announce(groups, setup)
        self.rank = Rank(groups, setup, board)
        self._groups = groups
        self._stages = setup.stages
        self._holders: dict[str, set[int]] = {}
        """Parameter or buffer -> placed stages that hold it, by index."""
        self._trainable: set[str] = set()
        self.aliases: dict[str, str] = {}
        """Other name of a tied parameter -> the name it is held under."""
        self._installed: set[tuple[str, str]] = set()
        self._reads: dict[tuple[str, str, int], dict[int, frozenset[str]]] = {}
        self._waiting: dict[str, Tensor] = {}
        """Optimizer state loaded for parameters that no rank holds yet, as `<key>/<name>`."""

    def knows(self, pattern: str, tower: str) -> bool:
        """True if the stages of a tower were installed in a pattern."""
        return (pattern, tower) in self._installed

    def reads(self, pattern: str, tower: str, replica: int) -> Mapping[int, frozenset[str]]:
        """Rank -> batch inputs that its stages of a replica of a tower read, in an installed pattern."""
        return self._reads.get((pattern, tower, replica), {})

    def install(self, programs: PatternPrograms, tower: str, values: Mapping[str, Tensor]) -> None:
        """Send every rank its stages of a tower in a new pattern, with the tensors it lacks.

        Args:
            values: all parameters and buffers of the model. A parameter that another rank already trains is taken from
                there, optimizer state too.
        """
        placed = self._placed(programs, tower)
        by_rank = self._by_rank(placed)
        lacking = {rank: self._lacking(rank, mine) for rank, mine in by_rank.items()}
        trained = self._trained({name for names in lacking.values() for name in names})
        self._note(programs.pattern, tower, placed)
        announce(
            self._groups, command := Install(pattern=programs.pattern, tower=tower, holders=self._trainable_holders())
        )
        for rank in range(self._groups.world_size):
            mine = by_rank.get(rank, ())
            tensors = _tensors(mine, lacking.get(rank, ()), values, trained)
            if rank == 0:
                self.rank.install(command, mine, tensors)
            else:
                wire.send_bytes(self._groups, rank, wire.encode([replace(program, constants={}) for program in mine]))
                wire.send_tensors(self._groups, rank, tensors)

    def step(self, command: Step, roots: RootValues) -> StepTotals:
        """Run a step; returns what `Rank.step` returns."""
        announce(self._groups, command)
        return self.rank.step(command, roots)

    def weights(self) -> dict[str, Tensor]:
        """Current values of all trainable parameters held by any rank, as CPU copies. No other parameter changes."""
        return self._gather("weights", self._trainable & self._holders.keys())

    def optimizer_state(self) -> dict[str, Tensor]:
        """All optimizer state as `<key>/<name>`, as CPU copies."""
        return {**self._waiting, **self._gather("optimizer", self._trainable & self._holders.keys())}

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Give every holder its trainable weights and optimizer state; state of parameters not held yet waits for its rank."""
        self._waiting = {path: t for path, t in state.items() if _parameter_of(path) not in self._holders}
        announce(self._groups, Load())
        for rank in range(self._groups.world_size):
            held = {name for name in self._trainable if rank in self._ranks(name)}
            tensors = {f"value/{name}": weights[name] for name in held}
            tensors |= {f"state/{path}": t for path, t in state.items() if _parameter_of(path) in held}
            if rank == 0:
                self.rank.load(tensors)
            else:
                wire.send_tensors(self._groups, rank, tensors)

    def events(self) -> list[Event]:
        """Measured actions of the last step of all ranks."""
        announce(self._groups, Events())
        events = list(self.rank.events())
        for rank in range(1, self._groups.world_size):
            events += wire.decode(wire.receive_bytes(self._groups, rank), list[Event])
        return events

    def tell(self, command: Command) -> None:
        """Announce a command that moves no tensors, and wait until all have heard it."""
        announce(self._groups, command)
        self._groups.flush()

    def _gather(self, what: Literal["weights", "optimizer"], wanted: Iterable[str]) -> dict[str, Tensor]:
        names: dict[int, tuple[str, ...]] = {}
        for name in sorted(wanted):
            holder = min(self._ranks(name))
            names[holder] = (*names.get(holder, ()), name)
        announce(self._groups, Gather(what=what, names=names))
        own = names.get(0, ())
        mine = self.rank.weights(own) if what == "weights" else self.rank.optimizer.state(own)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in mine.items()}
        for rank in range(1, self._groups.world_size):
            tensors |= wire.receive_tensors(self._groups, rank)
        return tensors

    def _placed(self, programs: PatternPrograms, tower: str) -> dict[int, StageProgram]:
        """Placed stages of a tower, by index, that have a program."""
        return {
            index: programs.programs[stage.program_name]
            for index, stage in enumerate(self._stages)
            if stage.tower == tower and stage.program_name in programs.programs
        }

    def _by_rank(self, placed: Mapping[int, StageProgram]) -> dict[int, tuple[StageProgram, ...]]:
        """Programs of each rank; once where it holds several replicas."""
        by_rank: dict[int, dict[str, StageProgram]] = {}
        for index, program in placed.items():
            by_rank.setdefault(self._stages[index].ranks[0], {})[program.stage] = program
        return {rank: tuple(mine.values()) for rank, mine in by_rank.items()}

    def _ranks(self, name: str) -> set[int]:
        """Ranks that hold a parameter or buffer."""
        return {self._stages[index].ranks[0] for index in self._holders.get(name, ())}

    def _lacking(self, rank: int, programs: Sequence[StageProgram]) -> tuple[str, ...]:
        """Parameters and buffers that a rank's programs read and it does not hold."""
        names = [name for program in programs for name in _read(program)]
        return tuple(name for name in dict.fromkeys(names) if rank not in self._ranks(name))

    def _trained(self, names: set[str]) -> dict[str, dict[str, Tensor]]:
        """What a first or further holder of a parameter needs besides the model's value, by parameter, then by path.

        The current value and optimizer state if a rank trains it already, or loaded state that waited for a holder.
        """
        found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        held = sorted(names & self._trainable & self._holders.keys())
        if held:
            for name, tensor in self._gather("weights", held).items():
                found[name][f"value/{name}"] = tensor
            for path, tensor in self._gather("optimizer", held).items():
                found[_parameter_of(path)][f"state/{path}"] = tensor
        for path in [path for path in self._waiting if _parameter_of(path) in names]:
            found[_parameter_of(path)][f"state/{path}"] = self._waiting.pop(path)
        return found

    def _note(self, pattern: str, tower: str, placed: Mapping[int, StageProgram]) -> None:
        """Remember what is held where, who reads which batch input of a pattern, what trains, and tied names."""
        self._installed.add((pattern, tower))
        for index, program in placed.items():
            stage = self._stages[index]
            reads = self._reads.setdefault((pattern, tower, stage.replica), {})
            reads[stage.ranks[0]] = reads.get(stage.ranks[0], frozenset()) | root_names(program)
            for name in _read(program):
                self._holders.setdefault(name, set()).add(index)
            for spec in program.parameters:
                if spec.trainable:
                    self._trainable.add(spec.name)
                self.aliases |= dict.fromkeys(spec.aliases, spec.name)

    def _trainable_holders(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(sorted(stages)) for name, stages in sorted(self._holders.items()) if name in self._trainable
        }


def _read(program: StageProgram) -> Iterable[str]:
    """Parameters and buffers of a program."""
    return (*(spec.name for spec in program.parameters), *program.buffers)


def _tensors(
    programs: Sequence[StageProgram],
    lacking: Sequence[str],
    values: Mapping[str, Tensor],
    trained: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Everything `Rank.install` wants, by path."""
    tensors = {f"value/{name}": values[name] for name in lacking}
    for name in lacking:
        tensors |= trained[name]
    for program in programs:
        tensors |= {f"constant/{program.stage}/{name}": tensor for name, tensor in program.constants.items()}
    return tensors


def _parameter_of(path: str) -> str:
    """`exp_avg/model.norm.weight` -> `model.norm.weight`."""
    return path.split("/", 1)[1]
