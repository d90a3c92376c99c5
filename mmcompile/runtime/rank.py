"""`Rank`: what one process of an engine holds, and what it does for each command."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mmcompile.batching.schedule_units import num_slots, units_of
from mmcompile.batching.step_plan import MicrobatchPlan, StepPlan
from mmcompile.codegen.program import StageProgram
from mmcompile.config import ScheduleKind
from mmcompile.errors import VerifyError
from mmcompile.kernels.process_groups import CONTEXT_GROUP, REPLICA_GROUP, TENSOR_GROUP, register_group
from mmcompile.planner.plan.placement import PlacedStage, lockstep_of
from mmcompile.planner.schedule.schedule import Action, CrossEdge, Unit, schedule_units
from mmcompile.planner.schedule.simulate import Event
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.comm.wire import under
from mmcompile.runtime.commands import Install, Setup, Step
from mmcompile.runtime.executor.executor import Executor, StepResult, num_backwards
from mmcompile.runtime.executor.loaded_stage import LoadedStage, Stages
from mmcompile.runtime.executor.p2p import Mail
from mmcompile.runtime.executor.totals import OwnTotals, add_up
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim import gradients
from mmcompile.runtime.optim.arithmetic import arithmetic_of
from mmcompile.runtime.optim.carried_sums import CarriedSums
from mmcompile.runtime.optim.gradients import GradientSums, Shared
from mmcompile.runtime.optim.optimizer import RankOptimizer
from mmcompile.runtime.optim.sharded_optimizer import NewValues

RootValues = tuple[Sequence[Mapping[str, Tensor]], Sequence[Mapping[int, frozenset[str]]]]
"""On rank 0: per microbatch the batch inputs by name, and per rank the names it reads."""

_SCHEDULES = 4
"""Schedules kept: that of the step that runs, those planned ahead, and one to use again where steps are alike."""


@dataclass(kw_only=True, slots=True)
class RankState:
    """What a rank holds of the model. It outlives the rank where stages move between ranks."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: RankOptimizer

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}


