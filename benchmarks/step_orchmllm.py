"""Post-balancing of three modalities on 128 and 2,560 ranks: throughput, and what moves between nodes (OrchMLLM §8).

    python -P benchmarks/step_orchmllm.py [--json] [--steps N] [--seed N]

Every rank holds all of the model (ZeRO-3) and runs every phase: vision, audio, language model, forward and backward. Phases end
together, because parameters are gathered layer by layer by all ranks, so

    step = sum over phases of the slowest rank's seconds

- *none*: a rank computes the samples that it drew, in all phases.
- *LLM only*: samples are balanced for the language model; encoders compute them where it does.
- *ours*: every phase balanced by itself, the audio phase for padded batches.
- *ours, node-local*: vision and language model leave samples on their nodes where they can.

What is assumed:
- samples from `mmcompile.data.synthetic` (orchmllm-mix: shares of the three datasets from their cards, sizes chosen), images
  capped at 448, 672 and 896 pixels a side as published; tokens after the published downsampling;
- seconds are FLOPs of the published layers and widths at half the peak of an H100, which MFU counts in full;
- audio batches are padded to their longest sound, the others are packed, as published; MFU counts no padding;
- gathering parameters and moving samples are hidden; activation memory is not modelled. Published runs without balancing had
  to use smaller mini-batches (65, 40, 15 samples a rank for 80, 60, 30) for lack of memory; both sizes are run here;
- what moves is counted in patches, frames and tokens, at the rank that sends most to other nodes; on 2,560 ranks for one step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
from scipy.optimize import linprog  # noqa: E402
from scipy.sparse import coo_array, hstack  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`, which the tests share with this file

from rearrange import rearrange  # noqa: E402
from step_models import STEP, Decoder, Encoder, audio, vision  # noqa: E402
from step_report import Pool, Row, arguments, show  # noqa: E402
from support.oracles.batch_costs import BatchKind, batch_costs  # noqa: E402

from mmcompile.batching.balance.arrival_order import Arrival  # noqa: E402
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, exchanged  # noqa: E402
from mmcompile.batching.balance.lpt import lpt  # noqa: E402
from mmcompile.batching.balance.node_local import NodeLocal  # noqa: E402
from mmcompile.batching.balance.post_balance import Algorithm, PostBalance  # noqa: E402
from mmcompile.costmodel.hardware import find_device  # noqa: E402

COMPONENTS = ("vision", "audio", "language_model")
VISION, AUDIO, LANGUAGE = range(3)
RANKS_PER_NODE = 8
SMALL, LARGE = 128, 2560
PATCH = 14
TAILORED = PostBalance(algorithms=(Algorithm.SECONDS, Algorithm.PADDED, Algorithm.SECONDS))
DEVICE = find_device("H100")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mllm:
    """One row of OrchMLLM's Table 1 and its settings."""

    name: str
    vision: Encoder
    audio: Encoder
    language: Decoder
    pixels: int
    """Largest side of an image."""
    downsampling: tuple[int, int]
    """Patches and frames that make one token."""
    batches: Mapping[int, tuple[int, int]]
    """Ranks -> samples a rank, with and without balancing. Those without are published for 2,560 ranks only."""


MODELS = (
    Mllm(
        name="MLLM-10B",
        vision=vision(36, 2048, 8192),
        audio=audio(32, 1280, 5120),
        language=Decoder(layers=28, width=3584, inner=18944, key_value_width=512, vocabulary=152064),
        pixels=448,
        downsampling=(1, 2),
        batches={SMALL: (75, 75), LARGE: (80, 65)},
    ),
    Mllm(
        name="MLLM-18B",
        vision=vision(40, 2400, 9600),
        audio=audio(32, 1280, 5120),
        language=Decoder(layers=48, width=5120, inner=13824, key_value_width=1024, vocabulary=152064),
        pixels=672,
        downsampling=(4, 2),
        batches={SMALL: (50, 50), LARGE: (60, 40)},
    ),
    Mllm(
        name="MLLM-84B",
        vision=vision(45, 3200, 12800),
        audio=audio(48, 3072, 12288),
        language=Decoder(layers=80, width=8192, inner=29568, key_value_width=1024, vocabulary=152064),
        pixels=896,
        downsampling=(4, 4),
        batches={SMALL: (25, 25), LARGE: (30, 15)},
    ),
)


