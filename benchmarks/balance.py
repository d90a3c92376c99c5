"""Balancers: seconds and quality on mixes like those of the papers.

    python -P benchmarks/balance.py [--json] [--seed N] [--rounds N]

- joint: 2,048 samples into 256 buckets, two components of equal total work, memory limits 5% over the mean bucket
- hierarchical: 512 samples to 4 replicas x 16 microbatches with deferral; standard deviation of a microbatch's work against
  arrival order, both components
- post-balance: 60 samples a rank, three phases (vision, audio, whole sequences), 160 to 2,560 ranks; seconds per n log n
- between nodes: what a rank sends to other nodes, on 128 ranks in nodes of 8, by batches as balanced, rearranged, and node-local
- small: 200 steps of 8 samples into 3 buckets against the optimum by trying everything; 1,000 random steps against arrival order

Seconds are of the process, one thread, the best of several rounds. Work of a sample: patches (vision), frames (audio), tokens and
their attention at 20,000 tokens a square (language model); scaled so that components have equal totals where that is said.

Exits with 1 if a promise of its table is not kept.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

# Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this one

from rearrange import rearrange  # noqa: E402

from mmcompile.batching.balance.arrival_order import Arrival  # noqa: E402
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, exchanged  # noqa: E402
from mmcompile.batching.balance.auto import Auto  # noqa: E402
from mmcompile.batching.balance.balancer import Balancer  # noqa: E402
from mmcompile.batching.balance.bucket_bounds import bottleneck, step_bound  # noqa: E402
from mmcompile.batching.balance.buckets import Joint  # noqa: E402
from mmcompile.batching.balance.hierarchical import Defer, Hierarchical, stratified  # noqa: E402
from mmcompile.batching.balance.integer_program import Limits  # noqa: E402
from mmcompile.batching.balance.lpt import lpt  # noqa: E402
from mmcompile.batching.balance.node_local import NodeLocal  # noqa: E402
from mmcompile.batching.balance.post_balance import PostBalance  # noqa: E402
from mmcompile.data.synthetic import synthetic  # noqa: E402

HEURISTICS = Limits(variables=0)
RANKS_PER_NODE = 8
SAMPLES_PER_RANK = 60
TWO = ("vision", "language_model")
COMPONENTS = ("vision", "audio", "language_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number and what was promised of it."""

    name: str
    value: float
    unit: str
    most: float | None = None
    """The promise; None for a figure that only informs."""

    @property
    def kept(self) -> bool:
        return self.most is None or self.value <= self.most


def step(name: str, count: int, seed: int, *, components: tuple[str, ...] = TWO, even: bool = True) -> SampleCosts:
    """Costs of samples of a mix.

    Args:
        even: scale components to the same total.
    """
    shapes = list(synthetic(name, count, seed))
    patches, frames, text = (
        np.array([getattr(shape, field) for shape in shapes], dtype=np.int64)
        for field in ("patches", "frames", "text_tokens")
    )
    tokens = text + patches // 4 + frames // 4
    rows = {"vision": patches, "audio": frames, "language_model": tokens}
    if components == TWO:
        rows["vision"] = patches + frames
    lengths = np.stack([rows[component] for component in components])
    costs = lengths.astype(np.float64)
    costs[-1] += costs[-1] ** 2 / 20_000
    if even:
        costs /= costs.sum(axis=1, keepdims=True)
    return SampleCosts(components=components, costs=costs, lengths=lengths)


def timed(balancer: Balancer, costs: SampleCosts, grid: Grid, rounds: int) -> tuple[float, Assignment]:
    """Milliseconds of the fastest round, and the checked assignment."""
    spent = []
    assignment = None
    for _ in range(rounds):
        began = time.process_time()
        assignment = balancer.assign(costs, grid)
        spent.append(time.process_time() - began)
    assert assignment is not None, "at least one round"
    assignment.check(costs)
    return min(spent) * 1e3, assignment


