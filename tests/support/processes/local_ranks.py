"""All ranks of an engine as threads of this process: with real groups and messages, and a look at what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from mmcompile.batching.accumulation import NOTHING
from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.step_planner import StepPlanner
from mmcompile.codegen.program import ProgramSource
from mmcompile.config import Reduction
from mmcompile.data.collate import Sample
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.comm.groups import Groups, PeerLost
from mmcompile.runtime.commands import CloseEngine, Setup
from mmcompile.runtime.controller import Controller
from mmcompile.runtime.monitoring.metrics import StepTotals
from mmcompile.runtime.monitoring.status import StatusBoard
from mmcompile.runtime.optim.optimizer import OptimizerSpec
from mmcompile.runtime.worker import Worker


class LocalRanks:
    """The same commands as an `Engine` gives, one call each."""

    def __init__(
        self,
        placement: Placement,
        source: ProgramSource,
        optimizer: OptimizerSpec,
        *,
        clip_norm: float | None = None,
        reduction: Reduction = "fast",
        shard_optimizer: bool = False,
    ) -> None:
        self._source = source
        self._planner = StepPlanner(placement, source, balancer=Arrival())
        setup = Setup(
            stages=placement.stages,
            optimizer=optimizer,
            clip_norm=clip_norm,
            compiled=False,
            reduction=reduction,
            shard_optimizer=shard_optimizer,
        )
        num_ranks = 1 + max(rank for stage in placement.stages for rank in stage.ranks)
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        board = StatusBoard.private(num_ranks)

        self._followers: dict[int, Worker] = {}
        self._failures: list[Exception] = []

        def follow(rank: int) -> None:
            try:
                worker = Worker.join(Groups.connect(store, rank, num_ranks, torch.device("cpu"), local=True), board)
                self._followers[rank] = worker
                worker.serve()
            except Exception as failure:
                self._failures.append(failure)
                self._groups.interrupt()

        # Daemons, so that a test that fails here ends.
        self._threads = [Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, num_ranks)]
        for thread in self._threads:
            thread.start()
        self._groups = Groups.connect(store, 0, num_ranks, torch.device("cpu"), local=True)
        self.controller = Controller(self._groups, setup, board)
        self._before = NOTHING
        self._num_steps = 0

    @property
    def ranks(self) -> list[Worker]:
        """To be looked at between calls of `weights`, which all ranks answer."""
        return [self.controller.worker, *(self._followers[rank] for rank in sorted(self._followers))]

    def step(self, samples: Sequence[Sample], *, update: bool = True) -> StepTotals:
        planned = self._planner.plan(self._num_steps + 1, samples, update=update, before=self._before)
        hyper = self.controller.worker.state.optimizer.hyper
        totals = self.controller.step(planned, self._source.parameters(), hyper=hyper, seed=0)
        self._before = planned.after
        self._num_steps += update
        return totals

    def weights(self) -> dict[str, Tensor]:
        return self.controller.weights()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.controller.tell(CloseEngine())
        else:
            # Others that wait for rank 0 learn that it is gone.
            self._groups.interrupt()
        for thread in self._threads:
            thread.join(timeout=60)
        if self._failures and not isinstance(self._failures[0], PeerLost):
            raise self._failures[0] from error