class Step:
    """One random step of a model: costs of its samples, and how long an assignment takes."""

    def __init__(self, model: Mllm, pool: Pool, drawn: np.ndarray, num_ranks: int) -> None:
        most = (model.pixels // PATCH) ** 2
        patches = np.minimum(np.array([shape.patches for shape in pool.shapes], dtype=np.int64), most)[drawn]
        frames = pool.frames[drawn]
        self.tokens = pool.text[drawn] + patches // model.downsampling[0] + frames // model.downsampling[1]
        self.flops = float(STEP) * np.stack(
            [
                model.vision.flops(patches.astype(np.float64), patches.astype(np.float64) ** 2),
                model.audio.flops(frames.astype(np.float64), frames.astype(np.float64) ** 2),
                model.language.flops(self.tokens.astype(np.float64)),
            ]
        )
        self.costs = SampleCosts(
            components=COMPONENTS,
            costs=self.flops / DEVICE.flops_per_s("bfloat16"),
            lengths=np.stack([patches, frames, self.tokens]),
        )
        self.grid = Grid(num_replicas=(num_ranks,) * 3)
        self._audio = model.audio

    def seconds(self, assignment: Assignment) -> float:
        """Sum over phases of the slowest rank."""
        loads = assignment.loads(self.costs)
        loads["audio"] = self._padded(assignment) / DEVICE.flops_per_s("bfloat16")
        return float(sum(load.max() for load in loads.values()))

    def throughput(self, assignment: Assignment) -> float:
        """Tokens of the language model a second and rank."""
        return float(self.tokens.sum()) / self.seconds(assignment) / self.grid.num_replicas[0]

    def mfu(self, assignment: Assignment) -> float:
        """Model FLOPs utilisation [0..1]."""
        peak = DEVICE.peak_flops["bfloat16"] * self.grid.num_replicas[0]
        return float(self.flops.sum()) / self.seconds(assignment) / peak

    def _padded(self, assignment: Assignment) -> np.ndarray:
        """FLOPs of the audio batch of every rank, padded to its longest sound."""
        assert self.costs.lengths is not None
        ranks = self.grid.num_replicas[AUDIO]
        zero = np.zeros(1)
        row = float(self._audio.flops(zero + 1, zero)[0])
        square = float(self._audio.flops(zero, zero + 1)[0])
        frames = self.costs.lengths[AUDIO]
        # What is padded costs its rows and its squares: alpha b l + beta b l^2.
        padded = batch_costs(frames, assignment.replica[AUDIO], ranks, BatchKind.PADDED)
        longest = np.zeros(ranks)
        here = assignment.replica[AUDIO] >= 0
        np.maximum.at(longest, assignment.replica[AUDIO, here], frames[here])
        return STEP * padded * (row + square * longest)


def llm_only(step: Step) -> Assignment:
    """Balanced for the language model; encoders compute a sample on the same rank."""
    rank = lpt(step.costs.costs[LANGUAGE], step.grid.num_replicas[LANGUAGE])
    replica = np.where(step.costs.takes_part, rank, -1)
    return _placed(step, replica)


def node_local(step: Step) -> Assignment:
    """`NodeLocal`, and padded batches for audio."""
    replica = NodeLocal(ranks_per_node=RANKS_PER_NODE).assign(step.costs, step.grid).replica.copy()
    replica[AUDIO] = TAILORED.assign(step.costs, step.grid).replica[AUDIO]
    return _placed(step, replica)


def _placed(step: Step, replica: np.ndarray) -> Assignment:
    return Assignment(
        components=COMPONENTS,
        grid=step.grid,
        replica=replica,
        microbatch=np.where(replica < 0, -1, np.zeros_like(replica)),
    )


def throughputs(model: Mllm, pool: Pool, num_ranks: int, num_steps: int, seed: int) -> Iterator[Row]:
    """Ratios of throughput, and MFU, at equal mini-batches and at the published ones."""
    size, smaller = model.batches[num_ranks]
    found: dict[str, list[float]] = {}
    for index in range(num_steps):
        step = Step(model, pool, pool.draw(size * num_ranks, seed, num_ranks, index), num_ranks)
        ways = {
            "none": Arrival().assign(step.costs, step.grid),
            "LLM only": llm_only(step),
            "ours": TAILORED.assign(step.costs, step.grid),
            "ours, node-local": node_local(step),
        }
        for name, assignment in ways.items():
            assignment.check(step.costs)
            found.setdefault(f"MFU, {name}", []).append(step.mfu(assignment) * 100)
        speed = {name: step.throughput(assignment) for name, assignment in ways.items()}
        for name in ("ours", "ours, node-local"):
            found.setdefault(f"{name} / none", []).append(speed[name] / speed["none"])
            found.setdefault(f"{name} / LLM only", []).append(speed[name] / speed["LLM only"])
        if smaller != size:
            less = Step(model, pool, pool.draw(smaller * num_ranks, seed, num_ranks, index), num_ranks)
            ratio = speed["ours"] / less.throughput(Arrival().assign(less.costs, less.grid))
            found.setdefault(f"ours / none with {smaller} samples a rank", []).append(ratio)
    published = {
        f"ours / none with {smaller} samples a rank": "1.4 - 1.9 (three models)",
        "MFU, ours": "41.6 (MLLM-84B)" if num_ranks == LARGE and model.name == "MLLM-84B" else "",
    }
    group = f"{model.name}, {num_ranks} ranks x {size} samples"
    for name, values in found.items():
        yield Row.of(group, name, values, "%" if name.startswith("MFU") else "x", published.get(name, ""))


def volumes(
    model: Mllm, pool: Pool, num_ranks: int, num_steps: int, seed: int, *, bounded: bool = True
) -> Iterator[Row]:
    """The most that a rank sends to other nodes to balance a phase, over the most if batch j goes to rank j.

    Args:
        bounded: with the lower bound of what rearrangement can reach.
    """
    size, _ = model.batches[num_ranks]
    found: dict[str, list[float]] = {}
    for index in range(num_steps):
        step = Step(model, pool, pool.draw(size * num_ranks, seed, num_ranks, index), num_ranks)
        arrival = Arrival().assign(step.costs, step.grid)
        plain, local = TAILORED.assign(step.costs, step.grid), node_local(step)
        assert step.costs.lengths is not None
        for row, component in enumerate(COMPONENTS):
            rows = step.costs.lengths[row]
            before = exchanged(arrival, -1, plain, row, rows)
            best = rearrange(before, RANKS_PER_NODE)
            found.setdefault(f"{component}: rearranged", []).append(best.sent / best.sent_before)
            if bounded:
                least = least_sent(before, RANKS_PER_NODE) / best.sent_before
                found.setdefault(f"{component}: least possible for these batches", []).append(least)
            if row != AUDIO:
                volume = exchanged(arrival, -1, local, row, rows)
                ratio = rearrange(volume, RANKS_PER_NODE).sent / best.sent_before
                found.setdefault(f"{component}: node-local, rearranged", []).append(ratio)
    group = f"{model.name}, {num_ranks} ranks, volume between nodes"
    for name, values in found.items():
        published = "0.436 - 0.722 (all dispatchers)" if name.endswith(": rearranged") and num_ranks == SMALL else ""
        yield Row.of(group, name, values, "x", published)


def least_sent(volume: np.ndarray, ranks_per_node: int) -> float:
    """Lower bound of the largest volume a rank sends to other nodes, whatever ranks the batches go to: the relaxed Algorithm 3.

    Args:
        volume: int [ranks, batches].
    """
    count, num_nodes = len(volume), len(volume) // ranks_per_node
    batch, node = np.divmod(np.arange(count * num_nodes), num_nodes)
    rank, held = np.nonzero(volume)
    columns = np.arange(count * num_nodes)
    rows = np.concatenate([batch, count + node])
    shape = (count + num_nodes, count * num_nodes + 1)
    places = coo_array((np.ones(len(rows)), (rows, np.concatenate([columns, columns]))), shape=shape)
    kept = coo_array(
        (-volume[rank, held].astype(float), (rank, held * num_nodes + rank // ranks_per_node)),
        shape=(count, count * num_nodes),
    )
    result = linprog(
        np.append(np.zeros(count * num_nodes), 1.0),
        A_ub=hstack([kept, -np.ones((count, 1))]).tocsr(),
        b_ub=-volume.sum(axis=1),
        A_eq=places.tocsr(),
        b_eq=np.concatenate([np.ones(count), np.full(num_nodes, ranks_per_node)]),
    )
    return float(result.fun)


def main() -> int:
    parser = arguments(__doc__, steps=10)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(SMALL, LARGE), default=(SMALL, LARGE))
    options = parser.parse_args()
    pool = Pool.of("orchmllm-mix", options.seed)
    rows: list[Row] = []
    for num_ranks in options.ranks:
        for model in MODELS:
            rows += throughputs(model, pool, num_ranks, options.steps, options.seed)
            if num_ranks == SMALL:
                rows += volumes(model, pool, num_ranks, options.steps, options.seed)
            else:
                rows += volumes(model, pool, num_ranks, 1, options.seed, bounded=False)
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
