"""Real processes that fail at exact moments: training ends with the same bits as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch
from control_jobs import Act
from elastic_jobs import BATCH, BROKEN, KINDS, MICROBATCHES, SAMPLES, Answer, Data, Run, Runs, batches
from safetensors.torch import load_file
from torch import Tensor

from mmcompile.runtime import checkpoint
from mmcompile.runtime.control.effects import EventKind
from mmcompile.runtime.control.events import Event, read_events, recoveries
from mmcompile.runtime.control.fail_points import Action, Strike
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.data import MapBatches
from mmcompile.runtime.elastic.generation_plan import GenerationPlan
from mmcompile.runtime.elastic.record import StepRecord

SLOW = pytest.mark.slow
LEASE = 10.0
"""Deadline where a silent process must be waited for; the lease is a fifth of it."""
STEP_S = 0.03


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """What a run learned."""

    steps: Mapping[int, tuple[float, float | None, int, int]]
    """Loss, gradient norm, tokens and samples of each step."""
    digests: Mapping[str, str]
    """Layer -> parameters and optimizer state."""
    tensors: Mapping[str, Tensor]
    """Of the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chaos:
    """Runs, and what they must come to."""

    runs: Runs
    folder: Path
    _known: dict[tuple[int, Data, int], Trained] = field(default_factory=dict, repr=False)

    def reference(self, run: Run) -> Trained:
        """What the model learns if nothing fails. It does not depend on the pipelines."""
        devices = KINDS[run.kind].devices
        key = devices, run.data, run.num_steps
        if key not in self._known:
            folder = self.folder / "-".join(map(str, key))
            calm = Run(folder=str(folder), kind="wide" if devices == 2 else "five", data=run.data, num_steps=run.num_steps)
            assert self.runs.do(calm).error == ""
            assert not [event for event in read_events(folder / "events.jsonl") if event.kind is EventKind.DETECTED]
            self._known[key] = trained(folder)
        return self._known[key]


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with Runs() as runs:
        yield Chaos(runs=runs, folder=tmp_path_factory.mktemp("reference"))


def trained(folder: Path) -> Trained:
    committed = [event for event in read_events(folder / "events.jsonl") if event.kind is EventKind.COMMITTED]
    return Trained(
        steps=dict(map(figures_of, committed)),
        digests=json.loads((folder / "digests.json").read_text()),
        tensors=load_file(folder / "checkpoint" / "trainer.safetensors"),
    )


def figures_of(event: Event) -> tuple[int, tuple[float, float | None, int, int]]:
    """The step of a commit, and what rank 0 said of it."""
    assert event.cursor is not None and event.step is not None
    metrics = StepRecord.decode(event.cursor).metrics
    assert metrics.step == event.step
    return event.step, (metrics.loss, metrics.grad_norm, metrics.num_tokens, metrics.num_samples)


def strike(
    run: Run,
    point: str,
    action: str = "kill",
    *,
    rank: int | None = None,
    step: int | None = None,
    generation: int | None = None,
) -> Run:
    """The run with one more fault, which strikes once."""
    marker = str(Path(run.folder) / f"struck-{len(run.strikes)}")
    fault = Strike(point=point, action=Action(action), rank=rank, step=step, generation=generation, marker=marker)
    return replace(run, strikes=(*run.strikes, fault))


