"""`ElasticController`: reads data and plans steps, one ahead, on rank 0 of a generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mmcompile.batching.step_planner import Collate, PlannedStep, StepPlanner
from mmcompile.data.collate import Sample, Value
from mmcompile.errors import DataError, MMCompileError
from mmcompile.planner.plan.placement import Placement
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.elastic.generation_layout import PipelineBalancer, shares_of
from mmcompile.runtime.elastic.generation_plan import GenerationPlan

_POLL_S = 0.02


class ElasticController:
    """Reads the samples of a generation's steps and plans the steps in order. While one step runs, a thread plans the next.

    Every worker has a controller, since any may become rank 0. Samples are kept until their step is committed.
    """

    def __init__(self, job: ElasticJob) -> None:
        self._job = job
        self._next: int | None = None
        """Step whose samples the data yields next; None if the position is unknown."""
        self._kept: dict[int, tuple[Sequence[Sample], str]] = {}
        """(samples, data cursor after them) of each kept step, by step."""
        self._planning: tuple[StepPlanner, ThreadPoolExecutor] | None = None
        """Planner of the generation's steps, and the thread on which it plans; None between generations."""
        self._upcoming: tuple[int, Future[tuple[PlannedStep, str]]] | None = None

    def start(self, plan: GenerationPlan, placement: Placement, committed: int, cursor: str | None) -> None:
        """Start a generation, and start to plan its first step.

        Args:
            committed: number of the last committed step.
            cursor: data cursor after that step; None for the start of the data.
        """
        self._kept = {step: kept for step, kept in self._kept.items() if step > committed}
        if committed + 1 not in self._kept and self._next != committed + 1:
            self._job.data.seek(cursor)
            self._next, self._kept = committed + 1, {}
        planner = StepPlanner(
            placement,
            self._job.patterns,
            collate=functools.partial(_collated, self._job.collate),
            balancer=PipelineBalancer(inner=self._job.balancer, shares=shares_of(plan.pipelines)),
            costs=self._job.costs,
        )
        self._planning = planner, ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-planner")
        self._upcoming = None
        # Copies take longer, and planning needs no state.
        self._plan_ahead(committed + 1)

    def step(self, number: int, check: Callable[[], None]) -> tuple[PlannedStep, str]:
        """Return the plan of a step, and the data cursor after it.

        Args:
            check: called while waiting for the plan; an exception it raises ends the wait.

        Raises:
            BatchError: samples do not fit the model, or the data cannot be read.
        """
        if self._upcoming is None or self._upcoming[0] != number:
            self._plan_ahead(number)
        assert self._upcoming is not None, f"step {number} of {self._job.num_steps}"
        future = self._upcoming[1]
        while not wait([future], timeout=_POLL_S).done:
            check()
        planned = future.result()
        self._plan_ahead(number + 1)
        return planned

    def close(self) -> None:
        """End the generation. Waits for the thread that plans the next step, which may still read data. Safe to call twice."""
        if self._planning is not None:
            self._planning[1].shutdown(wait=True, cancel_futures=True)
            self._planning = None

    def _plan_ahead(self, number: int) -> None:
        assert self._planning is not None, "no generation was started"
        planner, thread = self._planning
        if number > self._job.num_steps:
            self._upcoming = None
        else:
            self._upcoming = number, thread.submit(self._plan, planner, number)

    def _plan(self, planner: StepPlanner, number: int) -> tuple[PlannedStep, str]:
        samples, cursor = self._read(number)
        return planner.plan(number, samples), cursor

    def _read(self, step: int) -> tuple[Sequence[Sample], str]:
        for old in [kept for kept in self._kept if kept < step - 1]:
            del self._kept[old]
        while step not in self._kept:
            assert self._next is not None and self._next <= step, f"step {step} is asked for at {self._next}"
            self._kept[self._next] = self._job.data.read(), self._job.data.cursor()
            self._next += 1
        return self._kept[step]


def _collated(collate: Collate, samples: Sequence[Sample], names: Sequence[int]) -> dict[str, Value]:
    """Return the microbatch that the user's `collate` makes of samples with the numbers `names`.

    Raises DataError if `collate` fails. No node counts as lost then: the failure would recur on any node.
    """
    try:
        return collate(samples, names)
    except MMCompileError:
        raise
    except Exception as error:  # the user's own raises whatever it likes
        raise DataError(
            f"collate failed on samples {', '.join(map(str, names))} of a step: {type(error).__name__}: {error}"
        ) from error
