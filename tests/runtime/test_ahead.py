"""`engine.train` plans the next step while one runs: shown by files that one waits for and the other makes, not by clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import pytest
from support.graphs.hand_stages import HandModel, HandSource, hand_plan, hand_samples
from support.processes.time_limit import Hung, time_limit

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.data.collate import Sample
from mmcompile.errors import BatchError, EngineError
from mmcompile.runtime.engine import Engine

NUM_STEPS = 4
PLANNING_S = 0.2

WAIT = """self.calls = getattr(self, 'calls', 0) + 1
        import pathlib, time
        planned, deadline = pathlib.Path('FOLDER', f'planned{self.calls + 1}'), time.monotonic() + 10
        while self.calls < STEPS and not planned.exists():
            assert time.monotonic() < deadline, f'step {self.calls} ends before the next one is planned'
            time.sleep(0.001)"""
"""Put into a stage: it does not end in step n before step n + 1 was planned."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Slow(Balancer):
    """Arrival order after a while; leaves a file `planned1`, `planned2`, ... each time."""

    name: ClassVar[str] = "slow"

    folder: Path
    seconds: float

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        time.sleep(self.seconds)
        number = len(list(self.folder.glob("planned*"))) + 1
        (self.folder / f"planned{number}").touch()
        return Arrival().assign(costs, grid)


def slow_engine(folder: Path, **ranks: int) -> Engine:
    fault = WAIT.replace("FOLDER", str(folder)).replace("STEPS", str(NUM_STEPS))
    plan = hand_plan(1, **ranks)
    return Engine(plan, HandSource(HandModel(), fault), balancer=Slow(folder=folder, seconds=PLANNING_S))


def batches(read: list[int]) -> Iterator[list[Sample]]:
    for number in range(NUM_STEPS):
        read.append(number)
        yield hand_samples(2 + number, seed=number)


@pytest.mark.parametrize("ranks", [{"lm0": 0, "lm1": 0, "lm2": 0}, {"lm0": 0, "lm1": 1, "lm2": 0}])
def test_the_next_step_is_planned_while_one_runs(tmp_path: Path, ranks: dict[str, int]) -> None:
    read: list[int] = []
    steps = []
    with time_limit(60), slow_engine(tmp_path, **ranks) as engine:
        for metrics in engine.train(batches(read)):
            steps.append(metrics)
            assert len(read) == min(len(steps) + 1, NUM_STEPS)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.num_samples for step in steps] == [2, 3, 4, 5]
    assert all(step.planning_s >= PLANNING_S for step in steps)
    assert steps[0].waited_s > PLANNING_S / 2  # nothing ran before it
    # The step before does not end until the balancer has slept: at least so much of the planning was not waited for.
    assert all(step.waited_s < step.planning_s - PLANNING_S / 2 for step in steps[1:])


def test_single_steps_wait_for_their_plan(tmp_path: Path) -> None:
    with Engine(
        hand_plan(1, lm0=0, lm1=0, lm2=0), HandSource(HandModel()), balancer=Slow(folder=tmp_path, seconds=PLANNING_S)
    ) as engine:
        metrics = engine.step(hand_samples(2))
    assert metrics.waited_s == metrics.planning_s >= PLANNING_S


def test_training_ahead_trains_as_single_steps_do(tmp_path: Path) -> None:
    model = HandModel()
    plan = hand_plan(2, lm0=0, lm1=0, lm2=0)
    data = list(batches([]))
    with Engine(plan, HandSource(model), model=model) as engine:
        ahead = [step.loss for step in engine.train(data)]
    with Engine(plan, HandSource(model), model=model) as engine:
        single = [engine.step(samples).loss for samples in data]
    assert ahead == single


def test_samples_that_do_not_fit_end_training_where_they_are() -> None:
    """The steps before it are done; the engine goes on."""
    data = [*batches([])][:2]
    with Engine(hand_plan(2, lm0=0, lm1=0, lm2=0), HandSource(HandModel())) as engine:
        training = engine.train([data[0], [], data[1]])
        assert next(training).step == 1
        with pytest.raises(BatchError, match="at least one sample"):
            next(training)
        assert engine.step(data[1]).step == 2


def test_a_limit_stops_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    """What the limit of other tests does to a hang: here a stage sleeps."""
    engine = Engine(hand_plan(1, lm0=0, lm1=1, lm2=0), HandSource(HandModel(), "import time; time.sleep(60)"))
    start = time.monotonic()
    with pytest.raises(Hung, match="still running after 1 s"), time_limit(1.0):
        engine.step(hand_samples(2))
    assert time.monotonic() - start < 10
    with pytest.raises(EngineError, match="interrupted by Hung"):
        engine.step(hand_samples(2))
    engine.close()
