"""`work`: main function of a worker, which trains in successive generations and applies a step only once it is committed."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from mmcompile.errors import CheckpointError, EngineError, MMCompileError, VerifyError
from mmcompile.planner.resilience.job import WorkerId
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.checkpoint.trainer_state import Stored
from mmcompile.runtime.control.membership_client import MembershipClient, Superseded
from mmcompile.runtime.control.messages import Generation
from mmcompile.runtime.control.store import forget_before
from mmcompile.runtime.elastic import layer_checkpoint as saving
from mmcompile.runtime.elastic.connections import Connection, Connections
from mmcompile.runtime.elastic.elastic_controller import ElasticController
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.generation_layout import GenerationLayout
from mmcompile.runtime.elastic.generation_plan import GenerationPlan, StepRecord
from mmcompile.runtime.elastic.generation_worker import GenerationWorker
from mmcompile.runtime.elastic.layer_copies import run_copies
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.elastic.programs import Programs, share
from mmcompile.runtime.elastic.warm_up import num_graphs
from mmcompile.runtime.executor.totals import metrics_of
from mmcompile.runtime.monitoring import tracing
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.optim.optimizer import HyperSchedule


def work(job: ElasticJob, membership: MembershipClient) -> None:
    """Train until the worker is released; main function of a worker process.

    Raises:
        Released: training ended, or the node is released.
    """
    torch.set_num_threads(1)
    # What was there before the fork is not looked at again: it never goes, and collections of the rest stay fast.
    gc.freeze()
    ElasticWorker(job, membership).run()


class ElasticWorker:
    """Trains in one worker process, and keeps programs, layers and data from generation to generation."""

    def __init__(self, job: ElasticJob, membership: MembershipClient) -> None:
        self.job = job
        self.membership = membership
        self.programs = Programs(job.patterns.captured())
        self.store = LayerStore(self.programs.parameters(), job.patterns.parameters(), job.optimizer)
        self.rates = HyperSchedule(job.optimizer, job.scheduler)
        self.controller = ElasticController(job)
        """Reads data and plans steps while this worker is rank 0."""
        self.graphs_before = num_graphs()
        """Number of graphs compiled before this worker was started."""
        self._connections = Connections(membership)

    def run(self) -> None:
        """Train in successive generations until the worker is released."""
        while True:
            generation = self.membership.wait_generation()
            try:
                self._train(generation)
            except Superseded:
                fail_point("superseded", rank=generation.rank, generation=generation.number)
            except (MMCompileError, VerifyError) as error:
                # It would recur on any worker: bad data, a full disk, a bug. So training ends for all nodes.
                with contextlib.suppress(Superseded):
                    self.membership.abort(str(error))

    def _train(self, generation: Generation) -> None:
        rank, number = generation.rank, generation.number
        fail_point("prepared", rank=rank, generation=number)
        with self._connections.open(generation) as connection:
            self.membership.connected()
            fail_point("connected", rank=rank, generation=number)
            try:
                run = _GenerationRun(self, connection, generation)
                connection.call(run.gather_state)
                fail_point("copied", rank=rank, generation=number)
                self.membership.ready()
                fail_point("active", rank=rank, generation=number)
                run.train()
            finally:
                # Nothing of this generation runs afterwards.
                self.controller.close()


class _GenerationRun:
    """Training by one worker in one generation: it copies the state it lacks, then runs steps, each applied after its commit.

    It is made once the generation's workers are connected. Rank 0 then starts to plan its first step.
    """

    def __init__(self, worker: ElasticWorker, connection: Connection, generation: Generation) -> None:
        job = worker.job
        self._worker = worker
        self._job = job
        self._store = worker.store
        self._connection = connection
        self._generation = generation
        self._plan = GenerationPlan.decode(generation.payload)
        self._layout = GenerationLayout(
            plan=self._plan, resilience=job.resilience, layers=job.layers, nodes=generation.nodes
        )
        node = generation.nodes[generation.rank // job.resilience.devices_per_node]
        self._id = WorkerId(node=node, index=worker.membership.index)
        self._layers = self._layout.layers_of(self._id)
        self._owners = saving.owners(self._layout, former=True)
        self._cursor = generation.cursor
        if generation.rank == 0 and not self._plan.farewell:
            data = None if generation.cursor is None else StepRecord.decode(generation.cursor).data
            worker.controller.start(self._plan, self._layout.placement(), generation.committed, data)

    def gather_state(self) -> None:
        """Copy the state this worker lacks from others. No state is dropped: this generation may end before it becomes active."""
        store, committed = self._store, self._generation.committed
        if self._id.node in self._generation.joined or self._plan.checkpoint is not None:
            store.clear()
        # Of a step that was not committed.
        store.state.optimizer.zero_grad()
        groups, programs = self._connection.groups, self._worker.programs
        # Workers started since know no patterns that were captured while training.
        share(groups, programs, programs.late if groups.rank == 0 else ())
        store.learn(programs.parameters())
        if self._plan.checkpoint is not None:
            self._read_checkpoint(self._plan.checkpoint)
        run_copies(groups, self._plan.copies, self._layout.ranks, store, self._connection.check)
        lacking = self._layers - store.held
        if committed and (lost := [layer for layer in sorted(lacking) if store.trains(layer)]):
            raise VerifyError(f"{self._id} runs layers {', '.join(map(str, lost))}, which nobody sent to it")
        store.hold(lacking)

    def train(self) -> None:
        """Run steps up to the job's last one. Raises Superseded if the generation ends earlier."""
        if self._plan.farewell:
            self._save_and_stop()
            return
        committed, last = self._generation.committed, self._job.num_steps
        worker = GenerationWorker(
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
            self._step(step, worker)
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

    def _step(self, step: int, worker: GenerationWorker) -> None:
        rank = self._generation.rank
        fail_point("before-step", rank=rank, step=step)
        if rank == 0:
            totals, cursor = self._lead_step(step, worker)
        else:
            totals, cursor = self._compute(worker.follow), None
        fail_point("reduced", rank=rank, step=step)
        self._worker.membership.reduced(step, worker.answers_for(), cursor=cursor)
        fail_point("committed", rank=rank, step=step)
        worker.inner.apply(totals)
        fail_point("applied", rank=rank, step=step)
        self._cursor = cursor
        if step == self._generation.committed + 1:
            self._settle()
        if self._job.saves_after(step):
            self._save(step)
        if step == self._job.num_steps:
            collect = functools.partial(tracing.collect, self._connection.groups, worker.inner.events, self._job.trace)
            self._connection.call(collect)

    def _lead_step(self, step: int, worker: GenerationWorker) -> tuple[StepTotals, str]:
        start_s = time.perf_counter()
        planned, data = self._worker.controller.step(step, self._connection.check)
        waited_s = time.perf_counter() - start_s
        hyper, trace = self._worker.rates.of(step), step == self._job.num_steps
        totals = self._compute(functools.partial(worker.lead, planned, hyper, trace=trace))
        metrics = metrics_of(planned.plan, totals, start_s)
        metrics = replace(metrics, balance=planned.balance, planning_s=planned.seconds, waited_s=waited_s)
        return totals, StepRecord(data=data, metrics=metrics).encode()

    def _compute(self, function: Callable[[], StepTotals]) -> StepTotals:
        try:
            return self._connection.call(function)
        except EngineError as error:
            # Gradients that cannot be added, for example: any other worker would get the same.
            raise VerifyError(str(error)) from error

    def _settle(self) -> None:
        """After the generation's first commit, drop layers that other workers now hold, and delete old keys from the store."""
        self._store.keep(self._layers)
        self._owners = saving.owners(self._layout, former=False)
        if self._generation.rank == 0:
            store = self._connection.groups.store
            self._connection.call(functools.partial(forget_before, store, self._generation.number))
        # Errors and their tracebacks refer to each other and hold groups of generations before, which hold sockets and threads.
        gc.collect()

    def _save(self, step: int) -> None:
        trainer = checkpoint.TrainerState(
            step=step,
            optimizer=self._job.optimizer,
            hyper=self._worker.rates.of(step + 1),
            seed=self._job.seed,
            cursor=self._cursor,
        )
        aliases = self._worker.programs.aliases()
        groups = self._connection.groups
        try:
            self._connection.call(
                functools.partial(saving.save, groups, self._job, self._owners, self._store, aliases, trainer)
            )
        except CheckpointError as error:
            if step == self._job.num_steps or self._plan.farewell:
                raise
            # Training goes on: the checkpoint before is whole, and the next one may succeed.
            print(f"mmcompile: step {step} is not saved: {error}", file=sys.stderr, flush=True)

    def _save_and_stop(self) -> None:
        """Save the layers that the remaining nodes hold, and end training: too few nodes are left."""
        step = self._generation.committed
        if step:
            self._save(step)
        saved = f"step {step} is saved in {self._job.checkpoints}" if step else "no step was done"
        if self._generation.rank == 0:
            self._worker.membership.abort(f"{self._plan.farewell}; {saved}")
        else:
            self._worker.membership.finish()

    def _read_checkpoint(self, step: int) -> None:
        stored = Stored.find(self._job.checkpoints)
        saved = checkpoint.read(self._job.checkpoints)
        if saved.trainer.step != step:
            raise CheckpointError(
                f"{self._job.checkpoints} holds step {saved.trainer.step}; step {step} was there when this generation was planned"
            )
        self._job.user.check(stored, self._job.optimizer, self._job.checkpoints)
        for layer in sorted(self._layers):
            if self._store.trains(layer):
                self._store.put(layer, self._store.part_of(layer, saved.weights, saved.optimizer))
