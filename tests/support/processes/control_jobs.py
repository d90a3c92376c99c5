"""A small training job for the control plane.

Each step adds a function of its microbatch ids to a sum that all workers hold, over a gloo group made anew for each generation.
A `JobProcess` runs `run_job`, which forks the processes of a job.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false
# torch.distributed re-exports its C++ classes without saying so, and their stubs lack a few members.

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from mmcompile.planner.resilience.membership import Decision, MembershipChange, Planned, StateLost, Stop, Wait
from mmcompile.runtime.control.local_cluster import LocalCluster
from mmcompile.runtime.control.membership_client import MembershipClient, Superseded
from mmcompile.runtime.control.messages import PROTOCOL_VERSION, Generation, Hello, Message, Proof, encode
from mmcompile.runtime.control.store import open_client
from mmcompile.runtime.control.times import Times
from mmcompile.runtime.launch.session import Runner
from mmcompile.runtime.monitoring.fail_points import VARIABLE, Strike, fail_point

MICROBATCHES = 8
_CONNECT_S = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """Something done to a cluster from outside, once an event log line contains `after`."""

    after: str
    do: str
    """add | drain | stop | cont | kill_agent | kill_coordinator | stop_node | cont_node"""
    node: str = ""
    pause_s: float = 0.0
    """Between the line and the act."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run."""

    folder: str
    nodes: dict[str, int]
    """Node -> workers, started at once."""
    num_steps: int = 8
    strikes: tuple[Strike, ...] = ()
    acts: tuple[Act, ...] = ()
    least: int = 1
    """Nodes."""
    start: int = 0
    """Nodes that must be there at the start; 0: all of `nodes`."""
    deadline_s: float = 6.0
    max_restarts: int = 0
    max_attempts: int = 8
    step_s: float = 0.0
    timeout_s: float = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CountPlanner:
    """Any number of nodes will do, if one of them holds the sum."""

    least: int
    start: int

    def plan(self, change: MembershipChange) -> Decision:
        if len(change.members) < (self.least if change.previous else self.start):
            if change.previous:
                return Stop(reason=f"{len(change.members)} nodes are left, the least is {self.least}")
            return Wait(reason=f"{len(change.members)} of {self.start} nodes")
        if change.committed and set(change.members) <= set(change.joined):
            return StateLost(layers=("sum",), checkpoint_step=None, cursor=None, payload="{}")
        return Planned(payload=json.dumps({"microbatches": MICROBATCHES}))


def value(microbatch: int) -> int:
    """What a microbatch adds to the sum; differs for each."""
    return microbatch * microbatch + 17


def ids_of(step: int) -> range:
    return range((step - 1) * MICROBATCHES, step * MICROBATCHES)


