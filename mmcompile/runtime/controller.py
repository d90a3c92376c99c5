"""`Controller`: sends rank 0's commands to all ranks, and records which rank holds which parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from mmcompile.batching.step_planner import PlannedStep
from mmcompile.codegen.program import PatternPrograms, StageProgram
from mmcompile.ir.graph import torch_dtype
from mmcompile.planner.schedule.simulate import Event
from mmcompile.runtime.checkpoint.index import state_key, weight_key
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece, whole_piece
from mmcompile.runtime.checkpoint.rank_checkpoints import balanced
from mmcompile.runtime.checkpoint.restored import Restored
from mmcompile.runtime.checkpoint.saving import SaveOrder, Saving, WholeJob
from mmcompile.runtime.checkpoint.trainer_state import Stored
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.commands import (
    COMMANDS,
    ApplyCheckpoint,
    Command,
    Gather,
    Install,
    LoadCheckpoint,
    SaveCheckpoint,
    SendEvents,
    Setup,
    Step,
)
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.optimizer import Hyper, parameter_of
from mmcompile.runtime.optim.sharded_optimizer import assign_updaters
from mmcompile.runtime.optim.tensor_parts import TensorParts
from mmcompile.runtime.worker import Worker


class Controller:
    """Leads all ranks from rank 0: sends them stage programs, runs steps, moves weights to and from rank 0, saves and loads.

    Args:
        check_saving: function called while the user waits for a save; an exception it raises ends the wait.
    """

    def __init__(
        self, groups: Groups, setup: Setup, board: StatusBoard, check_saving: Callable[[], None] = lambda: None
    ) -> None:
        wire.announce(groups, setup, COMMANDS)
        self.worker = Worker(groups, setup, board, check_saving=check_saving)
        self._num_saves = 0
        self._groups = groups
        self._stages = setup.stages
        self._holders: dict[str, set[int]] = {}
        """Indices of the placed stages that hold each parameter or buffer, by name."""
        self._changed: set[str] = set()
        """Names of the buffers that stages change in their forward."""
        self._trainable: set[str] = set()
        self._sharded = setup.shard_optimizer
        self._num_bytes: dict[str, int] = {}
        """Size of each trainable parameter in bytes, by name."""
        self._updaters: dict[str, int] = {}
        """Rank that updates each trainable parameter, by name, if the optimizer is sharded; else empty."""
        self._parts = TensorParts()
        self.aliases: dict[str, str] = {}
        """Name under which ranks hold a tied parameter, by each of its other names."""
        self._installed: set[tuple[str, str]] = set()
        self._waiting: dict[str, Tensor] = {}
        """Optimizer state (`<key>/<name>`) given for parameters that no rank holds yet."""
        self._restored = Restored()
        """Optimizer state in a checkpoint of parameters that no rank holds yet; ranks read it themselves once they do."""

    def step(
        self, planned: PlannedStep, parameters: Mapping[str, Tensor], *, hyper: Hyper, seed: int, trace: bool = False
    ) -> StepTotals:
        """Send ranks the stage programs that no earlier step needed, run the step on all ranks, and return its totals.

        Args:
            parameters: all parameters and buffers of the model.
            hyper, seed, trace: as in `Step`.
        """
        self.install_for(planned, parameters)
        command = Step(plan=planned.plan, hyper=hyper, seed=seed, trace=trace)
        self._announce(command)
        return self.worker.step(command, [prepared.values for prepared in planned.prepared])

    def install_for(self, planned: PlannedStep, parameters: Mapping[str, Tensor]) -> None:
        """Send ranks the stage programs of a step that they lack; `parameters`: all parameters and buffers of the model."""
        for microbatch, prepared in zip(planned.plan.microbatches, planned.prepared, strict=True):
            if (microbatch.pattern, microbatch.tower) not in self._installed:
                self.install(prepared.programs, microbatch.tower, parameters)

    def install(self, programs: PatternPrograms, tower: str, values: Mapping[str, Tensor]) -> None:
        """Send every rank the programs of its stages, with their constants and the parameters and buffers that the rank lacks.

        Args:
            programs: stage programs of one pattern, a capture of the model for one kind of batch.
            tower: balance group (stages that all compute the same samples) whose programs are sent.
            values: all parameters and buffers of the model. For a parameter that another rank already trains, that rank's value
                and optimizer state are used.
        """
        placed = self._placed(programs, tower)
        for program in placed.values():
            for spec in program.parameters:
                self._parts.note(spec)
        by_rank = self._by_rank(placed)
        lacking = {rank: self._lacking(rank, mine) for rank, mine in by_rank.items()}
        trained = self._trained({name for names in lacking.values() for name in names})
        self._note(programs.pattern, tower, placed)
        names = {self._parts.whole_name(name) for names in lacking.values() for name in names}
        waiting, saving = self._restored.take(names), self.worker.checkpoints.saving
        if waiting and saving is not None:
            # It may just be replacing the folder that is read from.
            saving.settle()
        command = Install(
            pattern=programs.pattern,
            tower=tower,
            holders={n: tuple(sorted(at)) for n, at in sorted(self._holders.items()) if n in self._trainable},
            updaters=self._updaters,
            restored=str(self._restored.folder) if waiting else "",
            waiting=waiting,
        )
        self._announce(command)
        for rank in range(self._groups.world_size):
            mine = by_rank.get(rank, ())
            tensors = _tensors(mine, lacking.get(rank, ()), values, self._kept(rank, trained), self._parts)
            if rank == 0:
                self.worker.install(command, mine, tensors)
            else:
                wire.send_bytes(self._groups, rank, wire.encode([replace(program, constants={}) for program in mine]))
                wire.send_tensors(self._groups, rank, tensors)

    def await_holders(self, state: Mapping[str, Tensor]) -> None:
        """Keep the initial optimizer state of parameters, until an `install` first gives them to ranks, together with this state.

        Args:
            state: tensors by `<key>/<parameter>`, such as `master/lm_head.weight`. No rank may hold these parameters yet.
        """
        self._waiting |= state

    def weights(self) -> dict[str, Tensor]:
        """Return CPU copies of the current values of trainable parameters and changed buffers that ranks hold, by original name.

        Of a buffer that replicas change, the value is that of the lowest rank, as in torch's DDP.
        """
        return self._parts.joined(self._gather("weights", self._trainable & self._holders.keys() | self._changed))

    def save(self, order: SaveOrder, values: Mapping[str, Tensor]) -> Saving:
        """Start a save on all ranks, and return it.

        Args:
            values: all parameters that train, each under its first name; used for those that no rank holds yet.
        """
        self._num_saves += 1
        held = self._trainable & self._holders.keys()
        owners = {name: {self._updaters[name]} if name in self._updaters else self._ranks(name) for name in held}
        command = SaveCheckpoint(
            folder=str(order.fresh),
            number=self._num_saves,
            step=order.trainer.step,
            copies=order.copies,
            names=balanced(owners, self._num_bytes),
        )
        buffers = self._gather("weights", self._changed) if self._changed else {}
        self._announce(command)
        known = {order.tied.get(name, name) for name in self._held_names()}
        absent = {name: tensor for name, tensor in values.items() if name not in known} | buffers
        part = self.worker.part(command, lambda: self._not_held(absent))
        job = WholeJob(order=order, part=part, num_ranks=self._groups.world_size, restored=self._restored)
        return self.worker.checkpoints.begin(order.trainer.step, job.run)

    def read(self, stored: Stored) -> str:
        """Make every rank read its tensors from a checkpoint into memory, without changing weights or optimizer state.

        Returns:
            "", or the error of the lowest rank that could not read.
        """
        self._announce(LoadCheckpoint(folder=str(stored.folder)))
        failures = [self.worker.checkpoints.read(str(stored.folder))]
        failures += (wire.receive_bytes(self._groups, rank).decode() for rank in range(1, self._groups.world_size))
        return next((f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure), "")

    def apply(self, stored: Stored) -> None:
        """Make every rank apply the tensors it read. Optimizer state of parameters that no rank holds stays in the checkpoint."""
        self._announce(ApplyCheckpoint())
        self.worker.load(self.worker.checkpoints.take())
        known = {stored.index.name_of(name) for name in self._held_names()}
        self._waiting = {}
        names = stored.index.states().keys() - known
        self._restored = Restored(folder=stored.folder, names=names, index=stored.index)

    def events(self) -> list[Event]:
        """Return the measured actions of all ranks in the last step."""
        self._announce(SendEvents())
        events = list(self.worker.events)
        for rank in range(1, self._groups.world_size):
            events += wire.decode(wire.receive_bytes(self._groups, rank), list[Event])
        return events

    def tell(self, command: Command) -> None:
        """Announce a command that moves no tensors, and wait until all ranks have received it."""
        self._announce(command)
        self._groups.flush()

    def _gather(self, what: Literal["weights", "optimizer"], wanted: Iterable[str]) -> dict[str, Tensor]:
        names: dict[int, tuple[str, ...]] = {}
        for name in sorted(wanted):
            holder = self._updaters.get(name, min(self._ranks(name)))
            names[holder] = (*names.get(holder, ()), name)
        command = Gather(what=what, names=names)
        self._announce(command)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.worker.gathered(command).items()}
        for rank in range(1, self._groups.world_size):
            tensors |= wire.receive_tensors(self._groups, rank)
        return tensors

    def _announce(self, command: Command) -> None:
        wire.announce(self._groups, command, COMMANDS)

    def _placed(self, programs: PatternPrograms, tower: str) -> dict[int, StageProgram]:
        found: dict[int, StageProgram] = {}
        for index, stage in enumerate(self._stages):
            if stage.tower == tower and stage.program_name in programs.programs:
                program = programs.programs[stage.program_name]
                found[index] = program.of_replica(stage.replica) if stage.sharing else program
        return found

    def _by_rank(self, placed: Mapping[int, StageProgram]) -> dict[int, tuple[StageProgram, ...]]:
        by_rank: dict[int, dict[str, StageProgram]] = {}
        for index, program in placed.items():
            by_rank.setdefault(self._stages[index].ranks[0], {})[program.stage] = program
        return {rank: tuple(mine.values()) for rank, mine in by_rank.items()}

    def _ranks(self, name: str) -> set[int]:
        return {self._stages[index].ranks[0] for index in self._holders.get(name, ())}

    def _lacking(self, rank: int, programs: Sequence[StageProgram]) -> tuple[str, ...]:
        names = [name for program in programs for name in _read(program)]
        return tuple(name for name in dict.fromkeys(names) if rank not in self._ranks(name))

    def _trained(self, names: set[str]) -> dict[str, dict[str, Tensor]]:
        """Return current tensors of the parameters `names`: name -> `value/<name>` or `state/<key>/<name>` -> tensor.

        A trainable parameter that a rank holds has its value and, unless the optimizer is sharded, its optimizer state. One that
        no rank holds has only optimizer state that was given to `await_holders`, if any.
        """
        found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        held = sorted(names & self._trainable & self._holders.keys())
        if held:
            for name, tensor in self._gather("weights", held).items():
                found[name][f"value/{name}"] = tensor
            # Of a sharded optimizer it stays where it is.
            for path, tensor in ({} if self._sharded else self._gather("optimizer", held)).items():
                found[parameter_of(path)][f"state/{path}"] = tensor
        held = {name: self._parts.whole_name(name) for name in names}
        for path in [path for path in self._waiting if parameter_of(path) in held.values()]:
            (key, waiting), tensor = path.split("/", 1), self._waiting.pop(path)
            for name in (name for name, whole in held.items() if whole == waiting):
                found[name][f"state/{key}/{name}"] = self._parts.part_of_state(name, tensor)
        return found

    def _note(self, pattern: str, tower: str, placed: Mapping[int, StageProgram]) -> None:
        self._installed.add((pattern, tower))
        for index, program in placed.items():
            for name in _read(program):
                self._holders.setdefault(name, set()).add(index)
            self._changed.update(program.changed)
            for spec in program.parameters:
                if spec.trainable:
                    self._trainable.add(spec.name)
                    self._num_bytes[spec.name] = math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
                self.aliases |= dict.fromkeys(spec.aliases, spec.whole_name)

        if self._sharded:
            owners = {name: self._ranks(name) for name in self._trainable}
            self._updaters = assign_updaters(owners, self._num_bytes, self._updaters)

    def _held_names(self) -> set[str]:
        return {self._parts.whole_name(name) for name in self._trainable & self._holders.keys()}

    def _not_held(self, values: Mapping[str, Tensor]) -> list[CheckpointPiece]:
        """Return checkpoint pieces of parameters that no rank holds yet: weights from `values` (by name), and optimizer state."""
        pieces = [whole_piece(weight_key(name), tensor.detach()) for name, tensor in values.items()]
        for path, tensor in self._waiting.items():
            key, name = path.split("/", 1)
            if name in values:
                pieces.append(whole_piece(state_key(name, key), tensor))
        return pieces + self._restored.pieces()

    def _kept(self, rank: int, trained: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
        # A rank has no use for optimizer state of parameters that it does not update.
        return {
            name: {
                path: tensor
                for path, tensor in tensors.items()
                if self._updaters.get(name, rank) == rank or not path.startswith("state/")
            }
            for name, tensors in trained.items()
        }


def _read(program: StageProgram) -> Iterable[str]:
    return (*(spec.name for spec in program.parameters), *program.buffers)


def _tensors(
    programs: Sequence[StageProgram],
    lacking: Sequence[str],
    values: Mapping[str, Tensor],
    trained: Mapping[str, Mapping[str, Tensor]],
    parts: TensorParts,
) -> dict[str, Tensor]:
    """Return the tensors that `Worker.install` needs on a rank, by path: constants, and parameters and buffers it lacks.

    Args:
        lacking: names of parameters and buffers that `programs` read and the rank does not hold.
        values: the model's initial tensors, by name.
        trained: current values and optimizer states that replace them, by parameter and path.
    """
    tensors = {f"value/{name}": parts.part(name, values[parts.whole_name(name)]) for name in lacking}
    for name in lacking:
        tensors |= trained[name]
    for program in programs:
        tensors |= {f"constant/{program.stage}/{name}": tensor for name, tensor in program.constants.items()}
    return tensors
