"""Backwards in two parts (schedule zb-h1): the same gradients as in one, in processes, and in compiled stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.graphs.layer_run import layer_patterns, llama
from support.graphs.split import captured, even_plan, root_values, run_split, with_present_flags
from support.models.freezing import freeze
from support.oracles.eager import Outcome, difference
from support.oracles.kept_bytes import kept_bytes
from support.oracles.one_process import ADAMW, train
from support.plans.with_recompute import with_recompute
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from zoo import ALL, samples
from zoo.family import Family, Size
from zoo.parts import Pretrained, opt_config

import mmcompile as mm
from mmcompile.codegen.compiled import load_compiled_stage
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import PatternPrograms, StageProgram
from mmcompile.codegen.stage_module import StageModule
from mmcompile.codegen.stage_programs import lower
from mmcompile.codegen.weight_grad_split import DeferredGradient, handed, new_tap, tapped
from mmcompile.config import Recompute, ScheduleKind
from mmcompile.data.collate import collate
from mmcompile.errors import VerifyError
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.inputs import completed
from mmcompile.planner.schedule.schedule import ActionKind

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
"""Dynamo hides both unless warnings are errors."""
ALL_TRAIN = {"encoder": True, "projector": True, "language_model": True, "adapter": True}
TOLERANCE = 1e-9


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 3), (3,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_deferred_gradient_is_that_of_autograd(shape: tuple[int, ...], with_bias: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True) if with_bias else None
    wanted_for = [x, weight, *([] if bias is None else [bias])]
    wanted = torch.autograd.grad(nn.functional.linear(x, weight, bias).sin().sum(), wanted_for)
    tap = new_tap((*shape[:-1], 7), torch.float64, torch.device("cpu"))
    cut = nn.functional.linear(x, weight.detach(), None if bias is None else bias.detach())
    deferred = DeferredGradient(tap=tap, x=x, weight=weight, bias=bias)
    deferred.add()
    assert weight.grad is None, "no backward came by"
    for times in (1, 2):
        tap.grad = None
        tapped(cut, tap).sin().sum().backward(retain_graph=True)
        deferred.add()
        for tensor, gradient in zip(wanted_for, wanted, strict=True):
            torch.testing.assert_close(tensor.grad, times * gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_multiplied_may_be_computed_again(frozen: bool) -> None:
    """Frozen: what comes before the product does not train, but x carries gradient of the layer's input."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    first = torch.randn(5, 3, dtype=torch.float64, requires_grad=not frozen)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tap, x_tap = (new_tap((4, width), torch.float64, torch.device("cpu")) for width in (7, 5))

    def layer(x: Tensor) -> Tensor:
        inner = handed(nn.functional.linear(x, first).tanh(), x_tap)
        return tapped(nn.functional.linear(inner, weight.detach()), tap).sin()

    wanted_for = [x, weight, *([] if frozen else [first])]
    wanted = torch.autograd.grad(nn.functional.linear((x @ first.T).tanh(), weight).sin().sum(), wanted_for)
    deferred = DeferredGradient(tap=tap, x=x_tap, weight=weight, bias=None, recomputed=True)
    result = checkpoint(layer, x, use_reentrant=False)
    assert x_tap.untyped_storage().nbytes() == 8
    result.sum().backward()
    deferred.add()
    for tensor, gradient in zip(wanted_for, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)


def stages_of(
    model: nn.Module, found: Capture, schedule: ScheduleKind, recompute: Recompute = "none"
) -> PatternPrograms:
    """Programs with the model's flags of now."""
    found = with_present_flags(model, found)
    plan = with_recompute(even_plan(found.graph, {"language_model": 2}), recompute)
    return lower(found, replace(plan, schedule=schedule))


def loading(backend: str) -> Callable[[StageProgram, Mapping[str, Tensor]], StageModule]:
    return partial(load_compiled_stage, backend=backend) if backend else load_stage