def check(chaos: Chaos, run: Run, *, left: int, steps: Sequence[int] | None = None) -> list[Event]:
    """Do a run and check everything that holds for all.

    Args:
        left: nodes of the last generation.
        steps: that are committed, in order; by default each once.
    """
    folder = Path(run.folder)
    answer = chaos.runs.do(run)
    events = list(read_events(folder / "events.jsonl"))
    assert answer.error == "", [event for event in events if event.cause][-5:]
    for fault in run.strikes:
        assert fault.marker is None or Path(fault.marker).exists(), f"{fault} did not strike"
    check_steps(events, answer, steps or range(1, run.num_steps + 1), run.data)
    wanted, found = chaos.reference(run), trained(folder)
    figures = [figures_of(event) for event in events if event.kind is EventKind.COMMITTED]
    assert figures == [(step, wanted.steps[step]) for step, _ in figures]
    assert found.digests == wanted.digests
    check_tensors(found.tensors, wanted.tensors)
    members, plan = last_generation(folder)
    assert len(members) == left
    planned = [node for pipeline in plan.pipelines for node in pipeline.nodes] + [idle.node for idle in plan.idle]
    assert sorted(planned) == sorted(members), "each node is in one pipeline, or idle for a reason"
    if not run.max_restarts:
        lost = {event.node for event in events if event.kind is EventKind.DETECTED}
        joined = {act.node for act in run.acts if act.do == "add"}
        assert not lost & set(members) - joined
    return events


def check_steps(events: Sequence[Event], answer: Answer, steps: Sequence[int], data: Data) -> None:
    """Steps, microbatches and samples are what they must be; generations never go back."""
    committed = [event for event in events if event.kind is EventKind.COMMITTED]
    assert [event.step for event in committed] == list(steps)
    assert answer.steps == tuple(steps)
    for event in committed:
        step, (*_, num_samples) = figures_of(event)
        assert event.microbatches == tuple(range((step - 1) * MICROBATCHES, step * MICROBATCHES))
        assert num_samples == BATCH
        assert event.cursor is not None
        assert taken(StepRecord.decode(event.cursor).data) == step * BATCH
    read = batches(data)
    if isinstance(read, MapBatches):
        used = [index for step in sorted(set(steps)) for index in read.indices(step)]
        for first in range(0, len(used) - SAMPLES, SAMPLES):
            assert Counter(used[first : first + SAMPLES]) == Counter(range(SAMPLES))
    started = [event.generation for event in events if event.kind is EventKind.PREPARE]
    assert started == sorted(set(started))
    seen = [event.generation for event in committed]
    assert seen == sorted(seen)


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted.keys() > {"weight/model.language_model.norm.weight"}
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def taken(cursor: str) -> int:
    """Samples that were read before a cursor."""
    where = json.loads(cursor)
    return where["step"] * BATCH if "step" in where else where["epoch"] * SAMPLES + where["taken"]


def last_generation(folder: Path) -> tuple[list[str], GenerationPlan]:
    """Nodes and plan of the last generation that was active."""
    log = Log.open(folder / "coordinator.log")
    log.close()
    assert log.history.active is not None
    return [member.node for member in log.history.active.members], GenerationPlan.decode(log.history.active.payload)


def quick(run: Run, events: Sequence[Event]) -> None:
    """No wait reached its time: all are far longer than this."""
    total_s = sum(recovery.total_s for recovery in recoveries(events))
    assert 0 < total_s < Times(recovery_deadline_s=run.deadline_s).lease_s, total_s


def cases(core: Sequence[tuple[str, int]], points: Sequence[str], ranks: Sequence[int]) -> list[object]:
    """All points with all ranks; those that are not core are slow."""
    slow = [(point, rank) for point in points for rank in ranks if (point, rank) not in core]
    return [*core, *(pytest.param(point, rank, marks=SLOW) for point, rank in slow)]


IN_A_STEP = (
    "before-step",
    "receive",
    "backward",
    "reducing",
    "reduced",
    "committed",
    "optimizer",
    "applied",
)
"""Moments of every rank in a step."""


def test_the_pipelines_do_not_matter(chaos: Chaos, tmp_path: Path) -> None:
    """The reference runs on two unlike pipelines; here are three."""
    run = Run(folder=str(tmp_path), kind="six")
    events = check(chaos, run, left=6)
    _, plan = last_generation(tmp_path)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [2, 2, 2]
    assert not [event for event in events if event.kind is EventKind.DETECTED]


