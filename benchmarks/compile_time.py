"""Seconds to compile the stage programs of towers of 4 and of 32 layers, anew and with the cache of an earlier run.

Each figure is a fresh process: torch.compile's caches are on disk, in a folder made for this run. What is timed is the first
forward and backward of a stage that holds the whole tower, less a later one. Fails if depth costs more than a factor of 1.5.

    python -P benchmarks/compile_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

DEPTHS = (4, 32)
LIMIT = 1.5
"""Of the time for 32 layers over that for 4: the acceptance of the outlined layers."""
HIDDEN, BATCH, LENGTH = 128, 2, 64


def measure(depth: int) -> dict[str, float]:
    """Compile a Llama of so many layers as one stage."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import mmcompile as mm
    from mmcompile.ir.capture import capture
    from mmcompile.ir.inputs import completed
    from mmcompile.lower.compiled import load_compiled_stage
    from mmcompile.lower.patterns import Patterns
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

    def step() -> float:
        start = time.perf_counter()
        stage(*given)[0].backward()
        return time.perf_counter() - start

    first, *later = (step() for _ in range(4))
    return {"seconds": first - min(later), "graphs": num_graphs()}


def in_fresh_process(depth: int, cache: Path) -> dict[str, float]:
    """`measure` in a process of its own, on a cache folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-P", __file__, "--depth", str(depth)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Print the table; 1 if depth costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, help="measure this one, and print it as JSON")
    depth = parser.parse_args().depth
    if depth is not None:
        print(json.dumps(measure(depth)))
        return 0
    table = Table("layers", "graphs", "first start [s]", "next start [s]")
    first: dict[int, float] = {}
    for layers in DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (in_fresh_process(layers, Path(folder)) for _ in range(2))
        first[layers] = cold["seconds"]
        table.add_row(str(layers), f"{cold['graphs']:.0f}", f"{cold['seconds']:.1f}", f"{warm['seconds']:.1f}")
    ratio = first[DEPTHS[1]] / first[DEPTHS[0]]
    Console().print(table, f"{DEPTHS[1]} layers take {ratio:.2f} times as long as {DEPTHS[0]} (limit {LIMIT})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
