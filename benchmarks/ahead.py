"""Is the step plan off the critical path? Steps of about 100 ms, with planning as fast as it is and made 30 ms slower.

A small LLaVA trains in two processes, encoder and language model, through `Engine.train`, its balancer in a process of its own.
Rounds of a few steps alternate: one plans as usual, the next with a balancer that takes 30 ms longer before it decides, asleep
(as if it waited for something) or computing. The first step of a round, whose plan nothing hides, does not count. Prints the
median step of each kind and the ratio of slow to usual; beside them, what the same 30 ms cost where steps are planned one at a
time, by `Engine.step`. Exits with 1 if sleeping makes steps more than 3% longer, or computing more than 10%: where the ranks keep
all cores busy, as two do here, whatever else computes takes from them.

    python -P benchmarks/ahead.py [--rounds 12] [--steps 10]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self, final

import torch
import transformers
from torch import nn

import mmcompile as mm
from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.data.collate import Sample, collate
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.launch.background_balancer import BackgroundBalancer, Recipe

SLOWER_S = 0.030
NUM_SAMPLES = 9
NUM_MICROBATCHES = 3
VOCABULARY, IMAGE, IMAGE_TOKENS = 1024, 1000, 16

TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 64,
}


class Extra(StrEnum):
    """What planning does for 30 ms more."""

    NOTHING = "as it is"
    SLEEP = "30 ms asleep"
    COMPUTE = "30 ms computing"


LIMITS = {Extra.SLEEP: 1.03, Extra.COMPUTE: 1.10}
"""Largest ratio to usual steps."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Slowed(Balancer):
    """`auto`, after 30 ms of something."""

    name: ClassVar[str] = "slowed"

    extra: Extra

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        end = time.perf_counter() + SLOWER_S
        if self.extra is Extra.SLEEP:
            time.sleep(SLOWER_S)
        while self.extra is Extra.COMPUTE and time.perf_counter() < end:
            sum(range(1000))
        return Auto().assign(costs, grid)


def slowed(extra: str) -> Balancer:
    """For the balancer's process."""
    return Slowed(extra=Extra(extra))


class Switched(Balancer):
    """One of several balancers, each in a process of its own, as the engine has one for `auto`; changed between rounds."""

    name: ClassVar[str] = "switched"

    def __init__(self) -> None:
        self.extra = Extra.NOTHING
        self._each = {
            extra: BackgroundBalancer(
                Slowed(extra=extra), Recipe(module="benchmarks.ahead", function="slowed", arguments=(extra.value,))
            )
            for extra in Extra
        }

    def __enter__(self) -> Self:
        for one in self._each.values():
            one.start()
        while not all(one.is_up for one in self._each.values()):
            time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._each.values():
            one.close()

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        return self._each[self.extra].assign(costs, grid)


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**TEXT),
        image_seq_length=IMAGE_TOKENS,
        image_token_index=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def step_samples(seed: int) -> list[Sample]:
    """Conversations of unequal length, with one or two images each."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for index in range(NUM_SAMPLES):
        images = 1 + index % 2
        text = int(torch.randint(20, 60, (), generator=generator))
        ids = torch.randint(3, IMAGE, (1, images * IMAGE_TOKENS + text), generator=generator)
        ids[:, : images * IMAGE_TOKENS] = IMAGE
        pixels = torch.randn(images, 3, 56, 56, generator=generator)
        labels = ids.masked_fill(ids == IMAGE, -100)
        samples.append({"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels, "pixel_values": pixels})
    return samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round's steps but the first."""

    step_s: tuple[float, ...]
    planning_s: tuple[float, ...]
    waited_s: tuple[float, ...]


def ahead(engine: Engine, switch: Switched, extra: Extra, data: list[list[Sample]]) -> Round:
    """Train on the data, planning ahead."""
    switch.extra = extra
    steps = list(engine.train(data))[1:]
    return Round(
        step_s=tuple(step.seconds for step in steps),
        planning_s=tuple(step.planning_s for step in steps),
        waited_s=tuple(step.waited_s for step in steps),
    )


def one_at_a_time(engine: Engine, switch: Switched, extra: Extra, data: list[list[Sample]]) -> list[float]:
    """Train on the data, each step planned when it is asked for."""
    switch.extra = extra
    return [engine.step(samples).seconds for samples in data][1:]


def alternate(rounds: int) -> Iterator[Extra]:
    """Kinds of planning in turn, each round in the opposite order of the one before."""
    for number in range(rounds):
        yield from list(Extra)[:: 1 if number % 2 == 0 else -1]


def report(found: dict[Extra, list[Round]], single: dict[Extra, list[float]]) -> bool:
    """Print the table; whether slower planning makes steps longer than it may."""
    usual = median(round.step_s for round in found[Extra.NOTHING])
    print(f"{'planning':16s} {'step ms':>8s} {'planning ms':>12s} {'waited ms':>10s} {'ratio':>7s}   one at a time ms")
    ratios: dict[Extra, float] = {}
    for extra, rounds in found.items():
        step_s = median(round.step_s for round in rounds)
        planning_s, waited_s = median(r.planning_s for r in rounds), median(r.waited_s for r in rounds)
        ratios[extra] = step_s / usual
        print(f"{extra:16s} {step_s * 1e3:8.1f} {planning_s * 1e3:12.1f} {waited_s * 1e3:10.2f} {ratios[extra]:7.3f}"
              f"   {statistics.median(single[extra]) * 1e3:8.1f}")  # fmt: skip
    missed = False
    for extra, limit in LIMITS.items():
        pairs = [
            statistics.median(slow.step_s) / statistics.median(fast.step_s)
            for slow, fast in zip(found[extra], found[Extra.NOTHING], strict=True)
        ]
        missed |= statistics.median(pairs) > limit
        print(f"{extra} over as it is, median of {len(pairs)} pairs of rounds: {statistics.median(pairs):.3f} "
              f"(from {min(pairs):.3f} to {max(pairs):.3f})")  # fmt: skip
    return missed


def median(values: Iterator[tuple[float, ...]]) -> float:
    return statistics.median(value for group in values for value in group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="alternations (default 12)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in a round (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [step_samples(seed) for seed in range(options.steps + 1)]
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    with (
        Switched() as switch,
        mm.parallelize(
            llava(),
            collate(data[0][:2]),
            num_microbatches=NUM_MICROBATCHES,
            stages={"vision_tower": 1, "language_model": 1},
            balance=switch,
            allow_unused=True,
            optimizer=optimizer,
        ) as engine,
    ):
        for _ in range(2):
            ahead(engine, switch, Extra.NOTHING, data)
        found: dict[Extra, list[Round]] = {extra: [] for extra in Extra}
        for extra in alternate(options.rounds):
            found[extra].append(ahead(engine, switch, extra, data))
        single = {extra: one_at_a_time(engine, switch, extra, data) for extra in Extra}
    raise SystemExit(int(report(found, single)))


if __name__ == "__main__":
    main()
