"""How long does a killed worker hold up training? 30 kills of an elastic run, beside restarts from a checkpoint.

A small LLaVA trains on five nodes of one worker each, played by processes of this machine. At random moments a random worker
gets SIGKILL. Its node comes back with a new one, which joins after the next step; a few steps later the next kill is due. Times
are from just before the kill to the commit of the first step after it:

    detect      the node's agent has seen the end of its worker and told the coordinator
    plan        templates and copies are chosen, and sent
    leave       all workers have let go of the step that was interrupted
    connect     the groups of the new generation are connected
    copy        layers are where they are needed
    replay      the interrupted step has run again and is committed

Beside it, what a user would do instead: the same model and steps in the plain engine, on the four nodes that are left. A worker
is killed, and the script is started again: it builds the model, loads the last checkpoint and does one step. What was done since
that checkpoint is lost, and not counted here. Last, a few kills of a run with compiled layers: no worker may compile anything.

Exits with 1 if the median recovery takes more than 0.3 s, the worst more than 2 s, a restart less than 20 times the median, or if
anything was compiled.

    python -P benchmarks/recovery.py [--kills 30] [--restarts 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Before numpy and torch are imported. Connections that end are what this is about: torch need not print a trace of each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this one

from elastic_llava import OPTIMIZER, conversations, llava, load  # noqa: E402

import mmcompile as mm  # noqa: E402
from mmcompile.data.batches import MapBatches  # noqa: E402
from mmcompile.data.collate import collate  # noqa: E402
from mmcompile.elastic_run import elastic  # noqa: E402
from mmcompile.runtime.control.events import (  # noqa: E402
    EventKind,  # noqa: E402
    Recovery,
    RunEvent,
    recoveries,
)
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine  # noqa: E402

NUM_NODES, NUM_MICROBATCHES = 5, 8
MEDIAN_S, WORST_S, RATIO = 0.3, 2.0, 20.0
"""What is promised."""
SETTLED_STEPS = 3
"""With all nodes, before a kill is due."""
WITHIN_STEPS = 2
"""A kill comes at a random moment of so many steps."""
COMPILED_STEPS = 40
"""Of the run with compiled layers."""
PHASES = ("detect", "plan", "leave", "connect", "copy", "replay")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """A kill, and what it took to go on. Seconds."""

    node: str
    detect_s: float
    recovery: Recovery

    @property
    def total_s(self) -> float:
        return self.detect_s + self.recovery.total_s

    @property
    def phases_s(self) -> tuple[float, ...]:
        """As `PHASES`, and all of them."""
        r = self.recovery
        return self.detect_s, r.plan_s, r.leave_s, r.connect_s, r.copy_s, r.replay_s, self.total_s


@dataclass(kw_only=True, slots=True)
class Killer:
    """Kills workers of an engine, one after the other, each once all nodes have been there for a few steps."""

    engine: ElasticEngine
    choice: random.Random
    survived: list[Survived]
    node: str = ""
    """The last that was hit."""
    killed_s: float = 0.0
    """By time.monotonic, just before."""
    seen: int = 0
    """Events before that."""
    is_counted: bool = True

    def after_step(self) -> None:
        """Note the recovery from the last kill once it is over; kill if it is time."""
        since = self.engine.events[self.seen :]
        if not self.is_counted and (found := self._recovery(since)) is not None:
            self.survived.append(found)
            self.is_counted = True
            print(_row(f"{len(self.survived):6d} {self.node}", found.phases_s), flush=True)
        if self.is_counted and _is_settled(since, self.node):
            self._kill()

    def _kill(self) -> None:
        step_s = statistics.median(_step_seconds(self.engine.events)[-20:])
        time.sleep(self.choice.uniform(0.0, WITHIN_STEPS * step_s))
        self.node = self.choice.choice(sorted(self.engine.processes))
        self.seen, self.is_counted = len(self.engine.events), False
        self.killed_s = time.monotonic()
        self.engine.kill(self.node)

    def _recovery(self, since: Sequence[RunEvent]) -> Survived | None:
        first = next((i for i, e in enumerate(since) if e.kind is EventKind.DETECTED and e.node == self.node), None)
        if first is None or not (found := recoveries(since[first:])):
            return None
        return Survived(node=self.node, detect_s=since[first].monotonic_s - self.killed_s, recovery=found[0])


def start(folder: Path, *, num_steps: int, num_kills: int, compile: bool) -> ElasticEngine:
    """An engine on five nodes whose workers may be killed so often."""
    model, batch = make_model(), collate(conversations(1))
    plan = mm.plan(model, batch, cluster=f"{NUM_NODES}x1xcpu", num_microbatches=NUM_MICROBATCHES, fault_tolerance=1)
    return elastic(
        model,
        batch,
        plan,
        allow_unused=True,
        data=make_data(),
        num_steps=num_steps,
        folder=folder,
        optimizer=OPTIMIZER,
        max_restarts=num_kills,
        compile=compile,
    )


def run_elastic(folder: Path, num_kills: int, seed: int) -> list[Survived]:
    """Train and kill. Prints kills as they are survived, and the steps between them."""
    print(_head(f"{'kill':>6s} node "), flush=True)
    engine = start(folder, num_steps=10**6, num_kills=num_kills, compile=False)
    killer = Killer(engine=engine, choice=random.Random(seed), survived=[])
    with engine:
        for _ in engine.train():
            killer.after_step()
            if len(killer.survived) == num_kills:
                break
        _check(engine.events)
        step_s = _step_seconds(engine.events)
        returns_s = [one.total_s for one in engine.recoveries if "joined" in one.cause]
    print(f"\n{len(step_s)} steps without a change, median {1e3 * statistics.median(step_s):.0f} ms; {load()}")
    print(f"{len(returns_s)} returns of nodes, commit to commit: median {1e3 * statistics.median(returns_s):.0f} ms")
    return killer.survived


def run_compiled(folder: Path, seed: int) -> int:
    """Train with compiled layers, and kill; returns how many graphs workers compiled."""
    print(f"\n{_head('compiled    ')}", flush=True)
    engine = start(folder, num_steps=COMPILED_STEPS, num_kills=COMPILED_STEPS, compile=True)
    killer = Killer(engine=engine, choice=random.Random(seed), survived=[])
    with engine:
        for _ in engine.train():
            killer.after_step()
    if not killer.survived:
        raise SystemExit(f"no kill was survived in {COMPILED_STEPS} steps")
    return sum(msgspec.json.decode((folder / "compiled_graphs.json").read_bytes(), type=list[int]))


def run_plain(folder: str) -> None:
    """Train in the plain engine, from a checkpoint if there is one. Prints the time of every step; ends when it is killed."""
    batches = make_data()
    has_checkpoint = Path(folder).exists()
    with mm.parallelize(
        make_model(),
        collate(conversations(1)),
        allow_unused=True,
        cluster=f"{NUM_NODES - 1}x1xcpu",
        num_microbatches=NUM_MICROBATCHES,
        optimizer=OPTIMIZER,
    ) as engine:
        if has_checkpoint:
            engine.load(folder)
        for _ in range(engine.num_steps):
            batches.read()
        for metrics in engine.train(batches.read() for _ in range(10**6)):
            print(metrics.step, time.monotonic(), flush=True)
            if metrics.step == SETTLED_STEPS and not has_checkpoint:
                engine.save(folder)


def restart_plain(folder: Path, choice: random.Random) -> float:
    """Seconds from the kill of a worker to the end of the first step after a restart."""
    with _plain(folder) as first:
        for step, _ in _steps(first):
            if step == 2 * SETTLED_STEPS:
                break
        killed_s = time.monotonic()
        os.kill(choice.choice(_workers(first.pid)), signal.SIGKILL)
        first.communicate()
    with _plain(folder) as second:
        step, at_s = next(_steps(second))
        second.kill()
    if step != SETTLED_STEPS + 1:
        raise SystemExit(f"the restarted run began with step {step}; wanted {SETTLED_STEPS + 1}")
    return at_s - killed_s


def make_model() -> nn.Module:
    return llava(tower=(96, 2), text=(96, 4))


def make_data() -> MapBatches:
    return MapBatches(conversations(64), NUM_MICROBATCHES, seed=0)


def report(survived: Sequence[Survived], restarts_s: Sequence[float], num_compiled: int) -> bool:
    """Print the figures; whether a promise is broken."""
    columns = list(zip(*(one.phases_s for one in survived), strict=True))
    print(f"\n{_head(' ' * 12)}")
    print(_row(f"{'median':12s}", [statistics.median(column) for column in columns]))
    print(_row(f"{'worst':12s}", [max(column) for column in columns]))
    median_s, worst_s = statistics.median(columns[-1]), max(columns[-1])
    restart_s = statistics.median(restarts_s)
    print(f"compiled by workers of the run with compiled layers: {num_compiled} graphs")
    print(f"restarts from a checkpoint: {', '.join(f'{seconds:.1f}' for seconds in restarts_s)} s")
    print(
        f"kill to next committed step, {len(survived)} kills: median {median_s:.3f} s, worst {worst_s:.3f} s; "
        f"restart {restart_s:.1f} s, {restart_s / median_s:.1f} times the median"
    )
    return median_s > MEDIAN_S or worst_s > WORST_S or restart_s / median_s < RATIO or num_compiled > 0


def _is_settled(since: Sequence[RunEvent], node: str) -> bool:
    """Whether a node has come back and a few steps were done with it.

    Args:
        node: empty at the beginning, when all nodes start together.
    """
    wanted = [EventKind.JOINED, EventKind.PREPARE, EventKind.ACTIVE, *[EventKind.COMMITTED] * SETTLED_STEPS]
    for event in since:
        if (
            wanted
            and event.kind is wanted[0]
            and (event.kind is not EventKind.JOINED or event.node == node or not node)
        ):
            wanted.pop(0)
    return not wanted


def _step_seconds(events: Sequence[RunEvent]) -> list[float]:
    """Times between commits with nothing in between."""
    return [
        after.monotonic_s - before.monotonic_s
        for before, after in zip(events, events[1:], strict=False)
        if before.kind is after.kind is EventKind.COMMITTED
    ]


def _check(events: Sequence[RunEvent]) -> None:
    """Every step was committed once, with all of its microbatches."""
    committed = [event for event in events if event.kind is EventKind.COMMITTED]
    for step, event in enumerate(committed, 1):
        ids = tuple(range((step - 1) * NUM_MICROBATCHES, step * NUM_MICROBATCHES))
        if event.step != step or event.microbatches != ids:
            raise SystemExit(f"step {step} was not committed once with microbatches {ids}: {event}")


def _workers(pid: int) -> list[int]:
    """Worker processes of a plain engine, without the one they were forked from and those that plan."""
    parents = [
        child
        for child in _children(pid)
        if "mmcompile.runtime.worker_main" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return [worker for parent in parents for worker in _children(parent)]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _plain(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", __file__, "--plain", str(folder)]
    # That a worker was killed is no news.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _steps(process: subprocess.Popen[str]) -> Iterator[tuple[int, float]]:
    """Step and time, as they are done."""
    assert process.stdout is not None
    for line in process.stdout:
        step, at_s = line.split()
        yield int(step), float(at_s)
    raise SystemExit("the plain engine ended; run with --plain FOLDER to see why")


def _head(first: str) -> str:
    return first + "".join(f"{name:>9s}" for name in (*PHASES, "all")) + "  ms"


def _row(first: str, seconds: Sequence[float]) -> str:
    return first + "".join(f"{1e3 * value:9.1f}" for value in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="of the elastic run (default 30)")
    parser.add_argument("--restarts", type=int, default=3, help="of the plain engine (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default 0)")
    parser.add_argument("--plain", metavar="FOLDER", help="only train in the plain engine, with its checkpoint there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.plain:
        run_plain(options.plain)
        return
    print(load())
    choice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        survived = run_elastic(folder / "elastic", options.kills, options.seed)
        restarts_s = [restart_plain(folder / f"plain{number}", choice) for number in range(options.restarts)]
        num_compiled = run_compiled(folder / "compiled", options.seed)
    raise SystemExit(int(report(survived, restarts_s, num_compiled)))


if __name__ == "__main__":
    main()