@pytest.mark.parametrize(
    ("point", "rank"),
    cases(
        [("receive", 4), ("backward", 1), ("reducing", 3), ("committed", 2), ("optimizer", 0)],
        IN_A_STEP,
        range(5),
    ),
)
def test_killed_in_a_step(chaos: Chaos, tmp_path: Path, point: str, rank: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), point, rank=rank, step=4)
    events = check(chaos, run, left=4)
    (recovery,) = recoveries(events)
    assert "SIGKILL" in recovery.cause
    assert recovery.num_attempts == 1
    quick(run, events)
    replayed = [event.step for event in events if event.kind is EventKind.REPLAYED]
    assert replayed == [4 if point in IN_A_STEP[:5] else 5]


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("exception", "InjectedFault: fault injected at backward"),
        ("stop", "was silent for"),
        pytest.param("exit", "ended with exit code 7", marks=SLOW),
        pytest.param("segfault", "SIGSEGV", marks=SLOW),
        pytest.param("gil", "was silent for", marks=SLOW),
    ],
)
def test_other_ways_to_fail(chaos: Chaos, tmp_path: Path, action: str, cause: str) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", deadline_s=LEASE), "backward", action, rank=3, step=4)
    (recovery,) = recoveries(check(chaos, run, left=4))
    assert cause in recovery.cause
    assert recovery.total_s < LEASE


@SLOW
def test_a_slow_worker_is_no_failure(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", deadline_s=LEASE), "backward", "sleep", rank=3, step=4)
    events = check(chaos, run, left=5)
    assert not [event for event in events if event.kind is EventKind.DETECTED]


def test_a_stopped_node_that_wakes_up_is_kept_out(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="stop_node", node="b"), Act(after="replayed", do="cont_node", node="b"))
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, deadline_s=LEASE, acts=acts)
    events = check(chaos, run, left=4)
    assert [event.cause for event in events if event.kind is EventKind.REFUSED and "given up" in (event.cause or "")]


@SLOW
def test_a_stopped_node_that_never_wakes_up(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="stop_node", node="b"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, deadline_s=LEASE, acts=acts)
    check(chaos, run, left=4)


def test_a_pipeline_dies_as_a_whole(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="six")
    for rank in (2, 3):
        run = strike(run, "backward", rank=rank, step=4)
    quick(run, check(chaos, run, left=4))


@pytest.mark.parametrize(
    "ranks", [(0, 3), pytest.param((1, 5), marks=SLOW), pytest.param((2, 4), marks=SLOW), pytest.param((1, 2), marks=SLOW)]
)
def test_two_die_at_once_in_different_pipelines(chaos: Chaos, tmp_path: Path, ranks: tuple[int, int]) -> None:
    run = Run(folder=str(tmp_path), kind="six")
    for rank in ranks:
        run = strike(run, "before-step", rank=rank, step=4)
    quick(run, check(chaos, run, left=4))


@SLOW
def test_an_idle_node_steps_in(chaos: Chaos, tmp_path: Path) -> None:
    """Five nodes are two pipelines of two; the fifth waits, and knows nothing of what trains."""
    run = strike(Run(folder=str(tmp_path), kind="six"), "backward", rank=1, step=3)
    run = strike(run, "backward", rank=3, step=5)
    events = check(chaos, run, left=4)
    assert len(recoveries(events)) == 2
    quick(run, events)


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=SLOW)])
def test_workers_of_a_node_die_together(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="wide"), "backward", rank=rank, step=4)
    quick(run, check(chaos, run, left=2))


@pytest.mark.parametrize(
    ("point", "rank"),
    cases(
        [("superseded", 6), ("sending", -1), ("receiving", -1), ("active", 0)],
        ("superseded", "prepared", "connected", "copied", "active"),
        (0, 3, 4),
    ),
)
def test_killed_while_another_failure_is_recovered(chaos: Chaos, tmp_path: Path, point: str, rank: int) -> None:
    """The first one, in the middle of the pipeline of three, makes others send layers."""
    run = strike(Run(folder=str(tmp_path), kind="seven"), "backward", rank=5, step=4)
    if rank < 0:
        run = strike(run, point)
    else:
        run = strike(run, point, rank=rank, generation=1 if point == "superseded" else 2)
    quick(run, check(chaos, run, left=5))


