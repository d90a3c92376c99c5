"""Entrain's evaluation, simulated: evenness of microbatches, and throughput against DistTrain- and DIP-like steps (thesis §4.7).

    python -P benchmarks/step_entrain.py [--json] [--steps N] [--seed N]

Four datasets, Qwen2.5-VL's vision encoder with Llama3-1b and -3b; 4 replicas of 8 stages with tp 2, global batch 512, 4 samples a
microbatch; stages of encoder and language model as published for each system (Tables 4.1 and C.1).

- *arrival*: samples as they come, 1F1B, Entrain's stages.
- *DistTrain-like*: microbatches reordered to hide encoders, 1F1B; at its own published stages, or at Entrain's where it says so.
- *DIP-like*: encoder and language model share all 8 devices; all encoder forwards, then the language model in 1F1B, then all
  encoder backwards (Fig. 4.2c). Its sub-microbatches are not modelled.
- *Entrain*: replicas, stratified microbatches, pairwise deferral of critical ones, eager forwards, split backward (§4.5).
- *auto*: the fastest of our balancers by simulation, eager forwards too, at the cut into 8 stages whose slowest is fastest for
  the mean sample.

What is assumed:
- samples from `mmcompile.data.synthetic`, whose lengths are not published (its table says what is);
- seconds are FLOPs in closed form (`entrain_models.py`), forward and twice that backward, everything trains; half of an A40's
  peak for Llama3-3b and a third for the others, the ratio fitted to the published allocations (`entrain_allocation.py`);
- stages are whole layers, cut so that the slowest is fastest, for every system; the step ends with the slowest replica; a message
  takes the time of a mean microbatch's hidden states over 200 Gb/s. Balancers see seconds of each component's slowest stage;
- memory is not modelled: DIP-like holds the activations of all encoder forwards, eager forwards hold twice those of 1F1B.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Before numpy is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

from entrain_allocation import COMPONENTS, SPEED, closed_form  # noqa: E402
from entrain_models import LLAMA_1B, LLAMA_3B, MERGED, VISION, Language  # noqa: E402
from step_models import STEP  # noqa: E402
from step_report import Pool, Row, arguments, show  # noqa: E402

from mmcompile.batching.balance.arrival_order import Arrival, DistTrain  # noqa: E402
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts  # noqa: E402
from mmcompile.batching.balance.auto import Auto, Choice  # noqa: E402
from mmcompile.batching.balance.hierarchical import Hierarchical  # noqa: E402
from mmcompile.batching.balance.simulated_step import StageShare, StepShape, simulate_step, step_time  # noqa: E402
from mmcompile.config import ScheduleKind  # noqa: E402
from mmcompile.costmodel.comm import p2p_seconds  # noqa: E402
from mmcompile.costmodel.compute import LayerTimes  # noqa: E402
from mmcompile.costmodel.hardware import find_device  # noqa: E402
from mmcompile.planner.schedule.schedule import Action, ActionKind, Schedule  # noqa: E402
from mmcompile.planner.schedule.simulate import simulate  # noqa: E402
from mmcompile.planner.search.partition import PartitionLayer, partition  # noqa: E402

REPLICAS, TENSOR_PARALLEL, GLOBAL_BATCH, PER_MICROBATCH, DEVICES = 4, 2, 512, 4, 8
DEVICE, _, NETWORK = find_device("A40")
ENCODER_SHARE = 1 / SPEED[LLAMA_3B.name]
"""Of the FLOP/s that Llama3-3b reaches."""

Stages = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One dataset with one language model."""

    dataset: str
    language: Language
    disttrain: Stages
    """Encoder and language-model stages; DIP has 8 of both on the same devices."""
    entrain: Stages
    published: tuple[float, float]
    """Standard deviation of DistTrain's microbatches over Entrain's, encoder and language model (Table 4.3)."""