class CountWorker:
    """One worker."""

    def __init__(self, membership: MembershipClient, job: Job) -> None:
        torch.set_num_threads(1)
        self.membership = membership
        self.job = job
        self.sum = torch.zeros(1, dtype=torch.int64)
        self.step = 0
        """Last that is in the sum."""
        self.graveyard: list[tuple[dist.Work, object, object]] = []
        """Groups left behind with work in them: dropping one would wait for its peers."""
        self.usage: list[tuple[int, int]] = []

    def run(self) -> None:
        while True:
            generation = self.membership.wait_generation()
            self.usage.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
            try:
                self.train(generation)
                return self.report(generation)
            except Superseded:
                fail_point("superseded", rank=generation.rank, generation=generation.number)

    def train(self, generation: Generation) -> None:
        rank, size = generation.rank, generation.world_size
        fail_point("prepared", rank=rank, generation=generation.number)
        group = self.connect(generation)
        self.graveyard = [pair for pair in self.graveyard if not pair[0].is_completed()]
        self.membership.connected()
        fail_point("connected", rank=rank, generation=generation.number)
        self.copy(group, generation)
        fail_point("copied", rank=rank, generation=generation.number)
        self.membership.ready()
        fail_point("active", rank=rank, generation=generation.number)
        for step in range(generation.committed + 1, self.job.num_steps + 1):
            fail_point("before-step", rank=rank, step=step)
            time.sleep(self.job.step_s)
            mine = [number for number in ids_of(step) if number % size == rank]
            gradient = torch.tensor([sum(map(value, mine))], dtype=torch.int64)
            fail_point("before-reduce", rank=rank, step=step)
            self.all_reduce(group, gradient)
            self.graveyard.clear()
            fail_point("after-reduce", rank=rank, step=step)
            self.membership.reduced(step, mine, cursor=json.dumps({"step": step}) if rank == 0 else None)
            fail_point("after-commit", rank=rank, step=step)
            assert step == self.step + 1, f"step {step} after {self.step}"
            self.sum += gradient
            self.step = step
        fail_point("before-finish", rank=rank)
        self.membership.finish()

    def connect(self, generation: Generation) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_S)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with self.links():
            store = dist.PrefixStore(generation.prefix, open_client(generation.store, _CONNECT_S))
            make = partial(dist.ProcessGroupGloo, store, generation.rank, generation.world_size, options)
            runner = Runner()
            try:
                # It waits for all members; one of them may be lost just now.
                return runner.call(make, self.membership.check)
            finally:
                runner.end(0.0)

    def copy(self, group: dist.ProcessGroupGloo, generation: Generation) -> None:
        """Give the sum to those that joined: all others hold the same."""
        mine = os.environ["COUNT_NODE"] not in generation.joined
        assert not mine or self.step == generation.committed, f"holds {self.step}, committed {generation.committed}"
        holders = torch.tensor([int(mine)], dtype=torch.int64)
        part = self.sum * int(mine)
        self.all_reduce(group, holders)
        self.all_reduce(group, part)
        if not mine:
            self.sum = part // max(1, int(holders))
            self.step = generation.committed

    def all_reduce(self, group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
        with self.links():
            work = group.allreduce([tensor])
            self.graveyard.append((work, group, tensor))
            while not work.is_completed():
                self.membership.check()
                time.sleep(0.002)
            work.wait()

    @contextlib.contextmanager
    def links(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.membership.fault(str(error).splitlines()[0])

    def report(self, generation: Generation) -> None:
        node = os.environ["COUNT_NODE"]
        result = {"sum": int(self.sum), "step": self.step, "rank": generation.rank, "usage": self.usage}
        Path(self.job.folder, f"result-{node}-{self.membership.index}.json").write_text(json.dumps(result))


def _work(job: Job, membership: MembershipClient) -> None:
    CountWorker(membership, job).run()


class _Cluster(LocalCluster):
    """Lets a worker know its node, and tests act from outside."""

    def add(self, node: str, *, num_workers: int = 1) -> None:
        os.environ["COUNT_NODE"] = node
        LocalCluster.add(self, node, num_workers=num_workers)


def run_job(job: Job) -> dict[str, object]:
    """Run a job to its end."""
    os.environ[VARIABLE] = msgspec.json.encode(job.strikes).decode() if job.strikes else ""
    cluster = _Cluster(
        folder=Path(job.folder),
        planner=CountPlanner(least=job.least, start=job.start or len(job.nodes)),
        work=partial(_work, job),
        times=Times(recovery_deadline_s=job.deadline_s, max_attempts=job.max_attempts),
        max_restarts=job.max_restarts,
    )
    start_s = time.monotonic()
    with cluster:
        for node, num_workers in job.nodes.items():
            cluster.add(node, num_workers=num_workers)
        for act in job.acts:
            _await_event(Path(job.folder, "events.jsonl"), act.after, job.timeout_s)
            time.sleep(act.pause_s)
            _act(cluster, act)
        success = cluster.wait(job.timeout_s)
    return {"success": success, "seconds": time.monotonic() - start_s}


def _await_event(path: Path, text: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {text!r} in {path}")
        time.sleep(0.005)


def strangers(port: int) -> None:
    """Connect in every wrong way."""

    def say(data: bytes, *, answer: bool) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as end:
            end.sendall(data)
            while answer and end.recv(65536):
                pass

    def frame(message: Message) -> bytes:
        data = encode(message)
        return len(data).to_bytes(4, "big") + data

    say(frame(Proof(nonce="1", mac="f" * 64)), answer=True)
    say(frame(Proof(nonce="1", mac="f" * 64, version=PROTOCOL_VERSION + 1)), answer=True)
    say(frame(Hello(node="b", incarnation="x", num_workers=1, generation=0, committed=0)), answer=True)
    say((2**31).to_bytes(4, "big") + b"x" * 100, answer=True)
    say((5000).to_bytes(4, "big") + b"x" * 5000, answer=True)
    say((5).to_bytes(4, "big") + b"{nope", answer=True)
    say((20).to_bytes(4, "big") + b'{"kind":"A","body":1', answer=True)
    say(b"GET / HTTP/1.1\r\n\r\n", answer=True)
    say(b"", answer=False)
    deep = b"[" * 4000
    say(len(deep).to_bytes(4, "big") + deep, answer=True)


def children(pid: int) -> list[int]:
    """Its child processes, oldest first."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _act(cluster: LocalCluster, act: Act) -> None:
    match act.do:
        case "add":
            cluster.add(act.node)
        case "drain":
            cluster.drain(act.node)
        case "kill_agent":
            os.kill(cluster.agents[act.node].pid, signal.SIGKILL)
        case "kill_coordinator":
            os.kill(children(cluster.supervisor.pid)[-1], signal.SIGKILL)
        case "stop_coordinator" | "cont_coordinator":
            sign = signal.SIGSTOP if act.do == "stop_coordinator" else signal.SIGCONT
            os.kill(children(cluster.supervisor.pid)[-1], sign)
        case "kill_store":
            os.kill(children(cluster.supervisor.pid)[0], signal.SIGKILL)
        case "strangers":
            strangers(cluster.endpoint.port)
        case "stop" | "cont":
            for pid in children(cluster.agents[act.node].pid):
                os.kill(pid, signal.SIGSTOP if act.do == "stop" else signal.SIGCONT)
        case "stop_node" | "cont_node":
            for pid in [*children(cluster.agents[act.node].pid), cluster.agents[act.node].pid]:
                os.kill(pid, signal.SIGSTOP if act.do == "stop_node" else signal.SIGCONT)
        case _:
            raise ValueError(act.do)