class Rank:
    """The stages, tensors and optimizer of one rank. Rank 0 has one too.

    Args:
        state: from a rank before this one; None to start with nothing.
        check: called before every action of a step; what it raises ends the step.
    """

    def __init__(
        self,
        groups: Groups,
        setup: Setup,
        board: StatusBoard,
        *,
        state: RankState | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if groups.device.type == "cuda":
            torch.cuda.set_device(groups.device)
        self.groups = groups
        mine = [stage for stage in setup.stages if stage.ranks[0] == groups.rank]
        self._op_groups = {
            name: groups.shards(ranks)
            for name, ranks in (
                (CONTEXT_GROUP, _only_group(stage.token_group for stage in mine)),
                (TENSOR_GROUP, _only_group(stage.tensor_group for stage in mine)),
                (REPLICA_GROUP, _only_group(stage.sharing for stage in mine)),
            )
            if ranks
        }
        """Groups that ops of this rank's stages call, by name."""
        self._shard = max((stage.shard for stage in mine if stage.depth == 0), default=0)
        """Of the loss stage."""
        self._num_shards = max(1, *(len(stage.group) for stage in setup.stages))
        self.state = state or RankState(optimizer=RankOptimizer(setup.optimizer))
        self.parameters, self.buffers, self.optimizer = (
            self.state.parameters,
            self.state.buffers,
            self.state.optimizer,
        )
        self._check = check
        self._setup = setup
        self._board = board
        self._patterns: dict[tuple[str, str], dict[int, LoadedStage]] = {}
        """By pattern and tower, this rank's stages by index."""
        self._held: dict[tuple[tuple[int, ...], int | None], list[str]] = {}
        """Trainable parameters on several ranks, by the placed stages that hold them, and the rank that updates them."""
        self._updaters: Mapping[str, int] = {}
        """The rank that updates a parameter, where not all that hold it do."""
        self._carried = self._nothing_carried()
        """Gradients of this step from plans before."""
        self._carried_weight = 0.0
        """Their loss weights."""
        self._ran: set[tuple[str, int, str]] = set()
        """Tower, replica and program name of the stages that ran a backward in this step, on any rank."""
        self._new_values: NewValues | None = None
        """On their way since the last update."""
        self._names: tuple[str, ...] = ()
        """All trainable parameters of the model so far, sorted."""
        self._answers_for: set[str] = set()
        """Those whose gradient this rank counts in the norm."""
        self._ordered = functools.lru_cache(maxsize=_SCHEDULES)(
            functools.partial(_ordered, groups.rank, setup.stages, setup.schedule)
        )
        self._events: list[Event] = []
        self.last: tuple[StepPlan, StepTotals] | None = None
        """The last step, and what it returned."""

    def install(self, command: Install, programs: Sequence[StageProgram], tensors: Mapping[str, Tensor]) -> None:
        """Build this rank's stages of a tower in a pattern, those of every replica it holds.

        Args:
            tensors: by path: `value/<name>` for parameters and buffers this rank lacks, `state/<key>/<name>` for the
                optimizer state of such parameters, `constant/<stage>/<name>`.
        """
        self._hold(command.holders, command.updaters)
        self._keep(programs, under("value/", tensors))
        states = under("state/", tensors)
        self.optimizer.load_state({path: t for path, t in states.items() if self._updates(path.split("/", 1)[1])})
        device = self.groups.device
        loaded: dict[int, LoadedStage] = {}
        for program in programs:
            constants = {n: t.to(device) for n, t in under(f"constant/{program.stage}/", tensors).items()}
            for placed in self._placed(command.tower, program.stage):
                loaded[placed] = LoadedStage.load(
                    replace(program, constants=constants),
                    {**self.parameters, **self.buffers},
                    self._setup.stages,
                    placed,
                    device=device,
                    compiled=self._setup.compiled,
                )
        self._patterns[command.pattern, command.tower] = loaded

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite weights (`value/<name>`) and optimizer state (`state/<key>/<name>`) held here. Gradients are dropped."""
        self._settle()
        self._next_step()
        with torch.no_grad():
            for name, value in under("value/", tensors).items():
                (self.parameters[name] if name in self.parameters else self.buffers[name]).copy_(value)
        self.optimizer.forget(self.optimizer.updated)
        self.optimizer.load_state(under("state/", tensors))

    def step(self, command: Step, roots: RootValues | None = None) -> StepTotals:
        """Run this rank's part of a step: `compute`, then `apply`, if parameters are to be updated."""
        totals = self.compute(command, roots)
        if command.plan.update:
            self.apply(totals)
        return totals

    def compute(self, command: Step, roots: RootValues | None = None) -> StepTotals:
        """Forwards, backwards, and the sums of gradients over ranks, where an update follows. Parameters are as before.

        Raises:
            EngineError: there are gradients that the reduction cannot add; on all ranks.
        """
        plan = command.plan
        self._settle()
        self.optimizer.hyper = command.hyper
        loaded = [self._loaded(microbatch) for microbatch in plan.microbatches]
        sums = self._sums(plan, loaded)
        mail = self._mail(plan, loaded, roots)
        result = self._execute(command, loaded, mail, sums)
        faults = sums.finish(plan.step)
        self._carried_weight += plan.total_weight
        if plan.update and self._carried_weight != 1:
            gradients.scale(self.optimizer.updated.values(), 1 / self._carried_weight)
        totals = self._totals(plan, result, faults)
        # All have reported, so all have what was sent to them. Not asked for before: see `Groups.broadcast`.
        mail.finish()
        if plan.num_tokens and totals.num_tokens != plan.num_tokens:
            raise VerifyError(
                f"step {plan.step} was planned with {plan.num_tokens} valid tokens, its loss stages counted {totals.num_tokens}"
            )
        self.last = plan, totals
        return totals

    def apply(self, totals: StepTotals) -> None:
        """Clip gradients and update parameters, without a word to other ranks, unless they wait for values from here.

        Args:
            totals: from `compute`.
        """
        if self._setup.clip_norm is not None:
            assert totals.squared_norm is not None, "a norm that is clipped was not asked for"
            gradients.clip(self.optimizer.updated.values(), math.sqrt(totals.squared_norm), self._setup.clip_norm)
        assert self.last is not None, "no step was computed"
        fail_point("optimizer", rank=self.groups.rank, step=self.last[0].step)
        self.optimizer.step()
        if self._updaters:
            self._new_values = NewValues(self.groups, self.state.trainable, self._shared())
        self._next_step()

    def events(self) -> list[Event]:
        """Measured actions of the last step, if it was traced."""
        return self._events

    def weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Detached parameters, not copies."""
        self._settle()
        return {name: self.parameters[name].detach() for name in names}

    def _keep(self, programs: Sequence[StageProgram], values: Mapping[str, Tensor]) -> None:
        for program in programs:
            for spec in program.parameters:
                if spec.name not in self.parameters:
                    value = values[spec.name].to(self.groups.device, copy=True)
                    self.parameters[spec.name] = nn.Parameter(value, requires_grad=spec.trainable)
                    if spec.trainable and self._updates(spec.name):
                        self.optimizer.add(spec.name, self.parameters[spec.name])
            for name in program.buffers:
                if name not in self.buffers:
                    self.buffers[name] = values[name].to(self.groups.device, copy=True)

    def _placed(self, tower: str, stage: str) -> Iterable[int]:
        """This rank's placed stages, one for each replica it holds, that run a program."""
        for index, placed in enumerate(self._setup.stages):
            if placed.ranks[0] == self.groups.rank and (placed.tower, placed.program_name) == (tower, stage):
                yield index

    def _mail(self, plan: StepPlan, loaded: Sequence[Stages], roots: RootValues | None) -> Mail:
        mail = Mail(
            self.groups, plan, self._setup.stages, loaded, self.schedule(plan), check_rows=self._setup.check_rows
        )
        if roots is not None:
            mail.send_roots(*roots)
        return mail

    def _execute(
        self, command: Step, loaded: Sequence[Stages], mail: Mail, sums: GradientSums | CarriedSums
    ) -> StepResult:
        plan = command.plan
        for name, group in self._op_groups.items():
            register_group(name, group)
        executor = Executor(
            plan,
            loaded,
            mail,
            self._board,
            self.groups,
            sums,
            seed=command.seed,
            trace=command.trace,
            check=self._check,
        )
        result = executor.run(self.schedule(plan))
        wall = time.time() - time.perf_counter()
        self._events = [self._event(action, start + wall, end + wall) for action, start, end in result.events]
        return result

    def _loaded(self, microbatch: MicrobatchPlan) -> Stages:
        """This rank's stages of the replica that a microbatch belongs to."""
        stages = self._setup.stages
        loaded = self._patterns.get((microbatch.pattern, microbatch.tower), {})
        return {index: stage for index, stage in loaded.items() if stages[index].replica == microbatch.replica}

    def schedule(self, plan: StepPlan) -> tuple[Action, ...]:
        """This rank's actions in a step. Raises PlanError."""
        units, edges = units_of(plan, self._setup.stages)
        return self._ordered(units, edges, num_slots(plan))

    def _hold(self, holders: Mapping[str, tuple[int, ...]], updaters: Mapping[str, int]) -> None:
        self._held = {}
        self._updaters = updaters
        self._names = tuple(sorted(holders))
        self._answers_for = set()
        for name, stages in holders.items():
            owners = self._owners(stages)
            if len(owners) > 1:
                self._held.setdefault((stages, updaters.get(name)), []).append(name)
            if updaters.get(name, min(owners)) == self.groups.rank:
                self._answers_for.add(name)

    def _updates(self, name: str) -> bool:
        return self._updaters.get(name, self.groups.rank) == self.groups.rank

    def _owners(self, stages: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self._setup.stages[index].ranks[0] for index in stages}))

    def _sums(self, plan: StepPlan, loaded: Sequence[Stages]) -> GradientSums | CarriedSums:
        """What takes the gradients of a plan."""
        self._ran |= {(m.tower, m.replica, stage) for m in plan.microbatches for stage in m.flow.backward}
        if not plan.update:
            self._carried.begin(self.state.trainable)
            return self._carried
        return GradientSums(
            self.groups,
            self.state.trainable,
            self._shared(),
            num_backwards(plan, loaded),
            reduction=self._setup.reduction,
            masters=self.optimizer.masters,
            carried=self._carried,
        )

    def _nothing_carried(self) -> CarriedSums:
        return CarriedSums(self._setup.reduction, master_weights=self.optimizer.masters is not None)

    def _next_step(self) -> None:
        """Nothing of the step before counts any more."""
        for parameter in self.state.trainable.values():
            parameter.grad = None
        self.optimizer.zero_grad()
        self._carried = self._nothing_carried()
        self._carried_weight = 0.0
        self._ran.clear()

    def _settle(self) -> None:
        """Wait for new values that are on their way here."""
        if self._new_values is not None:
            self._new_values.finish()
            self._new_values = None

    def _shared(self) -> list[Shared]:
        """Parameters on several ranks, by the ranks that hold them and those that ran a backward through them in this step."""
        gives = [(s.tower, s.replica, s.program_name) in self._ran for s in self._setup.stages]
        names: dict[tuple[tuple[int, ...], tuple[int, ...], int | None], list[str]] = {}
        for (stages, updater), held in self._held.items():
            # All shards of tensors have the same gradient of what they all hold whole.
            counted = [index for index in stages if not self._setup.stages[index].repeats] or stages
            ends = self._owners(stages), self._owners(index for index in counted if gives[index]), updater
            names.setdefault(ends, []).extend(held)
        return [
            Shared(names=tuple(held), owners=owners, givers=givers, updater=updater)
            for (owners, givers, updater), held in names.items()
        ]

    def _event(self, action: Action, start_s: float, end_s: float) -> Event:
        return Event(
            rank=self.groups.rank,
            stage=self._setup.stages[action.stage].name,
            kind=action.kind,
            microbatch=action.microbatch,
            start_s=start_s,
            end_s=end_s,
        )

    def _totals(self, plan: StepPlan, result: StepResult, faults: Mapping[str, float]) -> StepTotals:
        losses = torch.zeros(len(plan.microbatches), self._num_shards, dtype=torch.float64)
        # Of the loss of a stage that shares its tensors, all shards have the whole.
        mine = [stage for stage in self._setup.stages if stage.ranks[0] == self.groups.rank]
        counts = not any(stage.repeats and stage.depth == 0 for stage in mine)
        if counts:
            losses[:, self._shard] = result.losses
        norms: dict[str, float] | None = None
        if self._setup.clip_norm is not None and plan.update:
            norms = gradients.squared_norms({name: self.optimizer.updated[name] for name in sorted(self._answers_for)})
        limit = arithmetic_of(self._setup.reduction).limit
        own = OwnTotals(
            losses=losses,
            num_tokens=result.num_tokens if counts else 0,
            seconds=result.seconds,
            squared_norms=norms,
            faults=faults if limit < math.inf else None,
        )
        return add_up(self.groups, plan, own, names=self._names, limit=limit)


def _only_group(found: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """That of all stages of a rank which have one; () if none has."""
    groups = {ranks for ranks in found if ranks}
    assert len(groups) <= 1, f"a rank shares stages in several groups: {sorted(groups)}"
    return groups.pop() if groups else ()


def _ordered(
    rank: int,
    stages: tuple[PlacedStage, ...],
    kind: ScheduleKind,
    units: tuple[Unit, ...],
    edges: tuple[CrossEdge, ...],
    slots: int,
) -> tuple[Action, ...]:
    ranks = schedule_units(stages, units, edges, kind, num_slots=slots, only=rank, together=lockstep_of(stages)).ranks
    # Ranks after the last one with a stage have no list.
    return ranks[rank] if rank < len(ranks) else ()