def joint(seed: int, rounds: int) -> Iterator[Figure]:
    grid = Grid(num_replicas=(16, 16), num_microbatches=16)
    costs = step("dflop-mix", 2048, seed)
    spent, found = timed(Joint(), costs, grid, rounds)
    yield Figure(name="joint: 2,048 samples into 256 buckets", value=spent, unit="ms", most=50)
    over = bottleneck(found, costs) / step_bound(costs, grid) - 1
    yield Figure(name="joint: over the lower bound", value=over * 100, unit="%", most=1)
    mean = bottleneck(found, costs) / (float(costs.costs.sum(axis=1).max()) / 256) - 1
    yield Figure(name="joint: over the mean bucket (images are indivisible)", value=mean * 100, unit="%")
    arrival = bottleneck(Arrival().assign(costs, grid), costs) / step_bound(costs, grid) - 1
    yield Figure(name="joint: arrival order over the lower bound", value=arrival * 100, unit="%")


def hierarchical(seed: int, rounds: int) -> Iterator[Figure]:
    grid = Grid(num_replicas=(4, 4), num_microbatches=16)
    for name in ("synthchartnet", "llava-150k", "chartqa", "cocoqa"):
        costs = step(name, 512, seed)
        before = Arrival().assign(costs, grid).loads(costs)
        for defer in (Defer.CRITICAL, Defer.ALL):
            spent, found = timed(Hierarchical(defer=defer), costs, grid, rounds)
            yield Figure(name=f"hierarchical, {defer}: 512 {name}", value=spent, unit="ms", most=50)
            for component, loads in found.loads(costs).items():
                ratio = float(before[component].std() / loads.std())
                yield Figure(
                    name=f"hierarchical, {defer}: {name}, {component}, times less spread", value=ratio, unit="x"
                )


def post_balance(seed: int, rounds: int) -> Iterator[Figure]:
    spent: dict[int, float] = {}
    for ranks in (160, 640, 2560):
        count = ranks * SAMPLES_PER_RANK
        costs = step("orchmllm-mix", count, seed, components=COMPONENTS, even=False)
        spent[ranks], found = timed(PostBalance(), costs, Grid(num_replicas=(ranks,) * 3), rounds)
        if ranks == 2560:
            yield Figure(name="post-balance: 153,600 samples on 2,560 ranks", value=spent[ranks], unit="ms", most=300)
            for component, loads in found.loads(costs).items():
                over = float(loads.max() / loads.mean() - 1)
                yield Figure(name=f"post-balance: {component} over the mean", value=over * 100, unit="%")
    sizes = sorted(spent)
    growth = [spent[size] / (size * math.log(size * SAMPLES_PER_RANK)) for size in sizes]
    name = "post-balance: seconds per n log n, 2,560 against 640 ranks"
    yield Figure(name=name, value=growth[2] / growth[1], unit="x", most=1.5)
    everything = SampleCosts(
        components=COMPONENTS, costs=np.random.default_rng(seed).lognormal(5, 1, (3, 2560 * SAMPLES_PER_RANK))
    )
    full, _ = timed(PostBalance(), everything, Grid(num_replicas=(2560,) * 3), rounds)
    yield Figure(name="post-balance: the same, every sample in every phase", value=full, unit="ms", most=300)


def between_nodes(seed: int, rounds: int) -> Iterator[Figure]:
    ranks = 128
    costs = step("orchmllm-mix", ranks * SAMPLES_PER_RANK, seed, components=COMPONENTS, even=False)
    grid = Grid(num_replicas=(ranks,) * 3)
    arrival, found = Arrival().assign(costs, grid), PostBalance().assign(costs, grid)
    spent, local = timed(NodeLocal(ranks_per_node=RANKS_PER_NODE), costs, grid, rounds)
    yield Figure(name="node-local: 7,680 samples on 128 ranks", value=spent, unit="ms")
    assert costs.lengths is not None
    for row, component in enumerate(COMPONENTS):
        volume = exchanged(arrival, -1, found, row, costs.lengths[row])
        began = time.process_time()
        best = rearrange(volume, RANKS_PER_NODE)
        spent = (time.process_time() - began) * 1e3
        ratio = best.sent / best.sent_before
        yield Figure(name=f"rearranged: {component}, largest volume between nodes", value=ratio, unit="x", most=1)
        yield Figure(name=f"rearranged: {component}, time", value=spent, unit="ms")
        volume = exchanged(arrival, -1, local, row, costs.lengths[row])
        ratio = rearrange(volume, RANKS_PER_NODE).sent / best.sent_before
        yield Figure(name=f"node-local: {component}, largest volume between nodes", value=ratio, unit="x", most=0.436)
        loads = local.loads(costs)[component]
        over = float(loads.max() / loads.mean() - 1)
        yield Figure(name=f"node-local: {component} over the mean", value=over * 100, unit="%")


