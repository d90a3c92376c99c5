"""`Part`: a worker's part in one generation: get the state it lacks, then steps, each committed before it counts."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmcompile.errors import CheckpointError, EngineError, VerifyError
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.control.membership import Generation
from mmcompile.runtime.control.store import forget_before
from mmcompile.runtime.elastic import elastic_saving as saving
from mmcompile.runtime.elastic.connections import Connection
from mmcompile.runtime.elastic.generation_layout import Layout
from mmcompile.runtime.elastic.generation_plan import Device, GenerationPlan
from mmcompile.runtime.elastic.layer_copies import run_copies
from mmcompile.runtime.elastic.lead import Lead
from mmcompile.runtime.elastic.programs import share
from mmcompile.runtime.elastic.record import StepRecord
from mmcompile.runtime.elastic.team import Team
from mmcompile.runtime.elastic.warm_up import num_graphs
from mmcompile.runtime.monitoring import tracing
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.monitoring.metrics import StepTotals

if TYPE_CHECKING:
    from mmcompile.runtime.elastic.elastic_worker import Worker


class Part:
    """Made once the groups of the generation are connected. Rank 0 plans its first step from then on."""

    def __init__(self, worker: Worker, connection: Connection, generation: Generation) -> None:
        job = worker.job
        self._worker = worker
        self._job = job
        self._store = worker.store
        self._connection = connection
        self._generation = generation
        self._plan = GenerationPlan.decode(generation.payload)
        self._layout = Layout(plan=self._plan, resilience=job.resilience, layers=job.layers, nodes=generation.nodes)
        node = generation.nodes[generation.rank // job.resilience.devices_per_node]
        self._device = Device(node=node, index=worker.membership.index)
        self._layers = self._layout.layers_of(self._device)
        self._owners = saving.owners(self._layout, former=True)
        self._cursor = generation.cursor
        self._lead = self._start_lead() if generation.rank == 0 and not self._plan.farewell else None

    def close(self) -> None:
        """Nothing of this generation runs afterwards."""
        if self._lead is not None:
            self._lead.close()

    def gather_state(self) -> None:
        """Get what this worker lacks. Nothing is dropped: another generation may come before this one is active."""
        store, committed = self._store, self._generation.committed
        if self._device.node in self._generation.joined or self._plan.checkpoint is not None:
            store.clear()
        store.drop_gradients()
        groups, programs = self._connection.groups, self._worker.programs
        # Workers started since know no patterns that were captured while training.
        share(groups, programs, programs.late if groups.rank == 0 else ())
        store.learn(programs.parameters())
        if self._plan.checkpoint is not None:
            self._read_checkpoint(self._plan.checkpoint)
        run_copies(groups, self._plan.copies, self._layout.ranks, store, self._connection.check)
        lacking = self._layers - store.held
        if committed and (lost := [layer for layer in sorted(lacking) if store.trains(layer)]):
            raise VerifyError(f"{self._device} runs layers {', '.join(map(str, lost))}, which nobody sent to it")
        store.hold(lacking)

    def train(self) -> None:
        """Steps until the last one. Raises Superseded when the generation ends before."""
        if self._plan.farewell:
            self._part_with_state()
            return
        committed, last = self._generation.committed, self._job.num_steps
        team = Team(
            self._job,
            self._connection.groups,
            self._plan,
            self._layout.placement(),
            self._worker.programs,
            self._store,
            self._layers,
            self._connection.check,
        )
        for step in range(committed + 1, last + 1):
            self._step(step, team)
        if committed == last:
            # The one who was to save it was lost.
            self._save(last)
        self._connection.call(self._check_replicas)
        fail_point("before-finish", rank=self._generation.rank)
        self._worker.membership.finish()

    def _check_replicas(self) -> None:
        digests = {str(layer): self._store.digest(layer) for layer in sorted(self._layers)}
        outcome = saving.Outcome(digests=digests, num_compiled=num_graphs() - self._worker.graphs_before)
        saving.check_replicas(self._connection.groups, self._job, outcome)

    def _start_lead(self) -> Lead:
        committed, cursor = self._generation.committed, self._generation.cursor
        self._worker.reader.start(committed, None if cursor is None else StepRecord.decode(cursor).data)
        lead = Lead(self._job, self._plan, self._layout.placement(), self._worker.reader)
        # Copies take longer, and planning needs no state.
        lead.plan_ahead(committed + 1)
        return lead

    def _step(self, step: int, team: Team) -> None:
        rank, start_s = self._generation.rank, time.perf_counter()
        fail_point("before-step", rank=rank, step=step)
        if self._lead is None:
            totals = self._compute(team.follow)
            cursor = None
        else:
            following = self._lead.step(step, self._connection.check)
            hyper = self._worker.rates.of(step)
            totals = self._compute(
                functools.partial(team.lead, following.planned, hyper, trace=step == self._job.num_steps)
            )
            metrics = team.metrics(totals, following.planned, start_s=start_s, waited_s=following.waited_s)
            cursor = StepRecord(data=following.cursor, metrics=metrics).encode()
        fail_point("reduced", rank=rank, step=step)
        self._worker.membership.reduced(step, team.answers_for(), cursor=cursor)
        fail_point("committed", rank=rank, step=step)
        team.rank.apply(totals)
        fail_point("applied", rank=rank, step=step)
        self._cursor = cursor
        if step == self._generation.committed + 1:
            self._settle()
        if self._job.saves_after(step):
            self._save(step)
        if step == self._job.num_steps:
            collect = functools.partial(tracing.collect, self._connection.groups, team.rank.events(), self._job.trace)
            self._connection.call(collect)

    def _compute(self, function: Callable[[], StepTotals]) -> StepTotals:
        try:
            return self._connection.call(function)
        except EngineError as error:
            # Gradients that cannot be added, for example: any other worker would get the same.
            raise VerifyError(str(error)) from error

    def _settle(self) -> None:
        """After the first commit of the generation: what moved to other workers is old now, and so is how members met before."""
        self._store.keep(self._layers)
        self._owners = saving.owners(self._layout, former=False)
        if self._generation.rank == 0:
            store = self._connection.groups.store
            self._connection.call(functools.partial(forget_before, store, self._generation.number))
        # Errors and their tracebacks refer to each other and hold groups of generations before, which hold sockets and threads.
        gc.collect()

    def _save(self, step: int) -> None:
        moment = saving.Moment(step=step, cursor=self._cursor, hyper=self._worker.rates.of(step + 1))
        aliases = self._worker.programs.aliases()
        groups = self._connection.groups
        try:
            self._connection.call(
                functools.partial(saving.save, groups, self._job, self._owners, self._store, aliases, moment)
            )
        except CheckpointError as error:
            if step == self._job.num_steps or self._plan.farewell:
                raise
            # Training goes on: the checkpoint before is whole, and the next one may succeed.
            print(f"mmcompile: step {step} is not saved: {error}", file=sys.stderr, flush=True)

    def _part_with_state(self) -> None:
        """Too few nodes are left: save what they hold and end training."""
        step = self._generation.committed
        if step:
            self._save(step)
        saved = f"step {step} is saved in {self._job.checkpoints}" if step else "no step was done"
        if self._generation.rank == 0:
            self._worker.membership.abort(f"{self._plan.farewell}; {saved}")
        else:
            self._worker.membership.finish()

    def _read_checkpoint(self, step: int) -> None:
        saved = checkpoint.read(self._job.checkpoints)
        if saved.trainer.step != step:
            raise CheckpointError(
                f"{self._job.checkpoints} holds step {saved.trainer.step}; step {step} was there when this generation was planned"
            )
        self._job.user.check(saved.trainer, saved.shapes, self._job.optimizer, self._job.checkpoints)
        for layer in sorted(self._layers):
            if self._store.trains(layer):
                self._store.put(layer, self._store.part_of(layer, saved.weights, saved.optimizer))