SETTINGS = (
    Setting(dataset="synthchartnet", language=LLAMA_1B, disttrain=(4, 4), entrain=(5, 3), published=(10.6, 4.1)),
    Setting(dataset="chartqa", language=LLAMA_1B, disttrain=(5, 3), entrain=(5, 3), published=(4.0, 4.0)),
    Setting(dataset="cocoqa", language=LLAMA_1B, disttrain=(4, 4), entrain=(5, 3), published=(1.0, 1.0)),
    Setting(dataset="llava-150k", language=LLAMA_1B, disttrain=(5, 3), entrain=(4, 4), published=(2.2, 2.2)),
    Setting(dataset="synthchartnet", language=LLAMA_3B, disttrain=(5, 3), entrain=(4, 4), published=(10.6, 4.1)),
    Setting(dataset="chartqa", language=LLAMA_3B, disttrain=(4, 4), entrain=(4, 4), published=(4.0, 1.4)),
    Setting(dataset="cocoqa", language=LLAMA_3B, disttrain=(4, 4), entrain=(3, 5), published=(1.0, 1.0)),
    Setting(dataset="llava-150k", language=LLAMA_3B, disttrain=(4, 4), entrain=(3, 5), published=(2.2, 1.0)),
)


class Case:
    """A setting with a pool of samples: costs of random steps, and the pipelines that they run through."""

    def __init__(self, setting: Setting, seed: int, global_batch: int = GLOBAL_BATCH) -> None:
        self.setting = setting
        self.grid = Grid(
            num_replicas=(REPLICAS, REPLICAS), num_microbatches=global_batch // (REPLICAS * PER_MICROBATCH)
        )
        self._pool = Pool.of(setting.dataset, seed)
        self._size = global_batch
        language = setting.language
        speed = np.array([ENCODER_SHARE, SPEED[language.name] * ENCODER_SHARE])
        self._seconds = STEP * closed_form(self._pool.shapes, language)
        self._seconds /= TENSOR_PARALLEL * DEVICE.flops_per_s("bfloat16") * speed
        patches = np.array([shape.patches for shape in self._pool.shapes], dtype=np.float64)
        tokens = patches / MERGED + self._pool.text
        self.link_s = p2p_seconds(float(PER_MICROBATCH * tokens.mean() * language.width * 2), NETWORK)
        self._cuts = [cuts(VISION.by_layer(patches, language.width)), cuts(language.by_layer(tokens))]

    def step(self, *seed: int) -> SampleCosts:
        """Seconds of each sample of a random step in all stages of a component."""
        return SampleCosts(components=COMPONENTS, costs=self._seconds[self._pool.draw(self._size, *seed)].T)

    def by_stage(self, costs: SampleCosts, stages: Stages) -> SampleCosts:
        """What balancers see: seconds in the slowest stage of each component."""
        return SampleCosts(components=COMPONENTS, costs=costs.costs * self.slowest(stages)[:, None])

    def best_stages(self) -> Stages:
        """All devices, the slowest stage fastest for the mean sample (Eq. 4.1)."""
        mean = self._seconds.mean(axis=0)
        every = [(count, DEVICES - count) for count in range(1, DEVICES)]
        return min(every, key=lambda stages: float(max(mean * self.slowest(stages))))

    def seconds(self, assignment: Assignment, costs: SampleCosts, stages: Stages, schedule: ScheduleKind) -> float:
        """Of a step in a pipeline of one replica a row."""
        return simulate_step(assignment, costs, self.shape(stages, schedule), record=False).makespan_s

    def shape(self, stages: Stages, schedule: ScheduleKind) -> StepShape:
        """Of a step a third is forward, a third input gradient, a third weight gradient."""
        shares = {
            name: tuple(
                StageShare(name=f"{name}.{index}", forward=share / 3, input_grad=share / 3, weight_grad=share / 3)
                for index, share in enumerate(own[count - 1])
            )
            for name, own, count in zip(COMPONENTS, self._cuts, stages, strict=True)
        }
        return StepShape(stages=shares, schedule=schedule, link_s=self.link_s)

    def dip_seconds(self, costs: SampleCosts) -> float:
        """Of a DIP-like step, samples as they come."""
        loads = Arrival().assign(costs, self.grid).loads(costs)
        schedule = dip_schedule(self.grid.num_microbatches)
        links = {(source, target): self.link_s for source in schedule.stages for target in schedule.stages}
        shares = self.shape((DEVICES, DEVICES), "1f1b").stages
        slowest = 0.0
        for replica in range(REPLICAS):
            durations = {
                share.name: [
                    LayerTimes(
                        forward_s=load * share.forward,
                        input_grad_s=load * share.input_grad,
                        weight_grad_s=load * share.weight_grad,
                    )
                    for load in loads[component][replica].tolist()
                ]
                for component, own in shares.items()
                for share in own
            }
            slowest = max(slowest, simulate(schedule, durations, links, record=False).makespan_s)
        return slowest

    def slowest(self, stages: Stages) -> np.ndarray:
        """Share of each component's work that its slowest stage has."""
        return np.array([max(own[count - 1]) for own, count in zip(self._cuts, stages, strict=True)])