def small(seed: int) -> Iterator[Figure]:
    samples, buckets = 8, 3
    member = np.array(list(product(range(buckets), repeat=samples)))[:, None] == np.arange(buckets)[:, None]

    def optimum(weights: np.ndarray) -> float:
        return float((member @ weights.T).max(axis=(1, 2)).min())

    def largest(weights: np.ndarray, bins: np.ndarray) -> float:
        return float(np.bincount(bins, weights=weights).max())

    grid = Grid(num_replicas=(buckets, buckets))
    alone = Auto(
        step_time=bottleneck, keep_below=0.0, candidates=(PostBalance(), Joint(limits=HEURISTICS), Hierarchical())
    )
    ratios: dict[str, list[float]] = {"lpt": [], "stratified": [], "auto": [], "auto, heuristics alone": []}
    for index in range(200):
        costs = np.random.default_rng([seed, index]).lognormal(0, 0.3 + index % 4 * 0.4, (2, samples))
        steps = SampleCosts(components=TWO, costs=costs)
        # With one microbatch, components can be balanced apart: the best of all assignments.
        best = max(optimum(row[None]) for row in costs)
        ratios["lpt"].append(largest(costs[0], lpt(costs[0], buckets)) / optimum(costs[:1]))
        ratios["stratified"].append(largest(costs[0], stratified(costs[0], costs[1], buckets)) / optimum(costs[:1]))
        ratios["auto"].append(bottleneck(Auto(step_time=bottleneck, keep_below=0.0).assign(steps, grid), steps) / best)
        ratios["auto, heuristics alone"].append(bottleneck(alone.assign(steps, grid), steps) / best)
    limits = {"lpt": 4 / 3 - 1 / (3 * buckets), "stratified": 2 - 1 / buckets}
    for name, found in ratios.items():
        yield Figure(name=f"small: {name}, largest over optimum", value=max(found), unit="x", most=limits.get(name))
        most = None if name in limits else 1.02
        yield Figure(name=f"small: {name}, mean over optimum", value=float(np.mean(found)), unit="x", most=most)
    slower = sum(map(_slower, range(1000)))
    yield Figure(name="small: 1,000 steps, slower than arrival order", value=slower, unit="steps", most=0)


def _slower(index: int) -> bool:
    rng = np.random.default_rng(index)
    costs = rng.lognormal(0, rng.choice([0.05, 0.5, 1.5]), (2, int(rng.integers(1, 60))))
    costs[0, rng.random(costs.shape[1]) < 0.3] = 0
    steps = SampleCosts(components=TWO, costs=costs)
    grid = Grid(
        num_replicas=(int(rng.integers(1, 4)), int(rng.integers(1, 4))), num_microbatches=int(rng.integers(1, 6))
    )
    auto = Auto(candidates=(PostBalance(), Joint(limits=HEURISTICS), Hierarchical()))
    choice = auto.choose(steps, grid)
    return choice.step_s > choice.arrival_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="of each timing; the fastest counts")
    options = parser.parse_args()
    parts: tuple[Callable[[int, int], Iterator[Figure]], ...] = (joint, hierarchical, post_balance, between_nodes)
    figures = [figure for part in parts for figure in part(options.seed, options.rounds)] + list(small(options.seed))
    if options.json:
        rows = [msgspec.to_builtins(figure) | {"kept": figure.kept} for figure in figures]
        print(msgspec.json.encode({"seed": options.seed, "figures": rows}).decode())
    else:
        table = Table("figure", "value", "promise", "kept")
        for figure in figures:
            promise = "-" if figure.most is None else f"<= {figure.most:.4g} {figure.unit}"
            table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}", promise, "yes" if figure.kept else "NO")
        Console(width=120).print(table)
    return 0 if all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
