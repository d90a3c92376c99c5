"""`GenerationWorker`: computes the steps of one generation, between `ready` and the next change of members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcompile.batching.step_plan import StepPlan
from mmcompile.batching.step_planner import PlannedStep
from mmcompile.codegen.program import PatternPrograms
from mmcompile.planner.plan.placement import Placement
from mmcompile.planner.resilience.job import LayerId
from mmcompile.runtime.comm import wire
from mmcompile.runtime.comm.groups import Groups
from mmcompile.runtime.commands import Install, Setup, Step
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.generation_layout import shares_of
from mmcompile.runtime.elastic.generation_plan import GenerationPlan
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.elastic.programs import Programs, share
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.optimizer import Hyper
from mmcompile.runtime.worker import Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepOrder:
    """Message from rank 0 to all ranks at the start of a step: the step's plan, and the optimizer's settings."""

    has_new: bool
    """True if the step needs stage programs that were just captured on rank 0, which then sends them next."""
    step: Step


class GenerationWorker:
    """Computes the steps of one generation on one rank, together with the other ranks.

    Args:
        programs: layer programs that this worker has.
        store: layers that this worker holds, including all in `layers`.
        layers: layers that this rank runs.
        check: called before every action of a step; raises once the generation has ended.

    Attributes:
        inner: worker of the engine without fault tolerance, which runs stages and the optimizer.
    """

    def __init__(
        self,
        job: ElasticJob,
        groups: Groups,
        plan: GenerationPlan,
        placement: Placement,
        programs: Programs,
        store: LayerStore,
        layers: frozenset[LayerId],
        check: Callable[[], None],
    ) -> None:
        self._job = job
        self._groups = groups
        self._shares = shares_of(plan.pipelines)
        self._stages = placement.stages
        self._programs = programs
        self._store = store
        self._layers = layers
        setup = Setup(
            stages=placement.stages,
            optimizer=job.optimizer,
            clip_norm=job.clip_norm,
            compiled=job.compiled,
            reduction=job.reduction,
        )
        self.inner = Worker(groups, setup, StatusBoard.private(groups.world_size), state=store.state, check=check)
        self._installed: set[str] = set()
        self._rank_of = {(stage.replica, stage.program_name): stage.ranks[0] for stage in placement.stages}

    def lead(self, planned: PlannedStep, hyper: Hyper, *, trace: bool) -> StepTotals:
        """Announce a step to the other ranks, compute it on rank 0, and return its totals."""
        patterns = {prepared.programs.pattern: prepared.programs for prepared in planned.prepared}
        new = [programs for pattern, programs in patterns.items() if pattern not in self._programs]
        step = Step(plan=planned.plan, hyper=hyper, seed=self._job.seed, trace=trace)
        wire.broadcast(self._groups, wire.encode(_StepOrder(has_new=bool(new), step=step)))
        if new:
            self._learn(new)
        self._install(planned.plan)
        return self.inner.compute(step, [prepared.values for prepared in planned.prepared])

    def follow(self) -> StepTotals:
        """Receive the step that rank 0 announces, compute it on this rank, and return its totals. Called on all ranks but 0."""
        order = wire.decode(wire.broadcast(self._groups, None), _StepOrder)
        if order.has_new:
            self._learn()
        self._install(order.step.plan)
        return self.inner.compute(order.step)

    def answers_for(self) -> tuple[int, ...]:
        """Return the numbers of the last step's microbatches that this rank reports as done: those whose loss it computed.

        Rank 0 also reports microbatches without samples. Numbers continue from step to step.
        """
        assert self.inner.last is not None, "no step was computed"
        plan, _ = self.inner.last
        first = (plan.step - 1) * sum(self._shares)
        mine: set[int] = set()
        others: set[int] = set()
        for microbatch in plan.microbatches:
            number = first + sum(self._shares[: microbatch.replica]) + microbatch.slot
            loss = next(name for name, program in self._programs.of(microbatch.pattern).items() if program.is_loss)
            (mine if self._rank_of[microbatch.replica, loss] == self._groups.rank else others).add(number)
        if self._groups.rank == 0:
            mine |= set(range(first, first + sum(self._shares))) - others
        return tuple(sorted(mine))

    def _learn(self, patterns: Sequence[PatternPrograms] = ()) -> None:
        share(self._groups, self._programs, patterns)
        self._store.learn(self._programs.parameters())
        self._store.hold(self._layers)

    def _install(self, plan: StepPlan) -> None:
        here = {stage.program_name for stage in self._stages if self._groups.rank in stage.ranks}
        for pattern in dict.fromkeys(microbatch.pattern for microbatch in plan.microbatches):
            if pattern in self._installed:
                continue
            self._installed.add(pattern)
            mine = [program for name, program in self._programs.of(pattern).items() if name in here]
            values = self._job.patterns.parameters()
            tensors = {f"value/{name}": values[name] for program in mine for name in program.buffers}
            for program in mine:
                tensors |= {f"constant/{program.stage}/{name}": tensor for name, tensor in program.constants.items()}
            holders = self._programs.holders(self._stages)
            self.inner.install(Install(pattern=pattern, tower="", holders=holders), mine, tensors)