def outcomes(
    name: str, trained: dict[str, bool], schedule: ScheduleKind, backend: str = "", recompute: Recompute = "none"
) -> tuple[Outcome, dict[str, StageProgram]]:
    """Loss and gradients of a model in stages."""
    model, batch, found = captured(name)
    freeze(model, {**ALL_TRAIN, **trained})
    programs = stages_of(model, found, schedule, recompute)
    return run_split(model, programs, root_values(found, batch), loading(backend)).outcome, dict(programs.programs)


@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        ("", "none"),
        ("", "selective"),
        ("", "full"),
        ("aot_eager", "none"),
        ("aot_eager", "full"),
        pytest.param("aot_eager", "selective", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "trained",
    [{"encoder": False}, *(pytest.param(flags, marks=pytest.mark.slow) for flags in ({}, {"language_model": False}))],
    ids=str,
)
def test_stages_in_two_parts_have_the_gradients_of_one(
    trained: dict[str, bool], backend: str, recompute: Recompute
) -> None:
    wanted, _ = outcomes("llava", trained, "1f1b")
    got, programs = outcomes("llava", trained, "zb-h1", backend, recompute)
    assert (apart := difference(got, wanted)).within(TOLERANCE), str(apart)
    deferring = {name for name, program in programs.items() if "self.defer(" in program.source}
    language = trained.get("language_model", True)
    assert ("language_model.0" in deferring) == language
    assert ("vision_tower.0" in deferring) == trained.get("encoder", True)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_until_the_backward_no_more_is_kept_than_without_deferral(recompute: Recompute) -> None:
    """Beside taps, each of which takes the memory of a number. Without recomputation, x would be kept."""
    model, batch, found = captured("llava")
    freeze(model, ALL_TRAIN)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept: dict[tuple[str, str], int] = {}
    num_taps = 0
    for schedule in ("1f1b", "zb-h1"):
        for again in ("none", recompute):
            programs = stages_of(model, found, schedule, again).programs
            made: dict[str, Tensor] = {}
            for name in ("vision_tower.0", "multi_modal_projector.0"):
                stage, ports, held = load_stage(programs[name], tensors), programs[name].inputs, []

                def run(*given: object, stage: StageModule = stage, held: list[object] = held) -> tuple[Tensor, ...]:
                    results, deferred = stage.run_deferring(*given)
                    held.append(deferred)
                    return results

                values = root_values(found, batch) | made
                given = [values[port.name] for port in ports]
                kept[schedule, again] = kept.get((schedule, again), 0) + kept_bytes(run, given, tensors.values())
                outputs = zip(programs[name].outputs, stage.run_deferring(*given)[0], strict=True)
                made |= {port.name: value.detach().requires_grad_() for port, value in outputs}
                num_taps = max(num_taps, 2 * len(held[0]))
    assert kept["zb-h1", recompute] - kept["1f1b", recompute] <= 8 * num_taps
    assert kept["zb-h1", recompute] < kept["zb-h1", "none"]


def low_rank(num_layers: int) -> Family:
    """A Llama whose queries are made by two small matrices, which alone train: nothing stands between the two, and what the first
    of them multiplies in the first layer carries no gradient."""

    def build() -> nn.Module:
        model = llama(num_layers).model().requires_grad_(False)
        for layer in model.get_submodule("model.layers").children():
            layer.get_submodule("self_attn").q_proj = nn.Sequential(
                nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
            )
        return model

    return replace(llama(num_layers), model=build)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_products_are_deferred_too(recompute: Recompute) -> None:
    family = low_rank(3)
    model, batch = family.build(torch.float64), family.batch(torch.float64)
    found = capture(model, batch)
    values = root_values(found, completed(model, batch))
    wanted = run_split(model, stages_of(model, found, "1f1b"), values).outcome
    programs = stages_of(model, found, "zb-h1", recompute)
    assert sum(program.source.count("self.defer(") for program in programs.programs.values()) == 6
    if recompute == "full":
        assert sum(program.source.count("recomputed=True") for program in programs.programs.values()) == 5
    got = run_split(model, programs, values).outcome
    assert len(got.gradients) == 6
    assert (apart := difference(got, wanted)).within(TOLERANCE), str(apart)


