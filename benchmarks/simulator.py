"""How fast the simulator plays schedules, in pure Python on one core.

Plays a step of two encoders and a language model (36 stages, 128 microbatches, links and durations that differ), by each kind
of schedule, without recording events, as the planner does. Prints actions per second of each kind and, last, the slowest;
exits with 1 if that is below 200,000.

    python -P benchmarks/simulator.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from mmcompile.config import ScheduleKind
from mmcompile.costmodel.compute import LayerTimes
from mmcompile.planner.schedule.schedule import Flow, FlowEdge, build_schedule
from mmcompile.planner.schedule.simulate import simulate

TARGET_ACTIONS_PER_S = 200_000
NUM_MICROBATCHES = 128
ENCODER_STAGES = 6
LANGUAGE_STAGES = 24
ENCODERS = ("vision", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What a schedule needs to know of a stage."""

    name: str
    ranks: tuple[int, ...]
    depth: int


def pipeline() -> tuple[list[Stage], Flow]:
    """Two encoder chains into the first stage of a language model, every stage on its own rank."""
    chains = [*((name, ENCODER_STAGES, LANGUAGE_STAGES) for name in ENCODERS), ("language_model", LANGUAGE_STAGES, 0)]
    stages = [(f"{name}.{index}", tail + count - 1 - index) for name, count, tail in chains for index in range(count)]
    pairs = [(f"{name}.{i}", f"{name}.{i + 1}") for name, count, _ in chains for i in range(count - 1)]
    pairs += [(f"{name}.{ENCODER_STAGES - 1}", "language_model.0") for name in ENCODERS]
    names = tuple(name for name, _ in stages)
    return (
        [Stage(name=name, ranks=(rank,), depth=depth) for rank, (name, depth) in enumerate(stages)],
        Flow(
            stages=names,
            edges=tuple(FlowEdge(source=source, target=target, gradient=True) for source, target in pairs),
            backward=names,
        ),
    )


def best_s(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the best of some rounds: other work on the machine only slows."""
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    stages, flow = pipeline()
    rng = random.Random(0)
    durations = {
        stage.name: [
            LayerTimes(forward_s=rng.uniform(1, 2), input_grad_s=rng.uniform(1, 2), weight_grad_s=rng.uniform(1, 2))
            for _ in range(NUM_MICROBATCHES)
        ]
        for stage in stages
    }
    link_s = {pair: 0.1 for edge in flow.edges for pair in ((edge.source, edge.target), (edge.target, edge.source))}
    print(f"{len(stages)} stages, {NUM_MICROBATCHES} microbatches, events not recorded, best of {rounds}")
    speeds: list[float] = []
    for kind in get_args(ScheduleKind):
        build = partial(build_schedule, stages, [flow] * NUM_MICROBATCHES, kind)
        schedule = build()
        count = sum(map(len, schedule.ranks))
        built = count / best_s(build, rounds)
        speeds.append(count / best_s(partial(simulate, schedule, durations, link_s, record=False), rounds))
        print(f"{kind:<12} {count:>7,} actions  built {built:>9,.0f}/s  played {speeds[-1]:>9,.0f}/s")
    print(f"slowest: {min(speeds):,.0f} actions/s (wanted: {TARGET_ACTIONS_PER_S:,})")
    return int(min(speeds) < TARGET_ACTIONS_PER_S)


if __name__ == "__main__":
    sys.exit(main())
