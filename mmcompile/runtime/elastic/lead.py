"""`Lead`: what rank 0 of a generation does besides its part: read data and plan steps, one ahead."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from mmcompile.batching.step_planner import Collate, PlannedStep, StepPlanner
from mmcompile.data.collate import Sample, Value
from mmcompile.errors import DataError, MMCompileError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.generation_layout import Dealt, shares_of
from mmcompile.runtime.elastic.generation_plan import GenerationPlan
from mmcompile.runtime.elastic.reader import Reader

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextStep:
    """A planned step and the cursor of the data after it."""

    planned: PlannedStep
    cursor: str
    waited_s: float


class Lead:
    """Steps of a generation in order. While one runs, a thread plans the next.

    Args:
        reader: stands before the first step of the generation.
    """

    def __init__(self, job: ElasticJob, plan: GenerationPlan, placement: Placement, reader: Reader) -> None:
        self._num_steps = job.num_steps
        self._reader = reader
        self._planner = StepPlanner(
            placement,
            job.patterns,
            collate=functools.partial(_collated, job.collate),
            balancer=Dealt(inner=job.balancer, shares=shares_of(plan.pipelines)),
            costs=job.costs,
        )
        self._ahead = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-planner")
        self._upcoming: tuple[int, Future[tuple[PlannedStep, str]]] | None = None

    def plan_ahead(self, number: int) -> None:
        """Start to plan a step, unless training ends before it."""
        self._upcoming = None if number > self._num_steps else (number, self._ahead.submit(self._plan, number))

    def step(self, number: int, check: Callable[[], None]) -> NextStep:
        """The plan of a step.

        Args:
            check: called while the plan is waited for; what it raises ends the wait.

        Raises:
            BatchError: samples do not fit the model, or the data cannot be read.
        """
        start = time.perf_counter()
        if self._upcoming is None or self._upcoming[0] != number:
            self.plan_ahead(number)
        assert self._upcoming is not None, f"step {number} of {self._num_steps}"
        while not wait([self._upcoming[1]], timeout=_POLL_S).done:
            check()
        planned, cursor = self._upcoming[1].result()
        waited_s = time.perf_counter() - start
        self.plan_ahead(number + 1)
        return NextStep(planned=planned, cursor=cursor, waited_s=waited_s)

    def close(self) -> None:
        """Wait for the thread: the next generation may need the data."""
        self._ahead.shutdown(wait=True, cancel_futures=True)

    def _plan(self, number: int) -> tuple[PlannedStep, str]:
        samples, cursor = self._reader.read(number)
        return self._planner.plan(number, samples), cursor


def _collated(collate: Collate, samples: Sequence[Sample], names: Sequence[int]) -> dict[str, Value]:
    """Whoever leads next would fail in the same way, so it must not look like a node that is lost. Raises DataError."""
    try:
        return collate(samples, names)
    except MMCompileError:
        raise
    except Exception as error:  # the user's own raises whatever it likes
        raise DataError(
            f"collate failed on samples {', '.join(map(str, names))} of a step: {type(error).__name__}: {error}"
        ) from error