def test_sizes_that_vary_compile_once() -> None:
    """Taps take their sizes from what the layer is called with."""
    family = llama(2)
    model = family.build(torch.float64)
    patterns = layer_patterns(model, family.batch(torch.float64), schedule="zb-h1")
    patterns.prepare(family.second_batch(torch.float64))
    programs = patterns.prepare(family.second_batch(torch.float64)).programs
    assert ".shape[0], " in programs.programs["language_model.1"].source
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {name: tensor for name, tensor in model.named_buffers()}
    program = programs.programs["language_model.1"]
    stage = load_compiled_stage(program, tensors, backend="aot_eager")
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for rows, length in [(3, 5), (5, 5), (2, 9)]:
        hidden = torch.randn(rows, length, 64, dtype=torch.float64, requires_grad=True)
        sizes = {"s0": rows, "s1": length}
        ports = [port for port in program.inputs if port.kind == "size"]
        expressions = dict(zip([str(size) for size in program.inputs[-1].shape[:2]], sizes.values(), strict=True))
        results, deferred = stage.run_deferring(*(expressions[port.expression] for port in ports), hidden)
        results[0].sum().backward()
        assert len(deferred) == 7
        for gradient in deferred:
            gradient.add()
    assert counters["stats"]["unique_graphs"] - before == 2  # rotary tables, the layer


def test_a_gradient_that_nobody_would_compute_is_an_error() -> None:
    model, batch, found = captured("llava")
    found = with_present_flags(model.requires_grad_(True), found)
    programs = lower(found, replace(even_plan(found.graph, {}), schedule="zb-h1")).programs
    stage = load_stage(programs["vision_tower.0"], dict(model.named_parameters()) | dict(model.named_buffers()))
    values = root_values(found, batch)
    with pytest.raises(VerifyError, match="call run_deferring"):
        stage(*(values[port.name] for port in programs["vision_tower.0"].inputs))


def assert_trained_as_in_one_process(
    family: Family, stages: int, schedule: ScheduleKind, recompute: Recompute = "none", *, compiled: bool = False
) -> None:
    """Two AdamW steps of four microbatches, in as many processes as there are stages."""
    steps = [samples(family, 8, dtype=torch.float64, seed=seed) for seed in (1, 3)]
    wanted = train(family.build(torch.float64), steps, num_microbatches=4)
    model, batch = family.build(torch.float64), collate(steps[0][:2])
    plan = mm.plan(model, batch, num_microbatches=4, stages={"language_model": stages})
    plan = replace(with_recompute(plan, recompute), schedule=schedule)
    with mm.parallelize(model, batch, plan, allow_unused=True, optimizer=ADAMW, compile=compiled) as engine:
        metrics = [engine.step(step, trace=True) for step in steps]
        kinds = {event.kind for event in engine.trace()}
        got = engine.state_dict()
    split = {ActionKind.I, ActionKind.W}
    assert kinds & {ActionKind.B, *split} == (split if schedule == "zb-h1" else {ActionKind.B})
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert max(float((got[name] - value).abs().max()) for name, value in wanted.parameters.items()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "recompute"), [(1, "none"), (2, "none"), (2, "selective"), (2, "full")])
def test_processes_train_as_one_process_does(stages: int, recompute: Recompute) -> None:
    """Two and three stages."""
    assert_trained_as_in_one_process(ALL["llava"], stages, "zb-h1", recompute)


def opt() -> Family:
    """A tiny OPT. Nothing in it rounds to float32, as rotary tables and norms of Llama do, so that what is left is rounding of
    float64: a cosine that another compiler makes differs by 1e-8, and AdamW turns that of a tiny gradient into 1e-4 of a step."""
    model, first = Pretrained(class_name="OPTForCausalLM", config=opt_config), Size(samples=2, length=14, media=0)
    return replace(llama(4), name="opt", model=model, first=first)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself calls torch.jit
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("zb-h1", "none"), ("zb-h1", "full")])
def test_compiled_processes_train_as_one_process_does(schedule: ScheduleKind, recompute: Recompute) -> None:
    """By inductor."""
    assert_trained_as_in_one_process(opt(), 2, schedule, recompute, compiled=True)
