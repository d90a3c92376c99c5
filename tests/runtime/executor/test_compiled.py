"""Compiled stages: as many graphs as kinds of layers, none for other sizes, and gradients of eager training."""

from __future__ import annotations

import functools
import importlib.util
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from support.graphs.layer_run import llama
from support.graphs.split import even_plan, run_split
from support.oracles.eager import difference, eager_outcome
from support.paths import EXAMPLES
from support.plans.with_recompute import with_recompute
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from zoo import ALL
from zoo.family import Family, Size

from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.program import PreparedMicrobatch, StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.stage_module import StageModule
from mmcompile.config import Recompute, ScheduleKind
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow

NUM_STEPS = 50
Load = Callable[[StageProgram, Mapping[str, Tensor]], StageModule]
compiled = partial(load_compiled_stage, backend="aot_eager")
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
"""Dynamo hides both unless warnings are errors."""
needs_inductor = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor itself calls torch.jit
]
WAYS: list[tuple[ScheduleKind, Recompute]] = [("1f1b", "none"), ("1f1b", "full"), ("zb-h1", "none"), ("zb-h1", "full")]


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def num_compiled() -> int:
    """Graphs that a compiler was given: a forward and its backward are two, the second of which dynamo does not see."""
    return num_graphs() + counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]


def patterns_of(
    model: nn.Module,
    batch: dict[str, Tensor],
    schedule: ScheduleKind = "1f1b",
    recompute: Recompute = "none",
    **stages: int,
) -> Patterns:
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    plan = replace(with_recompute(even_plan(found.graph, stages), recompute), schedule=schedule)
    return Patterns(model, plan, found, completed(model, batch))


def roots(microbatch: PreparedMicrobatch) -> dict[str, Tensor | int]:
    return {**microbatch.values, **microbatch.sizes}


