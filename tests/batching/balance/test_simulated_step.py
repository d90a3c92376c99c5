"""Simulated steps: closed forms, what no step can beat, replicas, deferral, the shape of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from support.oracles.check_schedule import check_units
from support.plans.hand_plan import Part, hand_plan

from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.assignment import ABSENT, Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.bucket_bounds import bottleneck, step_bound
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical
from mmcompile.batching.balance.post_balance import PostBalance
from mmcompile.batching.balance.simulated_step import StageShare, StepShape, simulate_step, step_time, step_units
from mmcompile.config import ScheduleKind
from mmcompile.costmodel.comm import p2p_seconds
from mmcompile.errors import ConfigError, PlanError, VerifyError
from mmcompile.planner.schedule.schedule import ActionKind, CrossEdge, schedule_units

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
WHOLE_BACKWARD: tuple[ScheduleKind, ...] = ("gpipe", "1f1b", "eager-1f1b")


def equal_shares(name: str, count: int, parts: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> tuple[StageShare, ...]:
    """Equal stages whose forward, input gradient and weight gradient are as `parts`."""
    forward, input_grad, weight_grad = (part / sum(parts) / count for part in parts)
    return tuple(
        StageShare(name=f"{name}.{index}", forward=forward, input_grad=input_grad, weight_grad=weight_grad)
        for index in range(count)
    )


def shape(schedule: ScheduleKind = "1f1b", link_s: float = 0.0, **counts: int) -> StepShape:
    """`shape(vision=2, language_model=3)`: that many equal stages of each."""
    return StepShape(
        stages={name: equal_shares(name, count) for name, count in counts.items()}, schedule=schedule, link_s=link_s
    )


def case(seed: int, *, encoders: int = 2, same_replicas: bool = False) -> tuple[SampleCosts, Grid, StepShape]:
    """A random step; samples lack some modalities."""
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, 40))
    names = (*(f"encoder{index}" for index in range(encoders)), "language_model")
    costs = rng.lognormal(size=(len(names), samples))
    costs[:-1] *= rng.random((encoders, samples)) < 0.7
    replicas = rng.integers(1, 4, size=len(names)).tolist()
    grid = Grid(
        num_replicas=(replicas[-1],) * len(names) if same_replicas else tuple(replicas),
        num_microbatches=int(rng.integers(1, 7)),
    )
    counts = dict(zip(names, rng.integers(1, 4, size=len(names)).tolist(), strict=True))
    return SampleCosts(components=names, costs=costs), grid, shape(link_s=float(rng.random()), **counts)


def random_assignment(seed: int, costs: SampleCosts, grid: Grid, most_lag: int) -> Assignment:
    rng = np.random.default_rng(seed)
    last = rng.integers(grid.num_microbatches, size=costs.num_samples)
    lags = rng.integers(most_lag + 1, size=costs.costs.shape)
    lags[-1] = 0
    replicas = [rng.integers(count, size=costs.num_samples) for count in grid.num_replicas]
    return assignment_of(costs, grid, replicas, np.maximum(last - lags, 0))


@pytest.mark.parametrize("kind", WHOLE_BACKWARD)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (3, 4), (4, 16)])
def test_equal_microbatches_of_one_component_take_n_plus_s_minus_1_turns(
    kind: ScheduleKind, stages: int, microbatches: int
) -> None:
    costs = SampleCosts(components=("language_model",), costs=np.full((1, microbatches), 3.0 * stages))
    grid = Grid(num_replicas=(1,), num_microbatches=microbatches)
    timeline = simulate_step(Arrival().assign(costs, grid), costs, shape(kind, language_model=stages))
    assert timeline.makespan_s == pytest.approx((microbatches + stages - 1) * 3.0)
    assert timeline.busy_s == pytest.approx((microbatches * 3.0,) * stages)


@pytest.mark.parametrize("kind", WHOLE_BACKWARD)
@pytest.mark.parametrize("replicas", [1, 3])
def test_an_encoder_lengthens_the_pipeline(kind: ScheduleKind, replicas: int) -> None:
    # Three stages of 2 s there and back: six turns to fill and drain less one, one for each microbatch.
    microbatches = 5
    costs = SampleCosts(
        components=("vision", "language_model"), costs=np.array([[2.0] * 15, [4.0] * 15])[:, : microbatches * replicas]
    )
    grid = Grid(num_replicas=(replicas, replicas), num_microbatches=microbatches)
    timeline = simulate_step(Arrival().assign(costs, grid), costs, shape(kind, vision=1, language_model=2))
    assert timeline.makespan_s == pytest.approx((microbatches + 2) * 2.0)
    assert len(timeline.busy_s) == 3 * replicas


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = SampleCosts(components=("vision", "language_model"), costs=np.array([[1.0] * 10, [6.0] * 10]))
    grid = Grid(num_replicas=(1, 1), num_microbatches=10)
    timeline = simulate_step(Arrival().assign(costs, grid), costs, shape(vision=1, language_model=1))
    assert timeline.makespan_s == pytest.approx(1.0 + 10 * 6.0)


def frozen_encoder() -> StepShape:
    """One stage that only runs forward, and one of the language model."""
    return StepShape(
        stages={
            "vision": equal_shares("vision", 1, (1.0, 0.0, 0.0)),
            "language_model": equal_shares("language_model", 1, (1.0, 1.0, 0.0)),
        }
    )


def deferring(late: int) -> tuple[SampleCosts, Assignment]:
    """Samples 0, 1, 2 in the encoder's first microbatch, 3 in the second; sample 2 in the language model's `late`."""
    costs = SampleCosts(
        components=("vision", "language_model"), costs=np.array([[1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    )
    grid = Grid(num_replicas=(1, 1), num_microbatches=2)
    return costs, assignment_of(costs, grid, 0, np.array([[0, 0, 0, 1], [0, 0, late, 1]]))


def test_deferral_by_hand() -> None:
    costs, together = deferring(0)
    assert simulate_step(together, costs, frozen_encoder()).makespan_s == 3.0 + 6.0 + 2.0
    costs, deferred = deferring(1)
    timeline = simulate_step(deferred, costs, frozen_encoder())
    # The first two samples are handed over before the deferred one is encoded.
    when = {(e.stage, e.kind, e.microbatch): (e.start_s, e.end_s) for e in timeline.events if e.kind.is_compute}
    assert when == {
        ("vision.0", ActionKind.F, 0): (0.0, 2.0),
        ("vision.0", ActionKind.F, 2): (2.0, 3.0),
        ("vision.0", ActionKind.F, 1): (3.0, 6.0),
        ("language_model.0", ActionKind.F, 0): (2.0, 4.0),
        ("language_model.0", ActionKind.B, 0): (4.0, 6.0),
        ("language_model.0", ActionKind.F, 1): (6.0, 8.0),
        ("language_model.0", ActionKind.B, 1): (8.0, 10.0),
    }
    assert timeline.makespan_s == 10.0


def test_units_of_a_step_with_other_samples_on_either_side() -> None:
    costs = SampleCosts(
        components=("vision", "language_model"), costs=np.array([[1.0, 1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    )
    grid = Grid(num_replicas=(1, 2), num_microbatches=2)
    assignment = assignment_of(
        costs, grid, np.array([[0] * 5, [0, 1, 0, 1, 0]]), np.array([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]])
    )
    stages, units, edges = step_units(assignment, shape(vision=1, language_model=2))
    assert [(stage.name, stage.ranks, stage.depth, stage.tower, stage.replica, stage.program) for stage in stages] == [
        ("vision.0", (0,), 2, "vision", 0, "vision.0"),
        ("language_model.0#0", (1,), 1, "language_model", 0, "language_model.0"),
        ("language_model.1#0", (2,), 0, "language_model", 0, "language_model.1"),
        ("language_model.0#1", (3,), 1, "language_model", 1, "language_model.0"),
        ("language_model.1#1", (4,), 0, "language_model", 1, "language_model.1"),
    ]
    # Sample 3 waits for a slot: number 0 + 1 * 2.
    assert [(unit.flow.stages[0], unit.number, unit.slot, unit.backward_slot) for unit in units] == [
        ("vision.0", 0, 0, 0),
        ("vision.0", 1, 1, 1),
        ("vision.0", 2, 0, 1),
        ("language_model.0#0", 0, 0, 0),
        ("language_model.0#0", 1, 1, 1),
        ("language_model.0#1", 0, 0, 0),
        ("language_model.0#1", 1, 1, 1),
    ]
    assert edges == tuple(
        CrossEdge(source=("vision.0", source), target=(f"language_model.0#{replica}", target), gradient=True)
        for source, replica, target in [(0, 0, 0), (0, 1, 0), (1, 0, 1), (2, 1, 1)]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(25))
def test_a_step_does_all_the_work_and_is_no_shorter_than_what_must_follow_in_it(kind: ScheduleKind, seed: int) -> None:
    costs, grid, form = case(seed)
    form = replace(form, schedule=kind)
    assignment = random_assignment(seed, costs, grid, most_lag=seed % 3)
    stages, units, edges = step_units(assignment, form)
    schedule = schedule_units(stages, units, edges, kind, num_slots=grid.num_microbatches)
    check_units(schedule, units, edges)
    timeline = simulate_step(assignment, costs, form)
    assert sum(timeline.busy_s) == pytest.approx(costs.costs.sum())
    assert timeline == simulate_step(assignment, costs, form)
    quick = simulate_step(assignment, costs, form, record=False)
    assert (quick.events, quick.makespan_s) == ((), timeline.makespan_s)
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-9
    if kind in WHOLE_BACKWARD:
        # A sample is encoded, goes through the language model, and back.
        assert timeline.makespan_s >= costs.costs.max(axis=0).max() - 1e-9
        both = np.where(costs.takes_part[:-1], costs.costs[:-1] + costs.costs[-1] + 2 * form.link_s, 0.0)
        assert timeline.makespan_s >= both.max(initial=0.0) - 1e-9


@pytest.mark.parametrize("kind", WHOLE_BACKWARD)
@pytest.mark.parametrize("seed", range(25))
def test_no_step_without_deferral_is_below_the_bound(kind: ScheduleKind, seed: int) -> None:
    # A microbatch goes through all stages of its component and back, so its load cannot be beaten. One that defers is two,
    # which follow one another through the stages; and half a backward need not be waited for.
    costs, grid, form = case(seed)
    for assignment in (
        random_assignment(seed, costs, grid, most_lag=0),
        PostBalance().assign(costs, grid),
        Hierarchical(defer=Defer.NONE).assign(costs, grid),
    ):
        step_s = simulate_step(assignment, costs, replace(form, schedule=kind), record=False).makespan_s
        assert step_s >= bottleneck(assignment, costs) - 1e-9
        assert step_s >= step_bound(costs, grid) - 1e-9


def test_a_microbatch_that_defers_is_two_and_may_be_below_the_bound() -> None:
    # Three parts follow one another through eight stages of the encoder: (3 + 8 - 1) / 8 of a part instead of half of the work.
    costs = SampleCosts(components=("vision", "language_model"), costs=np.array([[8.0] * 3, [1e-6] * 3]))
    grid = Grid(num_replicas=(1, 1), num_microbatches=2)
    assignment = assignment_of(costs, grid, 0, np.array([[0, 0, 1], [0, 1, 1]]))
    step_s = simulate_step(assignment, costs, shape(vision=8, language_model=1)).makespan_s
    assert step_s == pytest.approx(10.0, abs=1e-4)
    assert step_s < step_bound(costs, grid) == 16.0


@pytest.mark.parametrize("seed", range(15))
def test_time_is_in_the_unit_of_the_costs_and_never_falls_when_a_sample_gets_heavier(seed: int) -> None:
    costs, grid, form = case(seed)
    assignment = random_assignment(seed, costs, grid, most_lag=2)
    step_s = step_time(form)(assignment, costs)
    doubled = SampleCosts(components=costs.components, costs=costs.costs * 2)
    assert step_time(replace(form, link_s=form.link_s * 2))(assignment, doubled) == pytest.approx(2 * step_s)
    heavier = costs.costs.copy()
    heavier[:, seed % costs.num_samples] *= 1.5
    assert step_time(form)(assignment, SampleCosts(components=costs.components, costs=heavier)) >= step_s - 1e-9


@pytest.mark.parametrize("seed", range(15))
def test_replicas_that_exchange_nothing_are_steps_of_their_own(seed: int) -> None:
    costs, grid, form = case(seed, same_replicas=True)
    assignment = Hierarchical(defer=Defer.ALL).assign(costs, grid)
    alone = Grid(num_replicas=(1,) * len(costs.components), num_microbatches=grid.num_microbatches)
    steps: list[float] = []
    for replica in range(grid.num_replicas[-1]):
        mine = np.flatnonzero((assignment.replica[-1] == replica) | (assignment.replica[0] == replica))
        part = SampleCosts(components=costs.components, costs=costs.costs[:, mine])
        own = assignment_of(part, alone, 0, assignment.microbatch[:, mine])
        steps.append(simulate_step(own, part, form, record=False).makespan_s)
    assert simulate_step(assignment, costs, form, record=False).makespan_s == pytest.approx(max(steps))


@pytest.mark.parametrize("seed", range(10))
def test_auto_takes_the_simulated_step_as_its_clock(seed: int) -> None:
    costs, grid, form = case(seed)
    clock = step_time(form)
    choice = Auto(step_time=clock, keep_below=0.0, candidates=(PostBalance(), Hierarchical(defer=Defer.ALL))).choose(
        costs, grid
    )
    assert choice.step_s == clock(choice.assignment, costs)
    assert choice.step_s <= clock(Arrival().assign(costs, grid), costs) == choice.arrival_s


def test_a_component_without_samples_costs_nothing_and_is_waited_for_by_nobody() -> None:
    costs = SampleCosts(components=("vision", "language_model"), costs=np.array([[0.0] * 4, [3.0] * 4]))
    grid = Grid(num_replicas=(2, 1), num_microbatches=4)
    timeline = simulate_step(Arrival().assign(costs, grid), costs, shape(vision=2, language_model=3, link_s=0.5))
    assert timeline.busy_s == pytest.approx((0.0,) * 4 + (4.0,) * 3)
    alone = SampleCosts(components=("language_model",), costs=costs.costs[1:])
    single = Grid(num_replicas=(1,), num_microbatches=4)
    assert timeline.makespan_s == pytest.approx(
        simulate_step(Arrival().assign(alone, single), alone, shape(language_model=3, link_s=0.5)).makespan_s
    )


def test_a_frozen_encoder_gets_no_gradient_and_a_frozen_projector_hands_it_on() -> None:
    _, assignment = deferring(1)
    vision = (
        StageShare(name="vision.0", forward=0.25, input_grad=0.0, weight_grad=0.25),
        StageShare(name="projector.0", forward=0.25, input_grad=0.25, weight_grad=0.0),
    )
    frozen = frozen_encoder()
    _, units, edges = step_units(assignment, frozen)
    assert not any(edge.gradient for edge in edges)
    assert units[0].flow.backward == ()
    _, units, edges = step_units(assignment, replace(frozen, stages={**frozen.stages, "vision": vision}))
    assert all(edge.gradient for edge in edges)
    assert units[0].flow.backward == ("vision.0", "projector.0")


def test_messages_take_their_time() -> None:
    costs, assignment = deferring(1)
    late = replace(frozen_encoder(), link_s=0.5)
    assert simulate_step(assignment, costs, late).makespan_s == 10.5


@pytest.mark.parametrize("schedule", KINDS)
def test_the_shape_of_a_plan(schedule: ScheduleKind) -> None:
    plan = hand_plan(
        [
            Part(name="vision", layers=6, stages=2, trains=False),
            Part(name="audio", layers=3, stages=1, dp=3),
            Part(name="language_model", layers=8, stages=3, dp=2),
        ]
    )
    found = StepShape.of(replace(plan, schedule=schedule))
    assert {name: [share.name for share in shares] for name, shares in found.stages.items()} == {
        "vision": ["vision.0", "vision.1"],
        "audio": ["audio.0"],
        "language_model": ["language_model.0", "language_model.1", "language_model.2"],
    }
    assert list(found.stages) == ["vision", "audio", "language_model"]
    assert [share.forward for share in found.stages["vision"]] == pytest.approx([0.5, 0.5])
    assert [share.backward for share in found.stages["vision"]] == [0.0, 0.0]
    last = [(share.forward, share.input_grad, share.weight_grad) for share in found.stages["language_model"]]
    assert last == [pytest.approx((layers / 24,) * 3) for layers in (3, 3, 2)]
    ends = [(plan.stage(link.source).ranks[0], plan.stage(link.target).ranks[0]) for link in plan.links]
    seconds = [p2p_seconds(16 << 20, plan.cluster.between(*pair)) for pair in ends]
    assert found.link_s == pytest.approx(sum(seconds) / len(seconds))
    assert found.schedule == schedule


def test_a_plan_without_predictions_is_refused() -> None:
    plan = hand_plan(
        [Part(name="vision", layers=2, stages=1, layer_s=0.0), Part(name="language_model", layers=2, stages=1)]
    )
    with pytest.raises(PlanError, match="the stages of vision are predicted to take no time"):
        StepShape.of(plan)


def test_what_cannot_be_simulated_is_named() -> None:
    costs, assignment = deferring(1)
    with pytest.raises(
        ConfigError, match="stages of audio, language_model for an assignment to vision, language_model"
    ):
        simulate_step(assignment, costs, shape(audio=1, language_model=1))
    with pytest.raises(ConfigError, match="shares of vision's 1 stages add up to 0.5"):
        StepShape(stages={"vision": (StageShare(name="v", forward=0.5, input_grad=0.0, weight_grad=0.0),)})
    with pytest.raises(ConfigError, match="shares of vision's 0 stages add up to 0"):
        StepShape(stages={"vision": ()})
    with pytest.raises(ConfigError, match="0 components"):
        StepShape(stages={})
    with pytest.raises(ConfigError, match="messages of -1 s"):
        replace(frozen_encoder(), link_s=-1)
    early = Assignment(
        components=assignment.components,
        grid=assignment.grid,
        replica=assignment.replica,
        microbatch=np.array([[0, 0, 1, 1], [0, 0, 0, 1]]),
    )
    with pytest.raises(VerifyError, match="sample 2 is in microbatch 0 of language_model and in the later 1 of vision"):
        step_units(early, frozen_encoder())
    lost = Assignment(
        components=assignment.components,
        grid=assignment.grid,
        replica=np.where(np.arange(4) == 1, ABSENT, assignment.replica),
        microbatch=np.where(np.arange(4) == 1, ABSENT, assignment.microbatch),
    )
    with pytest.raises(VerifyError, match="sample 1 takes part in vision and is in none of its microbatches"):
        simulate_step(lost, costs, frozen_encoder())