@pytest.mark.parametrize("point", ["prepared", "connected", "copied", "active"])
@SLOW
def test_killed_while_the_first_generation_is_made(chaos: Chaos, tmp_path: Path, point: str) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", max_restarts=1, step_s=0.1), point, rank=1, generation=1)
    check(chaos, run, left=5)


@pytest.mark.parametrize("rank", ["1", "6"])
@SLOW
def test_killed_while_others_get_ready(chaos: Chaos, tmp_path: Path, rank: str) -> None:
    """Rank 0 takes its time; the one that is lost waits for it, with all state in place."""
    acts = (Act(after='"kind":"rendezvous","generation":2', do="kill_agent", node=rank, pause_s=0.5),)
    run = strike(Run(folder=str(tmp_path), kind="seven", acts=acts), "backward", rank=5, step=4)
    fault = Strike(point="copied", action=Action.SLEEP, rank=0, generation=2, seconds=2.0)
    quick(run, check(chaos, replace(run, strikes=(*run.strikes, fault)), left=5))


@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [
        ("saving", 0, 4),
        pytest.param("gathering", 0, 4, marks=SLOW),
        pytest.param("gathering", 3, 4, marks=SLOW),
        pytest.param("saving", 0, 6, marks=SLOW),
        pytest.param("gathering", 2, 6, marks=SLOW),
    ],
)
def test_killed_while_saving(chaos: Chaos, tmp_path: Path, point: str, rank: int, step: int) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five", save_every=2), point, rank=rank, step=step)
    events = check(chaos, run, left=4)
    assert checkpoint.read(tmp_path / "checkpoint").trainer.step == run.num_steps
    assert not list(tmp_path.glob("checkpoint.*")), "what was half written is gone"
    if step < run.num_steps:
        quick(run, events)


@pytest.mark.parametrize("rank", range(5))
@SLOW
def test_killed_after_the_last_step(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    check(chaos, strike(Run(folder=str(tmp_path), kind="five"), "before-finish", rank=rank), left=4)


def test_lost_state_comes_back_from_the_checkpoint(chaos: Chaos, tmp_path: Path) -> None:
    """Both nodes that hold the first layers are lost; step 6, done after the checkpoint, is done again."""
    run = Run(folder=str(tmp_path), kind="five", num_steps=8, save_every=4, max_restarts=1, step_s=0.1)
    run = strike(run, "reduced", rank=1, step=7)
    run = strike(run, "superseded", rank=3, generation=1)
    events = check(chaos, run, left=5, steps=[1, 2, 3, 4, 5, 6, 5, 6, 7, 8])
    (back,) = [event for event in events if event.kind is EventKind.ROLLED_BACK]
    assert back.step == 4
    assert "no node holds language_model" in (back.cause or "")


@SLOW
def test_all_nodes_die_and_come_back(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="five", num_steps=8, save_every=2, max_restarts=1, step_s=0.1)
    run = strike(run, "backward", rank=0, step=6)
    for rank in (1, 2, 3, 4):
        run = strike(run, "superseded", rank=rank, generation=1)
    check(chaos, run, left=5, steps=[1, 2, 3, 4, 5, 5, 6, 7, 8])


@SLOW
def test_lost_state_while_saving_comes_back_from_the_checkpoint_before(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="five", num_steps=8, save_every=2, max_restarts=1, step_s=0.1)
    run = strike(run, "saving", rank=0, step=4)
    for rank in (1, 3):
        run = strike(run, "superseded", rank=rank, generation=1)
    check(chaos, run, left=5, steps=[1, 2, 3, 4, 3, 4, 5, 6, 7, 8])


@SLOW
def test_lost_state_before_the_first_checkpoint(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), "reduced", rank=1, step=4)
    run = strike(run, "superseded", rank=3, generation=1)
    answer = chaos.runs.do(run)
    assert "no node holds language_model" in answer.error
    assert "there is no checkpoint" in answer.error
    assert answer.steps == (1, 2, 3)


