"""What holds for every run on nodes that die: it ends with the same bits as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from mmcompile.data.batches import MapBatches
from mmcompile.runtime.checkpoint import whole_checkpoint as checkpoint
from mmcompile.runtime.control.events import EventKind, EventReader, RunEvent, recoveries
from mmcompile.runtime.control.log import Log
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.generation_plan import GenerationPlan, StepRecord
from mmcompile.runtime.monitoring.fail_points import FaultAction, Strike
from support.models.elastic_model import BATCH, SAMPLES, Data, batches
from support.processes.elastic_jobs import KINDS, MICROBATCHES, Answer, Run, do
from support.processes.spawn_ranks import JobProcess

LEASE = 10.0
"""Deadline where a silent process must be waited for; the lease is a fifth of it."""
STEP_S = 0.1
"""Of a step, where something else must come to its end before training does."""
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
"""Fail points that every rank with a stage comes to in a step."""


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

    runs: JobProcess
    folder: Path
    _known: dict[tuple[int, Data, int], Trained] = field(default_factory=dict, repr=False)

    def do(self, run: Run) -> Answer:
        """Do a run in the process that does all of them."""
        return self.runs.call(do, run, timeout_s=run.timeout_s + 240)

    def reference(self, run: Run) -> Trained:
        """What the model learns if nothing fails. It does not depend on the pipelines."""
        devices = KINDS[run.kind].devices
        key = devices, run.data, run.num_steps
        if key not in self._known:
            folder = self.folder / "-".join(map(str, key))
            calm = Run(
                folder=str(folder), kind="wide" if devices == 2 else "five", data=run.data, num_steps=run.num_steps
            )
            assert self.do(calm).error == ""
            assert not [
                event for event in EventReader(folder / "events.jsonl").read() if event.kind is EventKind.DETECTED
            ]
            self._known[key] = trained(folder)
        return self._known[key]


def trained(folder: Path) -> Trained:
    committed = [event for event in EventReader(folder / "events.jsonl").read() if event.kind is EventKind.COMMITTED]
    return Trained(
        steps=dict(map(figures_of, committed)),
        digests=json.loads((folder / "digests.json").read_text()),
        tensors=saved_tensors(folder),
    )


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Weights and optimizer state of the last checkpoint of a run."""
    saved = checkpoint.read(folder / "checkpoint")
    return {
        **{f"weight/{name}": tensor for name, tensor in saved.weights.items()},
        **{f"state/{path}": tensor for path, tensor in saved.optimizer.items()},
    }


def figures_of(event: RunEvent) -> tuple[int, tuple[float, float | None, int, int]]:
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
    fault = Strike(point=point, action=FaultAction(action), rank=rank, step=step, generation=generation, marker=marker)
    return replace(run, strikes=(*run.strikes, fault))


def check(chaos: Chaos, run: Run, *, left: int, steps: Sequence[int] | None = None) -> list[RunEvent]:
    """Do a run and check everything that holds for all that come to their end.

    Args:
        left: nodes of the last generation.
        steps: that are committed, in order; by default each once.
    """
    folder = Path(run.folder)
    answer = chaos.do(run)
    events = check_outcome(chaos, run, answer)
    for fault in run.strikes:
        assert fault.marker is None or Path(fault.marker).exists(), f"{fault} did not strike"
    assert answer.steps == tuple(steps or range(1, run.num_steps + 1))
    members, plan = last_generation(folder)
    assert len(members) == left
    planned = [node for pipeline in plan.pipelines for node in pipeline.nodes] + [spare.node for spare in plan.spares]
    assert sorted(planned) == sorted(members), "each node is in one pipeline, or idle for a reason"
    if not run.max_restarts:
        lost = {event.node for event in events if event.kind is EventKind.DETECTED}
        joined = {act.node for act in run.acts if act.do == "add"}
        assert not lost & set(members) - joined
    return events


def check_outcome(chaos: Chaos, run: Run, answer: Answer) -> list[RunEvent]:
    """What was learned is what is learned if nothing fails."""
    folder = Path(run.folder)
    events = list(EventReader(folder / "events.jsonl").read())
    assert answer.error == "", [event for event in events if event.cause][-5:]
    check_steps(events, answer, run.data)
    wanted, found = chaos.reference(run), trained(folder)
    check_figures(events, wanted)
    assert found.steps.keys() == wanted.steps.keys()
    assert found.digests == wanted.digests
    check_tensors(found.tensors, wanted.tensors)
    return events


def check_steps(events: Sequence[RunEvent], answer: Answer, data: Data) -> None:
    """Steps, microbatches and samples are what they must be; generations never go back."""
    committed = [event for event in events if event.kind is EventKind.COMMITTED]
    assert answer.steps == tuple(event.step for event in committed)
    done = 0
    for event in events:
        if event.kind is EventKind.COMMITTED:
            assert event.step == done + 1
            assert event.microbatches == tuple(range(done * MICROBATCHES, (done + 1) * MICROBATCHES))
            assert event.cursor is not None
            done += 1
            assert taken(StepRecord.decode(event.cursor).data) == done * BATCH
        elif event.kind is EventKind.ROLLED_BACK:
            assert event.step is not None
            assert event.step <= done
            done = event.step
    read = batches(data)
    if isinstance(read, MapBatches):
        used = [index for step in range(1, done + 1) for index in read.indices(step)]
        for first in range(0, len(used) - SAMPLES, SAMPLES):
            assert Counter(used[first : first + SAMPLES]) == Counter(range(SAMPLES))
    started = [event.generation for event in events if event.kind is EventKind.PREPARE]
    assert started == sorted(set(started))
    seen = [event.generation for event in committed]
    assert seen == sorted(seen)


def check_figures(events: Sequence[RunEvent], wanted: Trained) -> None:
    """Also of steps that were done twice, since they were lost."""
    figures = [figures_of(event) for event in events if event.kind is EventKind.COMMITTED]
    assert figures == [(step, wanted.steps[step]) for step, _ in figures]


def check_saved(chaos: Chaos, run: Run, answer: Answer) -> None:
    """What too few nodes saved at last is all that was learned."""
    folder = Path(run.folder)
    saved = checkpoint.read(folder / "checkpoint").trainer
    assert f"step {saved.step} is saved in {folder / 'checkpoint'}" in answer.error
    assert answer.steps[-1] == saved.step
    assert saved.cursor is not None
    assert taken(StepRecord.decode(saved.cursor).data) == saved.step * BATCH
    events = list(EventReader(folder / "events.jsonl").read())
    check_steps(events, answer, run.data)
    wanted = chaos.reference(replace(run, num_steps=saved.step))
    check_figures(events, wanted)
    check_tensors(saved_tensors(folder), wanted.tensors)


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


def quick(run: Run, events: Sequence[RunEvent]) -> None:
    """No wait reached its time: all are far longer than this."""
    total_s = sum(recovery.total_s for recovery in recoveries(events))
    assert 0 < total_s < Times(recovery_deadline_s=run.deadline_s).lease_s, total_s
