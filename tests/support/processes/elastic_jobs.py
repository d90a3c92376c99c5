"""Runs of a tiny multimodal model on nodes that die.

A `JobProcess` does runs one after the other: it loads torch and transformers once, captures and plans each kind of cluster
once, then forks the processes of a run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import torch

from mmcompile.errors import EngineError
from mmcompile.planner.resilience.instantiate import instantiate
from mmcompile.planner.resilience.membership import MembershipPlan
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine
from mmcompile.runtime.elastic.elastic_job import ElasticJob
from mmcompile.runtime.monitoring.fail_points import VARIABLE, FaultAction, Strike
from mmcompile.runtime.optim.optimizer import OptimizerSpec
from support.models.elastic_model import Data, batches, join, llava, sample
from support.processes.control_jobs import Act, children
from support.processes.drifting import DriftingSGD

MICROBATCHES = 8
KindName = Literal["five", "six", "seven", "wide"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A cluster and its templates. Two pipelines are the least."""

    nodes: str
    """A letter each."""
    sizes: tuple[int, ...]
    """Nodes of its templates."""
    ranks: tuple[tuple[int, ...], ...]
    """Of each pipeline, once all nodes are there."""
    devices: int = 1
    """Of a node."""


KINDS: Mapping[KindName, Kind] = {
    # In the pipeline of three nodes, two ranks hold the tied embedding.
    "five": Kind(nodes="abcde", sizes=(2, 3), ranks=((0, 1), (2, 3, 4))),
    # A pipeline may die as a whole.
    "six": Kind(nodes="abcdef", sizes=(2,), ranks=((0, 1), (2, 3), (4, 5))),
    # A lost node makes others send layers, and another one may be lost meanwhile.
    "seven": Kind(nodes="abcdefg", sizes=(2, 3), ranks=((0, 1), (2, 3), (4, 5, 6))),
    "wide": Kind(nodes="abc", sizes=(1,), ranks=((0, 1), (2, 3), (4, 5)), devices=2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run."""

    folder: str
    kind: KindName
    num_steps: int = 6
    data: Data = "map"
    save_every: int | None = None
    strikes: tuple[Strike, ...] = ()
    acts: tuple[Act, ...] = ()
    """On a node by name, or by its rank in the generation that was active last."""
    deadline_s: float = 30.0
    max_attempts: int = 8
    max_restarts: int = 0
    drifts: bool = False
    """Whether the optimizer does something else in every process."""
    step_s: float = 0.0
    """How long each step is held up."""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the process that asked for a run saw of it."""

    steps: tuple[int, ...]
    """As `train` gave them."""
    error: str
    """Why training ended before its last step; "" if it did not."""
    seconds: float


def job_of(kind: Kind) -> ElasticJob:
    """The job of a kind."""
    job = _captured(kind.devices)
    templates = tuple(one for one in job.resilience.templates if one.num_nodes in kind.sizes)
    assert len(templates) == len(kind.sizes), f"templates of {job.resilience.sizes} nodes"
    resilience = replace(job.resilience, templates=templates)
    start = instantiate(resilience.job, range(len(kind.nodes)))
    assert isinstance(start, MembershipPlan), start
    pipelines = [
        [node * kind.devices + index for node in p.nodes for index in range(kind.devices)] for p in start.pipelines
    ]
    assert pipelines == [list(ranks) for ranks in kind.ranks], "tests name ranks by what they do"
    return replace(job, resilience=resilience)


@functools.cache
def _captured(devices: int) -> ElasticJob:
    """A job captured and planned. With one device a node the head shares the embedding, with two it does not."""
    import mmcompile as mm
    from mmcompile.elastic_run import elastic_job

    model = llava(tied=devices == 1)
    pair = [sample(0), sample(1)]
    batch = {key: torch.cat([one[key] for one in pair]) for key in pair[0]}
    cluster = "7x1xcpu" if devices == 1 else "3x2xcpu"
    return elastic_job(
        model,
        batch,
        mm.plan(model, batch, cluster=cluster, num_microbatches=MICROBATCHES, fault_tolerance=1),
        data=batches("map"),
        num_steps=1,
        folder="",
        cache=os.environ["MMCOMPILE_CACHE"],
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
        clip_norm=1.0,
        reduction="fixed",
    )


def do(run: Run) -> Answer:
    """Do a run to its end."""
    job = replace(
        job_of(KINDS[run.kind]),
        folder=Path(run.folder),
        num_steps=run.num_steps,
        data=batches(run.data),
        save_every=run.save_every,
    )
    if run.data == "unjoined":
        job = replace(job, collate=functools.partial(join, job.collate))
    if run.drifts:
        job = replace(job, optimizer=OptimizerSpec.of(DriftingSGD))
    strikes = list(run.strikes)
    if run.step_s:
        strikes.append(Strike(point="before-step", action=FaultAction.SLEEP, rank=0, seconds=run.step_s))
    os.environ[VARIABLE] = msgspec.json.encode(strikes).decode() if strikes else ""
    start_s = time.monotonic()
    steps: list[int] = []
    error = ""
    times = Times(recovery_deadline_s=run.deadline_s, max_attempts=run.max_attempts)
    nodes = list(KINDS[run.kind].nodes)
    with ElasticEngine(job, nodes, times=times, max_restarts=run.max_restarts) as engine, _limit(run.timeout_s):
        for act in run.acts:
            _await_event(job.folder / "events.jsonl", act.after, run.timeout_s)
            time.sleep(act.pause_s)
            _act(engine, job.folder, act)
        try:
            for metrics in engine.train():
                steps.append(metrics.step)
        except EngineError as found:
            error = str(found)
    return Answer(steps=tuple(steps), error=error, seconds=time.monotonic() - start_s)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Kill all processes of a run that hangs."""

    def kill() -> None:
        print(f"the run hangs after {seconds} s", file=sys.stderr, flush=True)
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _await_event(path: Path, text: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {text!r} in {path}")
        time.sleep(0.005)


def _by_rank(folder: Path) -> list[str]:
    """Nodes of the last active generation, as the coordinator's log has them; one worker each."""
    records = [json.loads(line[9:]) for line in (folder / "coordinator.log").read_bytes().split(b"\n")[:-1]]
    active = next(record["activated"] for record in reversed(records) if "activated" in record)
    return [member["node"] for member in active["members"]]


def _act(engine: ElasticEngine, folder: Path, act: Act) -> None:
    agents = engine.processes
    if act.node.isdigit():
        act = replace(act, node=_by_rank(folder)[int(act.node)])
    # Of the supervisor's processes, the store is the first and the coordinator the last.
    supervisor = engine.coordinator
    match act.do:
        case "add":
            engine.add(act.node)
        case "drain":
            engine.drain(act.node)
        case "kill_agent":
            os.kill(agents[act.node], signal.SIGKILL)
        case "kill_coordinator":
            os.kill(children(supervisor)[-1], signal.SIGKILL)
        case "kill_store":
            os.kill(children(supervisor)[0], signal.SIGKILL)
        case "stop_node" | "cont_node":
            for pid in [*children(agents[act.node]), agents[act.node]]:
                os.kill(pid, signal.SIGSTOP if act.do == "stop_node" else signal.SIGCONT)
        case _:
            raise ValueError(act.do)
