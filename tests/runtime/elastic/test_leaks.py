"""Many generations in one run leave nothing behind in any process, and a swap of templates compiles nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.processes.control_jobs import children
from support.processes.elastic_jobs import KINDS, job_of

from mmcompile.elastic_run import compile_layers
from mmcompile.runtime.control.events import EventKind
from mmcompile.runtime.elastic.elastic_engine import ElasticEngine

VICTIM = "e"
SETTLED = 8
"""Generations after which nothing grows any more."""
LOOKS, LOOK_S = 15, 0.1
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of one process."""

    files: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        folder = Path(f"/proc/{pid}")
        return cls(
            files=len(list((folder / "fd").iterdir())),
            threads=len(list((folder / "task").iterdir())),
            resident_bytes=int((folder / "statm").read_text().split()[1]) * PAGE_BYTES,
        )


def processes(engine: ElasticEngine) -> dict[str, int]:
    """Those that live through the whole run, by what they are."""
    agents = engine.processes
    workers = {f"worker of {node}": children(pid)[0] for node, pid in agents.items() if node != VICTIM}
    store, coordinator = children(engine.coordinator)
    return {
        **{f"agent of {node}": pid for node, pid in agents.items()},
        **workers,
        "store": store,
        "coordinator": coordinator,
    }


def store_keys(pid: int) -> int:
    """Keys in the store that a process serves."""
    listening = {
        fields[9]: int(fields[1].rpartition(":")[2], 16)
        for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "0A"
    }
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    (port,) = {listening[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in listening}
    return dist.TCPStore("127.0.0.1", port, is_master=False).num_keys()  # pyright: ignore[reportPrivateImportUsage]


def used(engine: ElasticEngine) -> Mapping[str, Usage]:
    """The least that each process uses within a while: groups of the generation before may still be closing."""
    least: dict[str, Usage] = {}
    for _ in range(LOOKS):
        for name, pid in processes(engine).items():
            now = Usage.of(pid)
            least[name] = min(least.get(name, now), now, key=lambda usage: (usage.files, usage.threads))
        time.sleep(LOOK_S)
    return least


# torch 2.13 warns about its own code while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(("generations", "compiled"), [(20, False), pytest.param(50, True, marks=pytest.mark.slow)])
def test_generations_leave_nothing_behind(generations: int, compiled: bool, tmp_path: Path) -> None:
    """A node is killed again and again, and comes back each time."""
    kind = KINDS["five"]
    job = replace(job_of(kind), folder=tmp_path / "run", num_steps=100 * generations, compiled=compiled)
    if compiled:
        compile_layers(job)
    before: Mapping[str, Usage] = {}
    after: Mapping[str, Usage] = {}
    keys: list[int] = []
    killed = 0
    with ElasticEngine(job, list(kind.nodes), max_restarts=generations) as engine:
        for _ in engine.train():
            active = sum(event.kind is EventKind.ACTIVE for event in engine.events)
            if waiting(engine) or active != 2 * killed + 1:
                continue
            if active >= SETTLED and not before:
                before, keys = used(engine), [store_keys(processes(engine)["store"])]
            if active > generations:
                after = used(engine)
                keys.append(store_keys(processes(engine)["store"]))
                break
            engine.kill(VICTIM)
            killed += 1
    assert before.keys() == after.keys(), "training ended too early, or a process was replaced"
    for name, now in after.items():
        then = before[name]
        assert now.files <= then.files + 2, f"{name}: {then.files} files, then {now.files}"
        assert now.threads <= then.threads + 2, f"{name}: {then.threads} threads, then {now.threads}"
        grown = now.resident_bytes - then.resident_bytes
        assert grown < 32 * 2**20, f"{name} grew by {grown:,} bytes"
    assert keys[1] <= keys[0] + 2, f"the store had {keys[0]} keys, then {keys[1]}"


def waiting(engine: ElasticEngine) -> bool:
    """A change of members is under way, or the killed node is not back yet."""
    last = [event.kind for event in engine.events if event.kind in (EventKind.DETECTED, EventKind.COMMITTED)]
    back = sum(event.kind is EventKind.JOINED and event.node == VICTIM for event in engine.events)
    lost = sum(event.kind is EventKind.DETECTED and event.node == VICTIM for event in engine.events)
    return last[-1] is EventKind.DETECTED or back != lost + 1


@pytest.mark.slow
def test_a_swap_compiles_nothing(tmp_path: Path) -> None:
    kind = KINDS["five"]
    job = replace(job_of(kind), folder=tmp_path / "run", num_steps=12, compiled=True)
    # None, if a test before this one compiled them all.
    compile_layers(job)
    with ElasticEngine(job, list(kind.nodes), max_restarts=1) as engine:
        for metrics in engine.train():
            if metrics.step == 3:
                engine.kill("a")
        assert len(engine.recoveries) == 2
    graphs = json.loads((job.folder / "compiled_graphs.json").read_text())
    assert graphs == [0] * len(kind.nodes)
