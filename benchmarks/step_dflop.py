"""Idle time on DFLOP's mixed data: arrival order on degrees shared by all components, against its degrees and scheduler (§5.3.5).

    python -P benchmarks/step_dflop.py [--json] [--steps N] [--seed N]

LLaVA-OneVision (SigLIP, Llama-3 8B) on 4 nodes of 8 A100, 1F1B. Idle time is what devices wait between the start and the end of
a step, added up over devices. *Ideal* is that of the same step with all microbatches alike (the mean of its samples in each).

- *shared*: one tp and dp for all components, as the baselines have: tp 2, 4 replicas of an encoder stage and 3 stages of the
  language model, microbatches of 4 samples. Those of the publication were tuned by hand and are not given.
- *own*: tp, pp and dp of each component and the number of microbatches by DFLOP's Algorithm 1 on means.
- *arrival*: samples as they come; *joint*: DFLOP's scheduler; *auto*: the fastest of our balancers by simulation.

What is assumed:
- samples from `mmcompile.data.synthetic` (dflop-mix: shares as published, sizes partly chosen); 729 tokens an image or crop, 196
  a frame, where samples with more than six images are videos; 1,344 a step, which many degrees divide;
- everything trains, and the backward computes the forward again: seconds are FLOPs in closed form at half an A100's peak, four
  times the forward, and for tp six all-reduces of each row a layer at NCCL's ring speed in a node; stages are equal, messages
  take no time. Balancers see seconds of one stage of each component;
- memory: 16 bytes a parameter, and the input of each layer over tp; an encoder stage holds E_pp + L_pp microbatches (Eq. 4-5);
- microbatches have at least 4 samples: the throughput of small ones, which keeps DFLOP from more of them, is not published.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

# Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

from step_models import Decoder, Encoder, vision  # noqa: E402
from step_report import Pool, Row, arguments, show  # noqa: E402

from mmcompile.batching.balance.arrival_order import Arrival  # noqa: E402
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts  # noqa: E402
from mmcompile.batching.balance.auto import Auto  # noqa: E402
from mmcompile.batching.balance.buckets import Joint  # noqa: E402
from mmcompile.batching.balance.simulated_step import StageShare, StepShape, simulate_step, step_time  # noqa: E402
from mmcompile.costmodel.hardware import find_device  # noqa: E402

COMPONENTS = ("vision", "language_model")
SIGLIP = vision(27, 1152, 4304)
LLAMA = Decoder(layers=32, width=4096, inner=14336, key_value_width=1024, vocabulary=128256)
IMAGE_TOKENS, FRAME_TOKENS, MOST_IMAGES = 729, 196, 6
GLOBAL_BATCH, DEVICES = 1344, 32
DEVICE, LINK, _ = find_device("A100-80G")
STATE_BYTES, NUMBER_BYTES = 16, 2
"""Of a parameter with its optimizer; of a number of a row."""
LEAST = 4
"""Samples of a microbatch."""
STEP = 4
"""A step in forwards."""
MODULES: tuple[Encoder, Decoder] = (SIGLIP, LLAMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Theta:
    """Degrees of encoder and language model, and microbatches of a replica of the latter."""

    tp: tuple[int, int]
    pp: tuple[int, int]
    dp: tuple[int, int]
    microbatches: int

    def __str__(self) -> str:
        parts = [
            f"{name} tp {tp} pp {pp} dp {dp}" for name, tp, pp, dp in zip("EL", self.tp, self.pp, self.dp, strict=True)
        ]
        return f"{', '.join(parts)}, {self.microbatches} microbatches"

    @property
    def devices(self) -> int:
        return sum(tp * pp * dp for tp, pp, dp in zip(self.tp, self.pp, self.dp, strict=True))


SHARED = Theta(tp=(2, 2), pp=(1, 3), dp=(4, 4), microbatches=84)


class Samples:
    """A pool of samples: rows and FLOPs of each component, float64 [components, samples]."""

    def __init__(self, seed: int) -> None:
        self.pool = Pool.of("dflop-mix", seed)
        patches = np.array([shape.patches for shape in self.pool.shapes], dtype=np.float64)
        video = np.array([len(shape.images) > MOST_IMAGES for shape in self.pool.shapes])
        tokens = self.pool.text + patches / IMAGE_TOKENS * np.where(video, FRAME_TOKENS, IMAGE_TOKENS)
        self.rows = np.stack([patches, tokens])
        self.flops = STEP * np.stack([SIGLIP.flops(patches, patches * IMAGE_TOKENS), LLAMA.flops(tokens)])

    def seconds(self, tp: tuple[int, int]) -> np.ndarray:
        """Of each sample in all stages of a component, float64 [components, samples]."""
        compute = self.flops / DEVICE.flops_per_s("bfloat16")
        return np.stack([compute[row] / tp[row] + self.rows[row] * _exchange_s(row, tp[row]) for row in range(2)])


def _exchange_s(row: int, tp: int) -> float:
    """Seconds of the all-reduces of one row in all layers, two in each forward and two in the backward."""
    module = MODULES[row]
    num_bytes = 6 * module.layers * module.width * NUMBER_BYTES
    return 2 * (tp - 1) / tp * num_bytes / LINK.ring_bytes_per_s


def own_degrees(samples: Samples, global_batch: int = GLOBAL_BATCH) -> Theta:
    """DFLOP's Algorithm 1: the shortest (N_mb + E_pp + L_pp - 1) max(E_dur, L_dur) of the mean sample that fits."""
    best, best_s = SHARED, np.inf
    means = {tp: samples.seconds((tp, tp)).mean(axis=1) for tp in (1, 2, 4, 8)}
    for (e_tp, e_pp, e_dp), (l_tp, l_pp, l_dp) in product(_degrees(27), _degrees(32)):
        if e_tp * e_pp * e_dp + l_tp * l_pp * l_dp != DEVICES:
            continue
        most = global_batch // (l_dp * LEAST)
        for count in (number for number in range(1, most + 1) if global_batch % (number * l_dp) == 0):
            theta = Theta(tp=(e_tp, l_tp), pp=(e_pp, l_pp), dp=(e_dp, l_dp), microbatches=count)
            slowest = max(means[e_tp][0] / (e_dp * e_pp), means[l_tp][1] / (l_dp * l_pp)) * global_batch / count
            seconds = float((count + e_pp + l_pp - 1) * slowest)
            if seconds < best_s and _fits(theta, samples, global_batch):
                best, best_s = theta, seconds
    return best