class Counting:
    """A backend that runs graphs as they are, and counts those it is given: forwards, and backwards."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)(graph, inputs)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        self.num_graphs += 1
        return make_boxed_func(graph.forward)


def assert_sizes_compile_nothing(
    family: Family, media: tuple[int, ...], patterns: Patterns, model: nn.Module, load: Load, count: Callable[[], int]
) -> None:
    """Once each pattern has run, 50 steps of varying samples, token lengths and numbers of images, forward and backward."""
    draw = random.Random(0)
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
            run_split(model, microbatch.programs, roots(microbatch), load)
    graphs, captures = count(), patterns.num_captures
    assert graphs > 0
    for seed, size in enumerate(drawn):
        microbatch = patterns.prepare(family.draw(size, seed=100 + seed))
        got = run_split(model, microbatch.programs, roots(microbatch), load).outcome
        assert count() == graphs, size
        if seed % 10 == 0:
            wanted = run_split(model, microbatch.programs, roots(microbatch)).outcome
            assert (apart := difference(got, wanted)).within(1e-5), str(apart)
    assert patterns.num_captures == captures


@pytest.mark.parametrize(
    ("family", "media"),
    [(llama(3), (0,)), pytest.param(ALL["llava"], (0, 1, 2), marks=pytest.mark.slow)],
    ids=["llama", "llava"],
)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [pytest.param(*way, marks=[] if way == WAYS[0] else [pytest.mark.slow]) for way in WAYS],
)
def test_steps_of_other_sizes_compile_nothing(
    family: Family, media: tuple[int, ...], schedule: ScheduleKind, recompute: Recompute
) -> None:
    model, backend = family.build(), Counting()
    patterns = patterns_of(model, family.batch(), schedule, recompute, language_model=2)
    load = partial(load_compiled_stage, backend=backend)
    assert_sizes_compile_nothing(family, media, patterns, model, load, lambda: backend.num_graphs)


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=needs_inductor) for name in ("1f1b", "zb-h1")])
def test_they_compile_nothing_by_inductor_either(schedule: ScheduleKind) -> None:
    family = ALL["llava"]
    model = family.build()
    patterns = patterns_of(model, family.batch(), schedule, language_model=2)
    assert_sizes_compile_nothing(family, (0, 1, 2), patterns, model, load_compiled_stage, num_compiled)


@functools.cache
def tower(depth: int) -> tuple[nn.Module, dict[str, Tensor], Capture]:
    """A Llama of so many layers, its batch, and the capture of it."""
    model, batch = llama(depth).build(), llama(depth).batch()
    found = capture(model, batch)
    GradientFlow().run(found.graph)
    return model, completed(model, batch), found


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [pytest.param(*way, marks=[pytest.mark.slow] if way in WAYS[1:3] else []) for way in WAYS],
)
def test_a_tower_of_any_depth_has_as_many_graphs(schedule: ScheduleKind, recompute: Recompute) -> None:
    graphs = {}
    for depth in (4, 32):
        model, batch, found = tower(depth)
        plan = replace(with_recompute(even_plan(found.graph, {}), recompute), schedule=schedule)
        microbatch = Patterns(model, plan, found, batch).prepare(batch)
        torch._dynamo.reset()
        before = num_graphs()
        run_split(model, microbatch.programs, roots(microbatch), compiled)
        graphs[depth] = num_graphs() - before
    assert graphs == {4: 4, 32: 4}  # embedding, rotary tables, layer, head


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=needs_inductor) for name in ("1f1b", "zb-h1")])
def test_the_demo_trains_under_inductor(schedule: ScheduleKind) -> None:
    """With the gradients of the same stages run eagerly, and of the model as it is."""
    demo = _demo()
    model = demo.build_model()
    samples = demo.build_samples()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    patterns = patterns_of(model, demo.batch_of(samples[:4]), schedule, language_model=2)
    losses = []
    for step in range(8):
        batch = demo.batch_of(samples[: 8 + step % 2])
        microbatch = patterns.prepare(batch)
        whole = eager_outcome(model, batch)
        stages = run_split(model, microbatch.programs, roots(microbatch)).outcome
        got = run_split(model, microbatch.programs, roots(microbatch), load_compiled_stage).outcome
        for wanted in (whole, stages):
            assert (apart := difference(got, wanted)).within(1e-5), str(apart)
        optimizer.step()
        losses.append(got.loss)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("schedule", "recompute"), [pytest.param(*way, marks=needs_inductor) for way in WAYS])
def test_the_gradients_of_the_demo_are_exact_under_inductor(schedule: ScheduleKind, recompute: Recompute) -> None:
    """In float64, where the model itself does not round: its rotary tables and norms compute in float32, whatever its dtype, so
    that another compiler's cosine, one digit apart, shows as 1e-8 in gradients. Here they compute in float64."""
    demo = _demo()
    model = demo.build_model().double()
    batch = {
        name: t.double() if t.is_floating_point() else t for name, t in demo.batch_of(demo.build_samples()[:4]).items()
    }
    microbatch = patterns_of(model, batch, schedule, recompute, language_model=2).prepare(batch)
    programs = microbatch.programs.programs
    assert any("torch.float32" in program.source for program in programs.values())
    wide = replace(microbatch.programs, programs={name: _in_float64(program) for name, program in programs.items()})
    wanted = run_split(model, wide, roots(microbatch)).outcome
    got = run_split(model, wide, roots(microbatch), load_compiled_stage).outcome
    assert len(got.gradients) > 30
    assert (apart := difference(got, wanted)).within(1e-12), str(apart)
    rounded = run_split(model, microbatch.programs, roots(microbatch)).outcome
    assert 1e-12 < difference(rounded, wanted).gradient < 1e-5


def _in_float64(program: StageProgram) -> StageProgram:
    """The program with all that it computes in float32 computed in float64."""
    assert not any(constant.dtype == torch.float32 for constant in program.constants.values())
    return replace(program, source=program.source.replace("torch.float32", "torch.float64"))


def _demo() -> ModuleType:
    path = EXAMPLES / "digits_llava.py"
    spec = importlib.util.spec_from_file_location("digits_llava", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
