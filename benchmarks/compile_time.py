"""Seconds to compile the stage programs of towers of 4 and of 32 layers, anew and with the cache of an earlier run.

Each figure is a fresh process: torch.compile's caches are on disk, in a folder made for this run. What is timed is the first
forward and backward of a stage that holds the whole tower, less a later one, on the clock and in processor time: that of the
process and of the compilers it starts, one at a time. Depths take turns, and of each the least of several runs counts: whatever
else the machine does adds to a run, to its processor time too (caches, cores that share), and takes nothing away.

Fails if in processor time depth costs more than a factor of 1.5, or a start with a cache more than a third of one without.

    python -P benchmarks/compile_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

DEPTHS = (4, 32)
LIMIT = 1.5
"""Of the time for 32 layers over that for 4: the acceptance of the outlined layers."""
CACHE_LIMIT = 1 / 3
"""Of the time with a cache over that without."""
HIDDEN, BATCH, LENGTH = 128, 2, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What one start took."""

    wall_s: float
    cpu_s: float
    graphs: int
    """Compiled; a forward and its backward are one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Starts:
    """Runs of one depth, as many without a cache as with that of the one before."""

    cold: Sequence[Spent]
    warm: Sequence[Spent]

    @property
    def cold_s(self) -> float:
        """Processor time."""
        return min(run.cpu_s for run in self.cold)

    @property
    def warm_s(self) -> float:
        return min(run.cpu_s for run in self.warm)


def measure(depth: int) -> Spent:
    """Compile a Llama of so many layers as one stage."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import mmcompile as mm
    from mmcompile.codegen.compiled import load_compiled_stage
    from mmcompile.codegen.program_cache import Patterns
    from mmcompile.ir.capture import capture
    from mmcompile.ir.inputs import completed
    from mmcompile.runtime.elastic.warm_up import num_graphs

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(512, (BATCH, LENGTH))
    batch = completed(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    plan = mm.plan(model, batch, stages={"language_model": 1}, num_microbatches=1)
    patterns = Patterns(model, plan, capture(model, batch), batch)
    microbatch = patterns.prepare(batch)
    (program,) = microbatch.programs.programs.values()
    stage = load_compiled_stage(program, patterns.parameters())
    given = [microbatch.sizes.get(port.name, microbatch.values.get(port.name)) for port in program.inputs]

    def step() -> tuple[float, float]:
        wall_s, cpu_s = time.perf_counter(), processor_s()
        stage(*given)[0].backward()
        return time.perf_counter() - wall_s, processor_s() - cpu_s

    first, *later = (step() for _ in range(4))
    wall_s, cpu_s = (at_first - min(others) for at_first, *others in zip(first, *later, strict=True))
    return Spent(wall_s=wall_s, cpu_s=cpu_s, graphs=num_graphs())


def processor_s() -> float:
    """Processor time of this process, and of those it started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def in_fresh_process(depth: int, cache: Path) -> Spent:
    """`measure` in a process of its own, on a cache folder."""
    # One compiler at a time, waited for: those of a pool would go on after the step, and their time would be in no sum.
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, "--depth", str(depth)]
    done = subprocess.run(command, env={**os.environ, **settings}, check=True, stdout=subprocess.PIPE, text=True)
    return Spent(**json.loads(done.stdout.splitlines()[-1]))


def measure_in_turns(repeats: int) -> dict[int, Starts]:
    """By depth."""
    cold: dict[int, list[Spent]] = {depth: [] for depth in DEPTHS}
    warm: dict[int, list[Spent]] = {depth: [] for depth in DEPTHS}
    for _ in range(repeats):
        for depth in DEPTHS:
            with tempfile.TemporaryDirectory() as folder:
                cold[depth].append(in_fresh_process(depth, Path(folder)))
                warm[depth].append(in_fresh_process(depth, Path(folder)))
    return {depth: Starts(cold=cold[depth], warm=warm[depth]) for depth in DEPTHS}


def failures(starts: Mapping[int, Starts]) -> list[str]:
    """What is slower than it may be."""
    few, many = (starts[depth] for depth in DEPTHS)
    found: list[str] = []
    if many.cold_s > LIMIT * few.cold_s:
        found.append(
            f"{DEPTHS[1]} layers take {many.cold_s / few.cold_s:.2f} times as long as {DEPTHS[0]}, over {LIMIT}"
        )
    for depth, own in starts.items():
        if own.warm_s > CACHE_LIMIT * own.cold_s:
            share = own.warm_s / own.cold_s
            found.append(f"with a cache {depth} layers take {share:.2f} of the time without, over {CACHE_LIMIT:.2f}")
    return found


def table_of(starts: Mapping[int, Starts]) -> Table:
    """A row a depth."""
    names = ("anew: CPU [s]", "clock [s]", "cached: CPU [s]", "clock [s]")
    table = Table("layers", "graphs", *names)
    for depth, own in starts.items():
        clock = [min(run.wall_s for run in runs) for runs in (own.cold, own.warm)]
        seconds = (own.cold_s, clock[0], own.warm_s, clock[1])
        table.add_row(str(depth), str(own.cold[0].graphs), *(f"{value:.1f}" for value in seconds))
    return table


def main() -> int:
    """Print the table; 1 if depth or a start with a cache costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each depth, of which the least counts")
    parser.add_argument("--depth", type=int, help="measure this one, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.depth is not None:
        print(json.dumps(asdict(measure(arguments.depth))))
        return 0
    starts = measure_in_turns(arguments.repeats)
    few, many = (starts[depth].cold_s for depth in DEPTHS)
    ratio = f"{DEPTHS[1]} layers take {many / few:.2f} times the processor time of {DEPTHS[0]} (limit {LIMIT})"
    Console().print(table_of(starts), ratio, *(f"FAILED: {line}" for line in failures(starts)), sep="\n")
    return int(bool(failures(starts)))


if __name__ == "__main__":
    sys.exit(main())