def _degrees(layers: int) -> list[tuple[int, int, int]]:
    """tp within a node, pp into equal stages, dp."""
    return [
        (tp, pp, dp)
        for tp, pp, dp in product((1, 2, 4, 8), range(1, DEVICES), range(1, DEVICES))
        if tp * pp * dp < DEVICES and layers % pp == 0
    ]


def _fits(theta: Theta, samples: Samples, global_batch: int) -> bool:
    for row, module in enumerate(MODULES):
        tp, pp, dp = theta.tp[row], theta.pp[row], theta.dp[row]
        rows = float(samples.rows[row].mean()) * global_batch / (theta.microbatches * dp)
        held = theta.pp[1] + (theta.pp[0] if row == 0 else 0)
        activations = held * rows * NUMBER_BYTES * module.width * module.layers / (pp * tp)
        if STATE_BYTES * module.parameters / (tp * pp) + activations > DEVICE.memory_bytes:
            return False
    return True


class Case:
    """Random steps on some degrees."""

    def __init__(self, samples: Samples, theta: Theta) -> None:
        self.theta = theta
        self.grid = Grid(num_replicas=theta.dp, num_microbatches=theta.microbatches)
        self._seconds = samples.seconds(theta.tp)
        shares = {
            name: tuple(
                StageShare(
                    name=f"{name}.{index}", forward=1 / STEP / pp, input_grad=2 / STEP / pp, weight_grad=1 / STEP / pp
                )
                for index in range(pp)
            )
            for name, pp in zip(COMPONENTS, theta.pp, strict=True)
        }
        self.shape = StepShape(stages=shares)

    def costs(self, drawn: np.ndarray) -> SampleCosts:
        """Seconds of these samples in all stages of a component."""
        return SampleCosts(components=COMPONENTS, costs=self._seconds[:, drawn])

    def played(self, assignment: Assignment, costs: SampleCosts) -> tuple[float, float]:
        """Device seconds that wait, and seconds of the step."""
        timeline = simulate_step(assignment, costs, self.shape, record=False)
        tp = [self.theta.tp[row] for row in range(2) for _ in range(self.theta.dp[row] * self.theta.pp[row])]
        waits = [many * (timeline.makespan_s - busy) for many, busy in zip(tp, timeline.busy_s, strict=True)]
        return sum(waits), timeline.makespan_s

    def ways(self, costs: SampleCosts) -> dict[str, tuple[float, float]]:
        """Name -> idle device seconds and seconds of the step."""
        by_stage = SampleCosts(components=COMPONENTS, costs=costs.costs / np.array(self.theta.pp)[:, None])
        mean = np.broadcast_to(costs.costs.mean(axis=1, keepdims=True), costs.costs.shape)
        alike = SampleCosts(components=COMPONENTS, costs=mean)
        auto = Auto(
            step_time=step_time(self.shape),
            shares={name: 1 / pp for name, pp in zip(COMPONENTS, self.theta.pp, strict=True)},
        )
        return {
            "ideal": self.played(Arrival().assign(alike, self.grid), alike),
            "arrival": self.played(Arrival().assign(costs, self.grid), costs),
            "joint": self.played(Joint().assign(by_stage, self.grid), costs),
            "auto": self.played(auto.assign(costs, self.grid), costs),
        }


