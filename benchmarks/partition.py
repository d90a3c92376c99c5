"""Split 126 layers into stages: CPU seconds of the interval DP for all counts at once, and of Z3 to prove some of them.

Exits with 1 if all counts up to 64 take the DP more than a second, or one proof more than its usual budget.
"""

from __future__ import annotations

import random
import sys
import time

from rich.console import Console
from rich.table import Table

from mmcompile.planner.exact.rules import Cap, Demand
from mmcompile.planner.exact.solver import BUDGET_S, Exact, solve
from mmcompile.planner.exact.split_problem import ExactChain, ExactProblem
from mmcompile.planner.pricing.chains import ChainLayer
from mmcompile.planner.search.partition import PartitionLayer, Split, StageTables, partition

NUM_LAYERS = 126
"""Of the largest dense language models published (Llama 3.1 405B)."""
MAX_STAGES = 64
NUM_MICROBATCHES = 128
DP_LIMIT_S = 1.0
PROVED = (4, 8, 16, 32)


def main() -> int:
    layers = _layers(random.Random(0))
    memory_bytes = 40 * 2**30
    began = time.process_time()
    splits = partition(layers, MAX_STAGES, memory_bytes=memory_bytes, num_microbatches=NUM_MICROBATCHES)
    dp_s = time.process_time() - began
    table = Table("stages", "slowest [ms]", "Z3 [s]", "proved", title=f"{NUM_LAYERS} layers, 40 GiB a stage")
    proofs = {count: _proof(layers, splits[count - 1], count, memory_bytes) for count in PROVED}
    for count, (slowest, seconds, verdict, _) in proofs.items():
        table.add_row(str(count), slowest, f"{seconds:.2f}", verdict)
    console = Console()
    console.print(table)
    console.print(f"interval DP, all counts up to {MAX_STAGES}: {dp_s:.3f} s (limit {DP_LIMIT_S:g} s)")
    slow = dp_s > DP_LIMIT_S or not all(agrees for *_, agrees in proofs.values())
    return 1 if slow else 0


def _layers(rng: random.Random) -> list[PartitionLayer]:
    """Layers whose times vary by a tenth, as those of one kind with different masks do, and a big head."""
    layers = [
        PartitionLayer(
            seconds=rng.uniform(0.95, 1.05) * 0.020,
            fixed_bytes=2**30,
            saved_bytes=2**26,
            send_s=rng.uniform(0.9, 1.1) * 1e-3,
            return_s=rng.uniform(0.9, 1.1) * 1e-3,
        )
        for _ in range(NUM_LAYERS - 1)
    ]
    return [*layers, PartitionLayer(seconds=0.035, fixed_bytes=2**31, saved_bytes=2**28)]


def _proof(
    layers: list[PartitionLayer], split: Split | None, count: int, memory_bytes: int
) -> tuple[str, float, str, bool]:
    """Slowest stage, seconds, verdict, and whether Z3 agrees with the DP in its usual budget."""
    labels = tuple(ChainLayer(component="lm", index=index, name=f"layers.{index}") for index in range(len(layers)))
    chain = ExactChain(name="lm", labels=labels, tables=StageTables(layers=tuple(layers)), low=count, high=count)
    problem = ExactProblem(
        chains=(chain,),
        in_flight=lambda depth: min(depth + 1, NUM_MICROBATCHES),
        demands=(Demand(rule=Cap(num_bytes=memory_bytes), words="memory"),),
    )
    began = time.process_time()
    found = solve(problem, budget_s=60)
    seconds = time.process_time() - began
    if not isinstance(found, Exact):
        return "-", seconds, "fits in no split", split is None and seconds <= BUDGET_S
    agrees = split is not None and found.proved and found.slowest_s == split.bottleneck_s
    return f"{found.slowest_s * 1e3:.3f}", seconds, "yes" if found.proved else "no", agrees and seconds <= BUDGET_S


if __name__ == "__main__":
    sys.exit(main())
