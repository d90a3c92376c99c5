"""`Rank`: what one process of an engine holds, and what it does for each command."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmcompile.errors import VerifyError
from mmcompile.kernels.bitfield_attention.cp_channel import GROUP, register_group
from mmcompile.lower.program import StageProgram
from mmcompile.plan.simulator.schedule import Action, Flow, Schedule, build_schedule
from mmcompile.plan.simulator.simulate import Event
from mmcompile.runtime import gradients
from mmcompile.runtime.commands import Setup, Step
from mmcompile.runtime.executor import Executor, StepResult
from mmcompile.runtime.groups import Groups
from mmcompile.runtime.links import Mail, Stages
from mmcompile.runtime.optimizer import RankOptimizer
from mmcompile.runtime.stages import LoadedStage
from mmcompile.runtime.status import StatusBoard
from mmcompile.step.step_plan import StepPlan

RootValues = tuple[Sequence[Mapping[str, Tensor]], Sequence[Mapping[int, frozenset[str]]]]
"""On rank 0: per microbatch the batch inputs by name, and per rank the names it reads."""


class Rank:
    """The stages, tensors and optimizer of one rank. Rank 0 has one too."""

    def __init__(self, groups: Groups, setup: Setup, board: StatusBoard) -> None:
        if groups.device.type == "cuda":
            torch.cuda.set_device(groups.device)
        self.groups = groups
        shared = [stage.group for stage in setup.stages if groups.rank in stage.group]
        self._shards = groups.shards(shared[0]) if shared else None
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.optimizer = RankOptimizer(setup.optimizer)
        self._setup = setup
        self._board = board
        self._patterns: dict[str, dict[int, LoadedStage]] = {}
        self._tied: Mapping[str, tuple[int, ...]] = {}
        self._schedules: dict[tuple[Flow, ...], Schedule] = {}
        self._events: list[Event] = []
        self.last: tuple[StepPlan, Tensor] | None = None
        """The last step, and what it returned."""

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self._setup.stages)

    def install(
        self,
        pattern: str,
        programs: Sequence[StageProgram],
        tensors: Mapping[str, Tensor],
        tied: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Build this rank's stages of a pattern.

        Args:
            tensors: by path: `value/<name>` for parameters and buffers this rank lacks, `state/<key>/<name>` for the
                optimizer state of such parameters, `constant/<stage>/<name>`.
        """
        self._keep(programs, _under("value/", tensors))
        self.optimizer.load_state(_under("state/", tensors))
        self._tied = tied
        device = self.groups.device
        self._patterns[pattern] = {}
        for program in programs:
            constants = {n: t.to(device) for n, t in _under(f"constant/{program.stage}/", tensors).items()}
            stage = LoadedStage.load(
                replace(program, constants=constants),
                {**self.parameters, **self.buffers},
                self._setup.stages,
                device=device,
                compiled=self._setup.compiled,
            )
            self._patterns[pattern][stage.index] = stage

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite weights (`value/<name>`) and optimizer state (`state/<key>/<name>`) held here."""
        with torch.no_grad():
            for name, value in _under("value/", tensors).items():
                (self.parameters[name] if name in self.parameters else self.buffers[name]).copy_(value)
        self.optimizer.optimizer.state.clear()
        self.optimizer.load_state(_under("state/", tensors))

    def step(self, command: Step, roots: RootValues | None = None) -> Tensor:
        """Run this rank's part of a step.

        Returns:
            float64 [3 + ranks], the same on all ranks: loss, valid tokens, squared gradient norm (0 without clipping),
            and each rank's busy seconds.
        """
        plan = command.plan
        self.optimizer.hyper = command.hyper
        result = self._execute(command, roots)
        trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        gradients.sum_tied(self.groups, trainable, self._tied)
        totals = self._totals(result, trainable)
        if plan.num_tokens and int(totals[1]) != plan.num_tokens:
            raise VerifyError(
                f"step {plan.step} was planned with {plan.num_tokens} valid tokens, its loss stages counted {int(totals[1])}"
            )
        if self._setup.clip_norm is not None:
            gradients.scale(trainable.values(), math.sqrt(float(totals[2])), self._setup.clip_norm)
        self.optimizer.step()
        self.last = plan, totals
        return totals

    def events(self) -> list[Event]:
        """Measured actions of the last step, if it was traced."""
        return self._events

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Detached parameters, not copies."""
        return {name: self.parameters[name].detach() for name in names}

    def _keep(self, programs: Sequence[StageProgram], values: Mapping[str, Tensor]) -> None:
        for program in programs:
            for spec in program.parameters:
                if spec.name not in self.parameters:
                    value = values[spec.name].to(self.groups.device, copy=True)
                    self.parameters[spec.name] = nn.Parameter(value, requires_grad=spec.trainable)
                    if spec.trainable:
                        self.optimizer.add(spec.name, self.parameters[spec.name])
            for name in program.buffers:
                if name not in self.buffers:
                    self.buffers[name] = values[name].to(self.groups.device, copy=True)

    def _execute(self, command: Step, roots: RootValues | None) -> StepResult:
        plan = command.plan
        if self._shards is not None:
            register_group(GROUP, self._shards)
        actions = self.schedule(plan).ranks[self.groups.rank]
        loaded: list[Stages] = [self._patterns.get(microbatch.pattern, {}) for microbatch in plan.microbatches]
        mail = Mail(self.groups, plan, self._setup.stages, loaded, actions)
        if roots is not None:
            mail.send_roots(*roots)
        executor = Executor(plan, loaded, mail, self._board, self.groups, seed=command.seed, trace=command.trace)
        result = executor.run(actions, self.stages)
        wall = time.time() - time.perf_counter()
        self._events = [self._event(action, start + wall, end + wall) for action, start, end in result.events]
        return result

    def schedule(self, plan: StepPlan) -> Schedule:
        """The action lists of a step; the same on all ranks. Raises PlanError."""
        flows = tuple(microbatch.flow for microbatch in plan.microbatches)
        if flows not in self._schedules:
            self._schedules[flows] = build_schedule(self._setup.stages, flows, self._setup.schedule)
        return self._schedules[flows]

    def _event(self, action: Action, start_s: float, end_s: float) -> Event:
        return Event(
            rank=self.groups.rank,
            stage=self.stages[action.stage],
            kind=action.kind,
            microbatch=action.microbatch,
            start_s=start_s,
            end_s=end_s,
        )

    def _totals(self, result: StepResult, trainable: Mapping[str, nn.Parameter]) -> Tensor:
        totals = torch.zeros(3 + self.groups.world_size, dtype=torch.float64)
        totals[0] = result.loss
        totals[1] = result.num_tokens
        if self._setup.clip_norm is not None:
            mine = [
                p for name, p in trainable.items() if self._tied.get(name, (self.groups.rank,))[0] == self.groups.rank
            ]
            totals[2] = gradients.squared_norm(mine)
        totals[3 + self.groups.rank] = result.busy_s
        self.groups.all_reduce(totals)
        return totals


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