def figures(samples: Samples, num_steps: int, seed: int) -> Iterator[Row]:
    """All rows."""
    cases = {"shared": Case(samples, SHARED), "own": Case(samples, own_degrees(samples))}
    idle: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    for index in range(num_steps):
        drawn = samples.pool.draw(GLOBAL_BATCH, seed, index)
        for degrees, case in cases.items():
            for way, (wait, seconds) in case.ways(case.costs(drawn)).items():
                idle.setdefault(f"{degrees}, {way}", []).append(wait)
                steps.setdefault(f"{degrees}, {way}", []).append(seconds)
    for degrees, case in cases.items():
        for way in ("ideal", "arrival", "joint", "auto"):
            group = f"{degrees}: {case.theta}"
            yield Row.of(group, f"idle device time, {way}", idle[f"{degrees}, {way}"], "s")
    waits = {name: np.array(values) for name, values in idle.items()}
    pairs = [("shared, arrival", "own, joint"), ("shared, arrival", "own, auto")]
    pairs += [(f"{degrees}, arrival", f"{degrees}, joint") for degrees in cases]
    for before, after in pairs:
        less = 100 * (1 - waits[after] / waits[before])
        published = "82, 84 (PyTorch, Megatron-LM)" if after == "own, joint" != before and "shared" in before else ""
        yield Row.of("less idle time", f"{after} against {before}", less.tolist(), "%", published)
    for degrees in cases:
        ideal, arrival = waits[f"{degrees}, ideal"], waits[f"{degrees}, arrival"]
        less = 100 * (1 - (waits[f"{degrees}, joint"] - ideal) / (arrival - ideal))
        yield Row.of("less idle time", f"{degrees}, joint, of what is beyond ideal", less.tolist(), "%")
    for before, after in pairs:
        faster = np.array(steps[before]) / np.array(steps[after])
        yield Row.of("throughput", f"{after} over {before}", faster.tolist(), "x")


def main() -> int:
    options = arguments(__doc__, steps=20).parse_args()
    rows = list(figures(Samples(options.seed), options.steps, options.seed))
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
