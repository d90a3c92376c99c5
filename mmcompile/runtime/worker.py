"""`Worker`: one rank of an engine: the stages, tensors and optimizer that it holds, and its execution of each command."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from mmcompile.batching.step_plan import PROTOCOL_VERSION, MicrobatchPlan, StepPlan
from mmcompile.codegen.program import StageProgram
from mmcompile.errors import EngineError, VerifyError
from mmcompile.kernels.process_groups import CONTEXT_GROUP, REPLICA_GROUP, TENSOR_GROUP, register_group
from mmcompile.planner.schedule.schedule import Action, parse_actions
from mmcompile.planner.schedule.simulate import Event
from mmcompile.runtime.checkpoint.pieces import CheckpointPiece
from mmcompile.runtime.checkpoint.rank_checkpoints import RankCheckpoints
from mmcompile.runtime.checkpoint.saving import PartJob
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.commands import (
    COMMANDS,
    ApplyCheckpoint,
    CloseEngine,
    Command,
    Gather,
    Install,
    LoadCheckpoint,
    Refuse,
    SaveCheckpoint,
    SendEvents,
    Setup,
    Step,
)
from mmcompile.runtime.executor.executor import Executor, num_backwards
from mmcompile.runtime.executor.loaded_stage import LoadedStage, Stages
from mmcompile.runtime.executor.p2p import P2P
from mmcompile.runtime.executor.totals import OwnTotals, add_up
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.arithmetic import arithmetic_of
from mmcompile.runtime.optim.gradients import CarriedSums, GradientSums
from mmcompile.runtime.optim.optimizer import RankOptimizer, RankState, parameter_of
from mmcompile.runtime.optim.rank_gradients import RankGradients

_parsed = functools.lru_cache(maxsize=4)(parse_actions)  # Successive steps often have the same actions.


class Worker:
    """Holds stages, tensors and optimizer of one rank, and executes rank 0's commands.

    Rank 0 has a worker beside its `Controller`.

    Args:
        state: parameters, buffers and optimizer that the rank already holds; None to start without any.
        check: called before every action of a step; an exception it raises ends the step.
        check_saving: called while the user waits for a save; an exception it raises ends the wait.
    """

    def __init__(
        self,
        groups: Groups,
        setup: Setup,
        board: StatusBoard,
        *,
        state: RankState | None = None,
        check: Callable[[], None] = lambda: None,
        check_saving: Callable[[], None] = lambda: None,
    ) -> None:
        if groups.device.type == "cuda":
            torch.cuda.set_device(groups.device)
        mine = [stage for stage in setup.stages if stage.ranks[0] == groups.rank]
        self.state = state or RankState(optimizer=RankOptimizer(setup.optimizer))
        self.checkpoints = RankCheckpoints(state=self.state, groups=groups, check=check_saving)
        self.last: tuple[StepPlan, StepTotals] | None = None
        """Plan and totals of the last step; None before the first."""
        self.events: list[Event] = []
        """Measured actions of the last step, if it was traced."""
        self._groups = groups
        self._setup = setup
        self._board = board
        self._check = check
        self._gradients = RankGradients(groups, setup.stages, self.state, setup.reduction)
        self._stage_at = {(s.tower, s.replica, s.program_name): index for index, s in enumerate(setup.stages)}
        """Index of a placed stage, by (balance group, replica, name of its program)."""
        self._patterns: dict[tuple[str, str], dict[int, LoadedStage]] = {}
        """(pattern, balance group) as in `Install` -> index of a placed stage -> this stage, loaded on this rank."""
        self._op_groups = {
            name: groups.shards(ranks)
            for name, ranks in (
                (CONTEXT_GROUP, _only_group(stage.token_group for stage in mine)),
                (TENSOR_GROUP, _only_group(stage.tensor_group for stage in mine)),
                (REPLICA_GROUP, _only_group(stage.sharing for stage in mine)),
            )
            if ranks
        }
        """Process groups that ops of this rank's stages use, by name."""
        self._shard = max((stage.shard for stage in mine if stage.depth == 0), default=0)
        """Number of this rank's shard of the loss stage."""
        self._num_shards = max(1, *(len(stage.group) for stage in setup.stages))
        # Of the loss of a stage that shares its tensors, all shards have the whole.
        self._counts_loss = not any(stage.repeats and stage.depth == 0 for stage in mine)

    @classmethod
    def join(cls, groups: Groups, board: StatusBoard, check_saving: Callable[[], None] = lambda: None) -> Self:
        """Wait for rank 0's `Setup` command, and return the worker of this rank, which is not 0."""
        setup = wire.hear(groups, COMMANDS)
        assert isinstance(setup, Setup), f"the first command must be Setup, got {setup}"
        if setup.version != PROTOCOL_VERSION:
            raise EngineError(
                f"rank {groups.rank} runs protocol {PROTOCOL_VERSION}, rank 0 runs {setup.version}: install one version "
                "everywhere"
            )
        return cls(groups, setup, board, check_saving=check_saving)

    def follow(self) -> Command:
        """Wait for rank 0's next command, execute it, and return it. Called on all ranks but rank 0."""
        command = wire.hear(self._groups, COMMANDS)
        match command:
            case Install():
                programs = wire.decode(wire.receive_bytes(self._groups, 0), tuple[StageProgram, ...])
                self.install(command, programs, wire.receive_tensors(self._groups, 0))
            case Step():
                self.step(command)
            case Gather():
                wire.send_tensors(self._groups, 0, self.gathered(command))
            case SendEvents():
                wire.send_bytes(self._groups, 0, wire.encode(self.events))
            case SaveCheckpoint():
                self.checkpoints.begin(command.step, self.part(command).run)
            case LoadCheckpoint():
                wire.send_bytes(self._groups, 0, self.checkpoints.read(command.folder).encode())
            case ApplyCheckpoint():
                self.load(self.checkpoints.take())
            case Refuse():
                self.checkpoints.take()
            case _:
                pass
        return command

    def serve(self) -> None:
        """Execute rank 0's commands until it closes the engine."""
        while not isinstance(self.follow(), CloseEngine):
            pass

    def install(self, command: Install, programs: Sequence[StageProgram], tensors: Mapping[str, Tensor]) -> None:
        """Load stage programs on this rank, each for every replica of its stage that the rank runs.

        Args:
            programs: stage programs of this rank.
            tensors: by path: `value/<name>` for parameters and buffers this rank lacks, `state/<key>/<name>` for their optimizer
                state, `constant/<stage>/<name>` for constants.
        """
        restored = self.checkpoints.restored(command.restored, command.waiting, command.updaters, programs)
        self._gradients.hold(command.holders, command.updaters)
        self._keep(programs, wire.under("value/", tensors))
        states = wire.under("state/", {**tensors, **restored})
        updates = self._gradients.updates
        self.state.optimizer.load_state({path: t for path, t in states.items() if updates(parameter_of(path))})
        device, stages = self._groups.device, self._setup.stages
        mine = [(i, placed) for i, placed in enumerate(stages) if placed.ranks[0] == self._groups.rank]
        loaded: dict[int, LoadedStage] = {}
        for program in programs:
            constants = {n: t.to(device) for n, t in wire.under(f"constant/{program.stage}/", tensors).items()}
            for index in [i for i, at in mine if (at.tower, at.program_name) == (command.tower, program.stage)]:
                loaded[index] = LoadedStage.load(
                    replace(program, constants=constants),
                    self.state.tensors,
                    stages,
                    index,
                    device=device,
                    compiled=self._setup.compiled,
                )
        self._patterns[command.pattern, command.tower] = loaded

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite weights (`value/<name>`) and optimizer state (`state/<key>/<name>`) of this rank, and drop all gradients."""
        self._gradients.settle()
        self._gradients.drop()
        optimizer = self.state.optimizer
        with torch.no_grad():
            held = self.state.tensors
            for name, value in wire.under("value/", tensors).items():
                held[name].copy_(value)
        optimizer.forget(optimizer.updated)
        optimizer.load_state(wire.under("state/", tensors))

    def part(self, command: SaveCheckpoint, more: Callable[[], Sequence[CheckpointPiece]] = tuple) -> PartJob:
        """Return the job that writes this rank's part of a checkpoint.

        Args:
            more: on rank 0, returns the pieces of parameters that no rank holds; it may raise CheckpointError.
        """
        self._gradients.settle()
        return self.checkpoints.part(command, more)

    def gathered(self, command: Gather) -> dict[str, Tensor]:
        """Return the parameters, or the optimizer state, that a command names for this rank, without copying."""
        names = command.names.get(self._groups.rank, ())
        if command.what == "optimizer":
            return self.state.optimizer.state(names)
        self._gradients.settle()
        held = self.state.tensors
        return {name: held[name].detach() for name in names}

    def step(self, command: Step, values: Sequence[Mapping[str, Tensor]] = ()) -> StepTotals:
        """Run this rank's part of a step, `compute` and, if parameters are to be updated, `apply`; return the totals."""
        totals = self.compute(command, values)
        if command.plan.update:
            self.apply(totals)
        return totals

    def compute(self, command: Step, values: Sequence[Mapping[str, Tensor]] = ()) -> StepTotals:
        """Run forwards and backwards, sum gradients over ranks if an update follows, and return the totals.

        Parameters are unchanged.

        Args:
            values: on rank 0, per microbatch the batch inputs by name; () on other ranks.

        Raises:
            EngineError: on all ranks, if there are gradients that the reduction cannot add.
        """
        plan, stages = command.plan, self._setup.stages
        self._gradients.settle()
        self.state.optimizer.hyper = command.hyper
        loaded = [self._loaded(microbatch) for microbatch in plan.microbatches]
        ran = [self._stage_at[m.tower, m.replica, stage] for m in plan.microbatches for stage in m.flow.backward]
        sums = self._gradients.begin(ran, num_backwards(plan, loaded), update=plan.update)
        actions = _parsed(plan.actions[self._groups.rank]) if self._groups.rank < len(plan.actions) else ()
        p2p = P2P(self._groups, plan, stages, loaded, actions, values=values, check_rows=self._setup.check_rows)
        result = self._execute(command, loaded, actions, p2p, sums)
        faults = sums.finish(plan.step)
        self._gradients.weigh(plan.total_weight, update=plan.update)
        totals = self._totals(plan, result, faults)
        # All have reported, so all have what was sent to them. Not asked for before: see `Groups.broadcast`.
        p2p.finish()
        if plan.num_tokens and totals.num_tokens != plan.num_tokens:
            raise VerifyError(
                f"step {plan.step} was planned with {plan.num_tokens} valid tokens, its loss stages counted {totals.num_tokens}"
            )
        self.last = plan, totals
        return totals

    def apply(self, totals: StepTotals) -> None:
        """Clip gradients and update parameters. Messages are sent only if other ranks hold parameters that this rank updates.

        Args:
            totals: totals returned by `compute`.
        """
        if self._setup.clip_norm is not None:
            assert totals.squared_norm is not None, "a norm that is clipped was not asked for"
            self._gradients.clip(totals.squared_norm, self._setup.clip_norm)
        assert self.last is not None, "no step was computed"
        fail_point("optimizer", rank=self._groups.rank, step=self.last[0].step)
        self.state.optimizer.step()
        self._gradients.publish()
        self._gradients.drop()

    def _keep(self, programs: Sequence[StageProgram], values: Mapping[str, Tensor]) -> None:
        parameters, buffers = self.state.parameters, self.state.buffers
        for program in programs:
            for spec in program.parameters:
                if spec.name not in parameters:
                    value = values[spec.name].to(self._groups.device, copy=True)
                    parameters[spec.name] = nn.Parameter(value, requires_grad=spec.trainable)
                    if spec.trainable and self._gradients.updates(spec.name):
                        self.state.optimizer.add(spec.name, parameters[spec.name])
            for name in program.buffers:
                if name not in buffers:
                    buffers[name] = values[name].to(self._groups.device, copy=True)

    def _loaded(self, microbatch: MicrobatchPlan) -> Stages:
        stages = self._setup.stages
        loaded = self._patterns.get((microbatch.pattern, microbatch.tower), {})
        return {index: stage for index, stage in loaded.items() if stages[index].replica == microbatch.replica}

    def _execute(
        self,
        command: Step,
        loaded: Sequence[Stages],
        actions: Sequence[Action],
        p2p: P2P,
        sums: GradientSums | CarriedSums,
    ) -> OwnTotals:
        for name, group in self._op_groups.items():
            register_group(name, group)
        executor = Executor(
            command.plan,
            loaded,
            p2p,
            self._board,
            self._groups,
            sums,
            seed=command.seed,
            trace=command.trace,
            check=self._check,
        )
        result = executor.run(actions)
        wall = time.time() - time.perf_counter()
        self.events = [
            Event(
                rank=self._groups.rank,
                stage=self._setup.stages[action.stage].name,
                kind=action.kind,
                microbatch=action.microbatch,
                start_s=start + wall,
                end_s=end + wall,
            )
            for action, start, end in result.events
        ]
        return result

    def _totals(self, plan: StepPlan, own: OwnTotals, faults: Mapping[str, float]) -> StepTotals:
        losses = torch.zeros(len(plan.microbatches), self._num_shards, dtype=torch.float64)
        if self._counts_loss:
            losses[:, self._shard] = own.losses[:, 0]
        else:
            own.num_tokens = 0
        own.losses = losses
        if self._setup.clip_norm is not None and plan.update:
            own.squared_norms = self._gradients.squared_norms()
        limit = arithmetic_of(self._setup.reduction).limit
        own.faults = faults if limit < math.inf else None
        return add_up(self._groups, plan, own, names=self._gradients.names, limit=limit)


def _only_group(found: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the one process group of this rank's shared stages, as a tuple of ranks; () if no stage is shared.

    Args:
        found: ranks of each stage's group; () for a stage that no other rank shares.
    """
    groups = {ranks for ranks in found if ranks}
    assert len(groups) <= 1, f"a rank shares stages in several groups: {sorted(groups)}"
    return groups.pop() if groups else ()
