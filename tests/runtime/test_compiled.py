"""Compiled stages: as many graphs as kinds of layers, none for other sizes, and gradients of eager training."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from layer_run import llama
from lower.split import even_plan, run_split
from oracles.eager import difference
from torch import Tensor, nn
from torch._dynamo.utils import counters
from zoo import ALL
from zoo.family import Family, Size

from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import completed
from mmcompile.lower.compiled import load_compiled_stage
from mmcompile.lower.patterns import Patterns
from mmcompile.lower.program import PreparedMicrobatch
from mmcompile.passes.gradient_flow import GradientFlow

NUM_STEPS = 50
compiled = partial(load_compiled_stage, backend="aot_eager")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def patterns_of(model: nn.Module, batch: dict[str, Tensor], **stages: int) -> Patterns:
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    return Patterns(model, even_plan(found.graph, stages), found, completed(model, batch))


def roots(microbatch: PreparedMicrobatch) -> dict[str, Tensor | int]:
    return {**microbatch.values, **microbatch.sizes}


@pytest.mark.parametrize(
    ("family", "media"),
    [(llama(3), (0,)), pytest.param(ALL["llava"], (0, 1, 2), marks=pytest.mark.slow)],
    ids=["llama", "llava"],
)
def test_steps_of_other_sizes_compile_nothing(family: Family, media: tuple[int, ...]) -> None:
    """Once each pattern has run, 50 steps of varying samples, token lengths and numbers of images."""
    model, draw = family.build(), random.Random(0)
    patterns = patterns_of(model, family.batch(), language_model=2)
    drawn = [
        Size(samples=draw.randint(2, 4), length=draw.randint(50, 80), media=draw.choice(media))
        for _ in range(NUM_STEPS)
    ]
    shapes = [Size(samples=samples, length=48, media=images) for samples in (2, 3, 4) for images in media]
    torch._dynamo.reset()
    for size in shapes:  # twice: a size is known to vary once it has
        for length in (0, 1):
            batch = family.draw(replace(size, length=size.length + length), seed=length)
            microbatch = patterns.prepare(batch)
            run_split(model, microbatch.programs, roots(microbatch), compiled)
    graphs, captures = num_graphs(), patterns.num_captures
    for seed, size in enumerate(drawn):
        microbatch = patterns.prepare(family.draw(size, seed=100 + seed))
        got = run_split(model, microbatch.programs, roots(microbatch), compiled).outcome
        assert num_graphs() == graphs, size
        if seed % 10 == 0:
            wanted = run_split(model, microbatch.programs, roots(microbatch)).outcome
            assert (apart := difference(got, wanted)).within(1e-5), str(apart)
    assert patterns.num_captures == captures


def test_a_tower_of_any_depth_has_as_many_graphs() -> None:
    found = {}
    for depth in (4, 32):
        model, batch = llama(depth).build(), llama(depth).batch()
        microbatch = patterns_of(model, batch).prepare(batch)
        torch._dynamo.reset()
        before = num_graphs()
        run_split(model, microbatch.programs, roots(microbatch), compiled)
        found[depth] = num_graphs() - before
    assert found == {4: 4, 32: 4}  # embedding, rotary tables, layer, head


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
def test_the_demo_trains_under_inductor() -> None:
    demo = _demo()
    model = demo.build_model()
    samples = demo.build_samples()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    patterns = patterns_of(model, demo.batch_of(samples[:4]), language_model=2)
    losses = []
    for step in range(8):
        batch = demo.batch_of(samples[: 8 + step % 2])
        microbatch = patterns.prepare(batch)
        wanted = run_split(model, microbatch.programs, roots(microbatch)).outcome
        got = run_split(model, microbatch.programs, roots(microbatch), load_compiled_stage).outcome
        assert (apart := difference(got, wanted)).within(1e-5), str(apart)
        optimizer.step()
        losses.append(got.loss)
    assert losses[-1] < 0.7 * losses[0]


def _demo() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "digits_llava.py"
    spec = importlib.util.spec_from_file_location("digits_llava", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