def cuts(layers: np.ndarray) -> list[list[float]]:
    """Shares of the stages of a component cut into 1, 2, ... stages, the slowest of them fastest.

    Args:
        layers: work of each, [layers].
    """
    shares = layers / layers.sum()
    splits = partition([PartitionLayer(seconds=float(share)) for share in shares], DEVICES)
    return [[float(shares[first:end].sum()) for first, end in split.ranges] for split in splits if split is not None]


def spread(assignment: Assignment, costs: SampleCosts) -> np.ndarray:
    """Standard deviation of seconds over all microbatches that have samples, float64 [components]."""
    return np.array([loads[loads > 0].std() for loads in assignment.loads(costs).values()])


def dip_schedule(num_microbatches: int) -> Schedule:
    """All encoder forwards, the language model in 1F1B, all encoder backwards; both have a stage on every rank."""
    every = range(num_microbatches)
    ranks: list[tuple[Action, ...]] = []
    for rank in range(DEVICES):
        language = DEVICES + rank
        warm_up = min(DEVICES - 1 - rank, num_microbatches)
        order = [(rank, ActionKind.F, m) for m in every]
        order += [(language, ActionKind.F, m) for m in range(warm_up)]
        for m in every:
            order += [(language, ActionKind.F, m + warm_up)] if m + warm_up < num_microbatches else []
            order += [(language, ActionKind.B, m)]
        order += [(rank, ActionKind.B, m) for m in every]
        ranks.append(tuple(action for step in order for action in _with_messages(*step)))
    names = tuple(f"{name}.{index}" for name in COMPONENTS for index in range(DEVICES))
    return Schedule(stages=names, ranks=tuple(ranks))


def _with_messages(stage: int, kind: ActionKind, microbatch: int) -> Iterator[Action]:
    """A computation between its receive and its send. Stages are one line, encoder first."""
    forward = kind is ActionKind.F
    receive, send = (ActionKind.RECV_F, ActionKind.SEND_F) if forward else (ActionKind.RECV_B, ActionKind.SEND_B)
    before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
    if before in range(2 * DEVICES):
        yield Action(stage=stage, kind=receive, microbatch=microbatch, peer=before)
    yield Action(stage=stage, kind=kind, microbatch=microbatch)
    if after in range(2 * DEVICES):
        yield Action(stage=stage, kind=send, microbatch=microbatch, peer=after)


ENCODER_SPREAD, LANGUAGE_SPREAD = "spread of encoder, arrival / {}", "spread of LLM, arrival / {}"
DISTTRAIN, DIP = "throughput, {} / DistTrain-like", "throughput, {} / DIP-like"


