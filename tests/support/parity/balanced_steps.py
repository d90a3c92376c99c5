"""Steps that are hard to balance, what one process makes of them, and balancers for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn
from zoo import ALL, Batch, Draw, Size
from zoo.parts import AUDIO, IMAGE, conversation

from mmcompile.batching.balance.assignment import Assignment, Grid, SampleCosts, assignment_of
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.runtime.engine import Engine
from support.oracles.eager import Outcome
from support.oracles.one_process import IGNORE, train

LEARNING_RATE = 0.1
SGD = functools.partial(torch.optim.SGD, lr=LEARNING_RATE)
"""Its update is the gradient, so that what a step changed tells the gradients it had."""

_MEDIA_TOKENS = {"llava": 16, "gemma3": 4, "qwen2_audio": 20}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A conversation: tokens of text, images (clips, for models that hear), sounds of models that have both."""

    text: int
    images: int = 0
    sounds: int = 0
    silent: bool = False
    """Nothing to learn from."""


def _text(*lengths: int) -> tuple[Shape, ...]:
    return tuple(Shape(text=length) for length in lengths)


def _images(count: int, *lengths: int) -> tuple[Shape, ...]:
    return tuple(Shape(text=length, images=count) for length in lengths)


MIXED = (
    Shape(text=20, images=1),
    Shape(text=31, images=2),
    Shape(text=12),
    Shape(text=45, images=1),
    Shape(text=9, images=1),
    Shape(text=27),
    Shape(text=16, images=3),
)
"""Seven samples, which no number of replicas or microbatches divides."""
UNEVEN = (*_images(1, 10, 8, 6, 80, 6, 60, 10, 10, 8, 6, 8, 60), *_images(2, 25, 10, 40))
"""Many small samples and few large ones: work of the language model can be deferred, on each of one to three replicas."""
NO_MEDIA = _text(14, 33, 8, 21, 40)
ON_ONE_SAMPLE = (*_text(18, 25), Shape(text=10, images=4), *_text(30, 12, 22))
HEAVY = (*_text(9), Shape(text=11, images=1), *_text(8), Shape(text=130, images=6), Shape(text=10, images=1))
"""One sample is heavier than all others together."""
FEW = (Shape(text=17, images=1), Shape(text=24))
"""Fewer samples than microbatches times replicas."""
SILENT = (Shape(text=13, images=1, silent=True), Shape(text=19), Shape(text=22, images=2))
ONE = (Shape(text=15, images=1),)

STEPS = (MIXED, UNEVEN, NO_MEDIA, ON_ONE_SAMPLE, HEAVY, FEW, SILENT, ONE)

TWO_ENCODERS = (
    (
        Shape(text=20, images=1, sounds=1),
        Shape(text=14, images=2),
        Shape(text=33, sounds=1),
        Shape(text=9, images=1),
        Shape(text=26),
    ),
    (Shape(text=12, images=1), Shape(text=30, images=2), Shape(text=18), Shape(text=21, images=1)),
    (Shape(text=25, sounds=3), Shape(text=11), Shape(text=17)),
    (Shape(text=16), Shape(text=28), Shape(text=13)),
    (Shape(text=22, images=1), Shape(text=10, sounds=1)),
)
"""A sound on few samples, on none, images on none, neither, and each on a sample of its own."""


def draw(family: str, shapes: Sequence[Shape], seed: int) -> list[Batch]:
    """Samples of a step, in float64. Same seed, same samples."""
    make = _two_encoder_sample if family == "two_encoder_net" else functools.partial(_sample, family)
    samples = [make(shape, seed * 1000 + index) for index, shape in enumerate(shapes)]
    for sample, shape in zip(samples, shapes, strict=True):
        if shape.silent:
            sample["labels"] = torch.full_like(sample["labels"], IGNORE)
    return samples


def _sample(family: str, shape: Shape, seed: int) -> Batch:
    length = 3 + shape.text + shape.images * (_MEDIA_TOKENS[family] + 3)
    return ALL[family].draw(Size(samples=1, length=length, media=shape.images), seed=seed, dtype=torch.float64)


def _two_encoder_sample(shape: Shape, seed: int) -> Batch:
    source = Draw(seed)
    media = [(IMAGE, 16)] * shape.images + [(AUDIO, 8)] * shape.sounds
    length = 3 + shape.text + sum(tokens + 3 for _, tokens in media)
    batch = conversation(source, Size(samples=1, length=length), media)
    if shape.images:
        batch["images"] = source.normal(shape.images, 3, 56, 56).double()
    if shape.sounds:
        batch["sounds"] = source.normal(shape.sounds, 32, 16).double()
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What training made: loss, tokens and gradients of every step, and the parameters in the end."""

    outcomes: tuple[Outcome, ...]
    num_tokens: tuple[int, ...]
    parameters: dict[str, Tensor]
    """By every name, tied names too."""


def in_one_process(
    model: nn.Module, steps: Sequence[Sequence[Batch]], optimizer: Callable[..., torch.optim.Optimizer]
) -> Trained:
    """Train the eager model in place, each sample a microbatch of its own: no padding, no company, no order."""
    run = train(model, steps, optimizer=optimizer)
    original = {id(parameter): name for name, parameter in model.named_parameters()}
    outcomes = [
        Outcome(
            loss=step.loss,
            gradients={
                name: step.gradients[original[id(p)]] for name, p in _names(model) if original[id(p)] in step.gradients
            },
        )
        for step in run.steps
    ]
    return Trained(outcomes=tuple(outcomes), num_tokens=run.num_tokens, parameters=run.parameters)


def in_an_engine(engine: Engine, steps: Sequence[Sequence[Batch]], learning_rate: float | None) -> Trained:
    """Train an engine.

    Args:
        learning_rate: of plain SGD, to tell gradients from what a step changed; None for another optimizer: no gradients then.
    """
    outcomes: list[Outcome] = []
    counts: list[int] = []
    before = engine.state_dict()
    for samples in steps:
        metrics = engine.step(samples)
        after = engine.state_dict()
        gradients = {} if learning_rate is None else _changes(before, after, learning_rate)
        outcomes.append(Outcome(loss=metrics.loss, gradients=gradients))
        counts.append(metrics.num_tokens)
        before = after
    return Trained(outcomes=tuple(outcomes), num_tokens=tuple(counts), parameters=before)


def _changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor], learning_rate: float) -> dict[str, Tensor]:
    """Gradients by name, of buffers too: 0 where nothing changed."""
    return {name: (before[name] - tensor) / learning_rate for name, tensor in after.items()}


def _names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded(Balancer):
    """Another balancer, whose assignments are kept."""

    name: ClassVar[str] = "recorded"

    inner: Balancer
    seen: list[Assignment] = field(default_factory=list)

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        self.seen.append(self.inner.assign(costs, grid))
        return self.seen[-1]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scrambled(Balancer):
    """Any assignment there may be: every component by itself, encoders no later than the language model."""

    name: ClassVar[str] = "scrambled"

    seed: int = 0

    def assign(self, costs: SampleCosts, grid: Grid) -> Assignment:
        rng = np.random.default_rng((self.seed, costs.num_samples))
        late = rng.integers(0, grid.num_microbatches, costs.num_samples)
        slots = [rng.integers(0, late + 1) for _ in costs.components[:-1]]
        replicas = [rng.integers(0, count, costs.num_samples) for count in grid.num_replicas]
        return assignment_of(costs, grid, replicas, [*slots, late])
