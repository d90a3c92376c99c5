"""`work`: what a worker does from its start to its end, generation after generation."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass

import torch

from mmcompile.errors import MMCompileError, VerifyError
from mmcompile.runtime.control.control_errors import Superseded
from mmcompile.runtime.control.membership import Generation, Membership
from mmcompile.runtime.elastic.connections import Connections
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.layer_store import LayerStore
from mmcompile.runtime.elastic.part import Part
from mmcompile.runtime.elastic.programs import Programs
from mmcompile.runtime.elastic.reader import Reader
from mmcompile.runtime.elastic.warm_up import num_graphs
from mmcompile.runtime.monitoring.fail_points import fail_point
from mmcompile.runtime.optim.rates import Rates


def work(job: ElasticJob, membership: Membership) -> None:
    """Main function of a worker.

    Raises:
        Released: training ended, or the node is let go.
    """
    torch.set_num_threads(1)
    # What was there before the fork is not looked at again: it never goes, and collections of the rest stay fast.
    gc.freeze()
    Worker.start(job, membership).run()


@dataclass(kw_only=True, slots=True)
class Worker:
    """What outlives generations."""

    job: ElasticJob
    membership: Membership
    connections: Connections
    programs: Programs
    store: LayerStore
    rates: Rates
    reader: Reader
    graphs_before: int
    """Compiled before this worker was started."""

    @classmethod
    def start(cls, job: ElasticJob, membership: Membership) -> Worker:
        programs = Programs(job.patterns.captured())
        return cls(
            job=job,
            membership=membership,
            connections=Connections(membership),
            programs=programs,
            store=LayerStore.of(programs.parameters(), job.patterns.parameters(), job.optimizer),
            rates=Rates(job.optimizer, job.scheduler),
            reader=Reader(job.data),
            graphs_before=num_graphs(),
        )

    def run(self) -> None:
        """Take part in generations until the worker is released."""
        while True:
            generation = self.membership.wait_generation()
            try:
                self._take_part(generation)
            except Superseded:
                fail_point("superseded", rank=generation.rank, generation=generation.number)
            except (MMCompileError, VerifyError) as error:
                self._end_training(error)

    def _take_part(self, generation: Generation) -> None:
        rank, number = generation.rank, generation.number
        fail_point("prepared", rank=rank, generation=number)
        with self.connections.open(generation) as connection:
            self.membership.connected()
            fail_point("connected", rank=rank, generation=number)
            part = Part(self, connection, generation)
            try:
                connection.call(part.gather_state)
                fail_point("copied", rank=rank, generation=number)
                self.membership.ready()
                fail_point("active", rank=rank, generation=number)
                part.train()
            finally:
                part.close()

    def _end_training(self, error: MMCompileError | VerifyError) -> None:
        """Bad data, a full disk or a bug of ours: the next worker would fail in the same way."""
        with contextlib.suppress(Superseded):
            self.membership.abort(str(error))