def test_too_few_nodes_save_what_they_hold(chaos: Chaos, tmp_path: Path) -> None:
    run = strike(Run(folder=str(tmp_path), kind="five"), "backward", rank=4, step=3)
    run = strike(run, "backward", rank=1, step=6)
    answer = chaos.runs.do(run)
    assert "3 nodes are left and 4 are needed" in answer.error
    assert "step 5 is saved in" in answer.error
    assert answer.steps == (1, 2, 3, 4, 5)
    wanted = chaos.reference(replace(run, num_steps=5))
    check_tensors(load_file(tmp_path / "checkpoint" / "trainer.safetensors"), wanted.tensors)
    saved = checkpoint.read(tmp_path / "checkpoint").trainer
    assert saved.step == 5
    assert saved.cursor is not None
    assert taken(StepRecord.decode(saved.cursor).data) == 5 * BATCH


@SLOW
@pytest.mark.parametrize("point", ["gathering", "copied"])
def test_a_node_dies_while_the_state_is_saved_at_last(chaos: Chaos, tmp_path: Path, point: str) -> None:
    """Of the larger pipeline, which ran alone at the end, all nodes are needed; of the other one is left."""
    run = strike(Run(folder=str(tmp_path), kind="five"), "backward", rank=0, step=3)
    run = strike(run, "committed", rank=3, step=5)
    run = strike(run, point, rank=0, generation=None if point == "gathering" else 3)
    answer = chaos.runs.do(run)
    assert "2 nodes are left and 4 are needed" in answer.error
    assert "step 5 is saved in" in answer.error
    wanted = chaos.reference(replace(run, num_steps=5))
    check_tensors(load_file(tmp_path / "checkpoint" / "trainer.safetensors"), wanted.tensors)


@pytest.mark.parametrize("how", ["worker", pytest.param("agent", marks=SLOW)])
def test_a_node_with_notice_leaves_after_its_step(chaos: Chaos, tmp_path: Path, how: str) -> None:
    run = Run(folder=str(tmp_path), kind="five")
    if how == "worker":
        run = strike(run, "backward", "term", rank=3, step=4)
    else:
        run = replace(run, num_steps=16, step_s=STEP_S, acts=(Act(after='"step":4', do="drain", node="b"),))
    events = check(chaos, run, left=4)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]
    (recovery,) = recoveries(events)
    assert "must go" in recovery.cause
    quick(run, events)


def test_a_node_joins(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="add", node="z"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, acts=acts)
    events = check(chaos, run, left=6)
    assert not [event for event in events if event.kind is EventKind.REPLAYED]
    _, plan = last_generation(tmp_path)
    assert [len(pipeline.nodes) for pipeline in plan.pipelines] == [2, 2, 2]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=SLOW)])
def test_a_killed_node_comes_back(chaos: Chaos, tmp_path: Path, rank: int) -> None:
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, max_restarts=1)
    run = strike(run, "reduced", rank=rank, step=4)
    assert len(recoveries(check(chaos, run, left=5))) == 2


def test_bad_data_ends_training(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="five", data="broken")
    answer = chaos.runs.do(run)
    assert f"sample {BROKEN}" in answer.error
    assert f"no such image: {BROKEN}.png" in answer.error
    events = list(read_events(tmp_path / "events.jsonl"))
    assert not [event for event in events if event.kind is EventKind.DETECTED], "no node is to blame"
    order = MapBatches(range(SAMPLES), BATCH, 0)  # pyright: ignore[reportArgumentType]
    first = next(step for step in range(1, 9) if BROKEN in order.indices(step))
    assert first > 1
    assert answer.steps == tuple(range(1, first))


@SLOW
def test_what_no_node_can_compute_ends_training(chaos: Chaos, tmp_path: Path) -> None:
    """A token that is no word: it looks like a node that fails, and then like the next one."""
    run = Run(folder=str(tmp_path), kind="five", data="poisoned", max_restarts=8, max_attempts=3)
    answer = chaos.runs.do(run)
    assert "3 generations in a row without a committed step" in answer.error
    assert "IndexError: index out of range" in answer.error