def step_figures(case: Case, costs: SampleCosts) -> Iterator[tuple[str, float]]:
    """Name and value of all figures of one step: ratios, above 1 where ours is better."""
    theirs, entrain = case.setting.disttrain, case.setting.entrain
    arrival = Arrival().assign(costs, case.grid)
    hierarchical = Hierarchical().assign(case.by_stage(costs, entrain), case.grid)
    auto = chosen(case, costs, case.best_stages())
    for name, assignment in (("Entrain", hierarchical), ("auto", auto.assignment)):
        encoder, language = spread(arrival, costs) / spread(assignment, costs)
        yield ENCODER_SPREAD.format(name), encoder
        yield LANGUAGE_SPREAD.format(name), language
    disttrain_s = case.seconds(disttrain(case, costs, theirs), costs, theirs, "1f1b")
    dip_s = case.dip_seconds(costs)
    entrain_s = case.seconds(hierarchical, costs, entrain, "eager-1f1b")
    yield "throughput, Entrain / arrival", case.seconds(arrival, costs, entrain, "1f1b") / entrain_s
    alike_s = case.seconds(disttrain(case, costs, entrain), costs, entrain, "1f1b")
    yield "throughput, Entrain / DistTrain-like, same stages", alike_s / entrain_s
    for name, seconds in (("Entrain", entrain_s), ("auto", auto.step_s)):
        yield DISTTRAIN.format(name), disttrain_s / seconds
        yield DIP.format(name), dip_s / seconds


def disttrain(case: Case, costs: SampleCosts, stages: Stages) -> Assignment:
    """Reordered to hide the slowest encoder stage behind the slowest of the language model."""
    return DistTrain(num_last=stages[1] - 1).assign(case.by_stage(costs, stages), case.grid)


def chosen(case: Case, costs: SampleCosts, stages: Stages) -> Choice:
    """What `auto` takes by simulation."""
    shares: dict[str, float] = {name: share for name, share in zip(COMPONENTS, case.slowest(stages), strict=True)}
    auto = Auto(step_time=step_time(case.shape(stages, "eager-1f1b")), shares=shares)
    return auto.choose(costs, case.grid)


def figures(case: Case, num_steps: int, seed: int) -> Iterator[Row]:
    """All rows of one setting."""
    found: dict[str, list[float]] = {}
    for index in range(num_steps):
        for name, value in step_figures(case, case.step(seed, index)):
            found.setdefault(name, []).append(value)
    encoder, language = case.setting.published
    published = {
        ENCODER_SPREAD.format("Entrain"): f"{encoder} (DistTrain / Entrain)",
        LANGUAGE_SPREAD.format("Entrain"): f"{language} (DistTrain / Entrain)",
    }
    stages, own = (":".join(map(str, counts)) for counts in (case.setting.entrain, case.best_stages()))
    group = f"{case.setting.dataset}, {case.setting.language.name}: Entrain {stages}, auto {own}"
    for name, values in found.items():
        yield Row.of(group, name, values, "x", published.get(name, ""))


def best_of(rows: Sequence[Row]) -> Iterator[Row]:
    """The largest mean of all settings, as the thesis sums up."""
    for name in ("Entrain", "auto"):
        for figure, kinds, published in (
            ("spread", (ENCODER_SPREAD, LANGUAGE_SPREAD), "10.6"),
            ("throughput over DistTrain- or DIP-like", (DISTTRAIN, DIP), "1.40"),
        ):
            means = [row.mean for row in rows if row.name in [kind.format(name) for kind in kinds]]
            yield Row.of("all settings", f"{figure}, {name}: up to", [max(means)], "x", published)


def main() -> int:
    options = arguments(__doc__, steps=20).parse_args()
    rows: list[Row] = []
    for setting in SETTINGS:
        rows += figures(Case(setting, options.seed), options.steps, options.seed)
    rows += best_of(rows)
    show(rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
