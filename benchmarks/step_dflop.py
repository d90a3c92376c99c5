"""Idle time on DFLOP's mixed data: samples as they come against all components balanced at once (DFLOP §5.3.5, Fig. 13).

    python -P benchmarks/step_dflop.py [--json] [--steps N] [--seed N]

LLaVA-OneVision (SigLIP, Llama-3 8B) on 4 nodes of 8 A100, 1F1B. Idle time is what devices wait between the start and the end of
a step, added up over devices. *Ideal* is that of a step whose microbatches are all alike (the mean of its samples in each), which
no balance can avoid: filling and draining, and the stages of one component being faster than the other's.

- *arrival*: samples as they come.
- *joint*: DFLOP's scheduler, encoder and language model balanced at once.
- *auto*: the fastest of our balancers by simulation.

What is assumed:
- samples from `mmcompile.data.synthetic` (dflop-mix: shares as published, sizes partly chosen); 729 tokens an image or crop, 196 a
  frame, where samples with more than six images are videos;
- the published comparison is between systems on degrees that are not published. Here all run on the same: 4 replicas of one encoder
  stage and three of the language model, tp 2; 512 samples a step, 16 microbatches of 8 samples a replica. So this is the part of
  the gain that balancing alone makes;
- seconds are FLOPs in closed form at half an A100's peak, forward and twice that backward, everything trains; layers are cut so that
  the slowest stage is fastest; messages take no time. Balancers see seconds of each component's slowest stage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

from step_models import STEP, Decoder, vision  # noqa: E402
from step_report import Pool, Row, arguments, show  # noqa: E402

from mmcompile.costmodel.hardware import find_device  # noqa: E402
from mmcompile.step.assignment import Assignment, Grid, SampleCosts  # noqa: E402
from mmcompile.step.balance.auto import Auto  # noqa: E402
from mmcompile.step.balance.baselines import Arrival  # noqa: E402
from mmcompile.step.balance.buckets import Joint  # noqa: E402
from mmcompile.step.simulated import StageShare, StepShape, simulate_step, step_time  # noqa: E402

COMPONENTS = ("vision", "language_model")
SIGLIP = vision(27, 1152, 4304)
LLAMA = Decoder(layers=32, width=4096, inner=14336, key_value_width=1024, vocabulary=128256)
IMAGE_TOKENS, FRAME_TOKENS, MOST_IMAGES = 729, 196, 6
REPLICAS, TENSOR_PARALLEL, GLOBAL_BATCH, MICROBATCHES = 4, 2, 512, 16
STAGES = (1, 3)
DEVICE = find_device("A100-80G")[0]


class Case:
    """The setting with a pool of samples."""

    def __init__(self, seed: int, global_batch: int = GLOBAL_BATCH, microbatches: int = MICROBATCHES) -> None:
        self.grid = Grid(num_replicas=(REPLICAS, REPLICAS), num_microbatches=microbatches)
        self._pool = Pool.of("dflop-mix", seed)
        self._size = global_batch
        patches = np.array([shape.patches for shape in self._pool.shapes], dtype=np.float64)
        video = np.array([len(shape.images) > MOST_IMAGES for shape in self._pool.shapes])
        images = patches / IMAGE_TOKENS
        tokens = self._pool.text + images * np.where(video, FRAME_TOKENS, IMAGE_TOKENS)
        flops = np.stack([SIGLIP.flops(patches, patches * IMAGE_TOKENS), LLAMA.flops(tokens)])
        self._seconds = STEP * flops / (TENSOR_PARALLEL * DEVICE.flops_per_s("bfloat16"))
        shares = {
            name: tuple(
                StageShare(name=f"{name}.{index}", forward=1 / (3 * count), input_grad=1 / (3 * count), weight_grad=1 / (3 * count))
                for index in range(count)
            )
            for name, count in zip(COMPONENTS, STAGES, strict=True)
        }
        self.shape = StepShape(stages=shares)

    def step(self, *seed: int) -> SampleCosts:
        """Seconds of each sample of a random step in all stages of a component."""
        return SampleCosts(components=COMPONENTS, costs=self._seconds[:, self._pool.draw(self._size, *seed)])

    def idle_s(self, assignment: Assignment, costs: SampleCosts) -> tuple[float, float]:
        """Device seconds that wait, and seconds of the step."""
        timeline = simulate_step(assignment, costs, self.shape, record=False)
        wait = len(timeline.busy_s) * timeline.makespan_s - sum(timeline.busy_s)
        return TENSOR_PARALLEL * wait, timeline.makespan_s


def balanced(case: Case, costs: SampleCosts) -> dict[str, tuple[Assignment, SampleCosts]]:
    """Name -> assignment, and the costs it is played with."""
    by_stage = SampleCosts(components=COMPONENTS, costs=costs.costs / np.array(STAGES)[:, None])
    time = step_time(case.shape)
    mean = SampleCosts(
        components=COMPONENTS, costs=np.broadcast_to(costs.costs.mean(axis=1, keepdims=True), costs.costs.shape)
    )
    return {
        "ideal": (Arrival().assign(mean, case.grid), mean),
        "arrival": (Arrival().assign(costs, case.grid), costs),
        "joint": (Joint().assign(by_stage, case.grid), costs),
        "auto": (Auto(step_time=lambda assignment, _: time(assignment, costs)).assign(by_stage, case.grid), costs),
    }


def figures(case: Case, num_steps: int, seed: int) -> Iterator[Row]:
    """All rows."""
    idle: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    for index in range(num_steps):
        for name, (assignment, costs) in balanced(case, case.step(seed, index)).items():
            wait, seconds = case.idle_s(assignment, costs)
            idle.setdefault(name, []).append(wait)
            steps.setdefault(name, []).append(seconds)
    for name, values in idle.items():
        yield Row.of("idle device time", name, values, "s")
    waits = {name: np.array(values) for name, values in idle.items()}
    for name in ("joint", "auto"):
        less = 100 * (1 - waits[name] / waits["arrival"])
        yield Row.of("idle time less than arrival", name, less.tolist(), "%", "82 - 84" if name == "joint" else "")
        beyond = 100 * (1 - (waits[name] - waits["ideal"]) / (waits["arrival"] - waits["ideal"]))
        yield Row.of("idle time less than arrival", f"{name}, of what is beyond ideal", beyond.tolist(), "%")
    for name in ("joint", "auto"):
        faster = np.array(steps["arrival"]) / np.array(steps[name])
        yield Row.of("throughput over arrival", name, faster.tolist(), "x")


def main() -> int:
    options = arguments(__doc__, steps=50).parse_args()
    rows = list(figures(Case(options.seed), options.steps, options.seed))
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