@SLOW
def test_replicas_that_drift_apart_end_training(chaos: Chaos, tmp_path: Path) -> None:
    answer = chaos.runs.do(Run(folder=str(tmp_path), kind="five", drifts=True))
    assert "replicas of layer" in answer.error
    assert answer.steps == (1, 2, 3, 4, 5, 6)
    events = list(read_events(tmp_path / "events.jsonl"))
    assert not [event for event in events if event.kind is EventKind.DETECTED], "no node is to blame"


def test_coordinator_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_coordinator"),)
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, acts=acts)
    events = check(chaos, run, left=5)
    assert [event for event in events if event.kind is EventKind.RESUMED]
    assert not [event for event in events if event.kind is EventKind.DETECTED], "nobody was lost"


@pytest.mark.parametrize("record", ["prepared", "activated", "committed", "ended"])
@pytest.mark.parametrize("side", ["before", "after"])
@SLOW
def test_coordinator_killed_around_a_record(chaos: Chaos, tmp_path: Path, record: str, side: str) -> None:
    run = Run(folder=str(tmp_path), kind="five")
    check(chaos, strike(run, f"{side}-log-{record}", step=4 if record == "committed" else None), left=5)


@SLOW
def test_coordinator_and_a_node_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_coordinator"), Act(after="restarted", do="kill_agent", node="c"))
    check(chaos, Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, acts=acts), left=4)


@SLOW
def test_store_and_an_agent_killed(chaos: Chaos, tmp_path: Path) -> None:
    acts = (Act(after='"step":3', do="kill_store"), Act(after='"step":6', do="kill_agent", node="b"))
    run = Run(folder=str(tmp_path), kind="five", num_steps=16, step_s=STEP_S, acts=acts)
    quick(run, check(chaos, run, left=4))


@pytest.mark.parametrize(("data", "point"), [("mixed", "backward"), ("stream", "committed")])
@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=SLOW)])
def test_other_data(chaos: Chaos, tmp_path: Path, data: Data, point: str, rank: int) -> None:
    """Microbatches without images, which come up while training; and data that is read on from where it was."""
    run = strike(Run(folder=str(tmp_path), kind="five", data=data), point, rank=rank, step=5)
    check(chaos, run, left=4)


@SLOW
def test_down_to_the_least_and_up_again(chaos: Chaos, tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path), kind="seven", num_steps=60, step_s=STEP_S)
    lost = "bdf"
    acts = [Act(after=f'"step":{4 * number + 3}', do="kill_agent", node=node) for number, node in enumerate(lost)]
    acts += [Act(after=f'"step":{5 * number + 20}', do="add", node=node) for number, node in enumerate(lost)]
    events = check(chaos, replace(run, acts=tuple(acts)), left=7)
    assert len(recoveries(events)) == 6


@SLOW
@pytest.mark.parametrize("seed", range(4))
def test_random_faults(chaos: Chaos, tmp_path: Path, seed: int) -> None:
    """Faults of workers and the coordinator anywhere; nodes come back. Where a layer is lost, the checkpoint has it."""
    draw = random.Random(seed)
    run = Run(
        folder=str(tmp_path),
        kind="seven",
        num_steps=30,
        save_every=2,
        step_s=STEP_S,
        deadline_s=LEASE,
        max_restarts=20,
        max_attempts=40,
        timeout_s=240,
    )
    points = (*IN_A_STEP, "superseded", "prepared", "connected", "sending", "receiving", "copied", "active", "gathering")
    for _ in range(8):
        action = draw.choice(("kill", "kill", "kill", "exit", "exception", "stop", "gil"))
        run = strike(run, draw.choice(points), action, rank=draw.randrange(7), step=draw.randrange(2, 30))
    for _ in range(2):
        run = strike(run, f"{draw.choice(('before', 'after'))}-log-{draw.choice(('prepared', 'activated', 'committed'))}")
