"""Backwards in two parts (schedule zb-h1): the same gradients as in one, in processes, and in compiled stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from freezing import freeze
from layer_run import layer_patterns, llama
from lower.split import captured, even_plan, root_values, run_split, with_present_flags
from oracles.eager import Outcome, difference
from oracles.one_process import ADAMW, TrainingRun, train
from torch import Tensor, nn
from torch._dynamo.utils import counters
from zoo import ALL, Batch, samples

import mmcompile as mm
from mmcompile.errors import PlanError, VerifyError
from mmcompile.lower.compiled import load_compiled_stage
from mmcompile.lower.deferral import DeferredGradient, new_tap, tapped
from mmcompile.lower.load import load_stage
from mmcompile.lower.program import StageProgram
from mmcompile.lower.stage_module import StageModule
from mmcompile.lower.stages import lower
from mmcompile.plan.placement import check_runnable
from mmcompile.plan.plan import Plan
from mmcompile.plan.simulator.schedule import ActionKind
from mmcompile.step.collate import collate

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


def outcomes(
    name: str, trained: dict[str, bool], schedule: str, backend: str = ""
) -> tuple[Outcome, dict[str, StageProgram]]:
    """Loss and gradients of a model in stages."""
    model, batch, found = captured(name)
    freeze(model, {**ALL_TRAIN, **trained})
    found = with_present_flags(model, found)
    programs = lower(found, replace(even_plan(found.graph, {"language_model": 2}), schedule=schedule))

    def load(program: StageProgram, tensors: Mapping[str, Tensor]) -> StageModule:
        return load_compiled_stage(program, tensors, backend=backend) if backend else load_stage(program, tensors)

    return run_split(model, programs, root_values(found, batch), load).outcome, dict(programs.programs)


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize(
    "trained",
    [{"encoder": False}, *(pytest.param(flags, marks=pytest.mark.slow) for flags in ({}, {"language_model": False}))],
    ids=str,
)
def test_stages_in_two_parts_have_the_gradients_of_one(trained: dict[str, bool], backend: str) -> None:
    wanted, _ = outcomes("llava", trained, "1f1b")
    got, programs = outcomes("llava", trained, "zb-h1", backend)
    assert (apart := difference(got, wanted)).within(TOLERANCE), str(apart)
    deferring = {name for name, program in programs.items() if "self.defer(" in program.source}
    language = trained.get("language_model", True)
    assert ("language_model.0" in deferring) == language
    assert ("vision_tower.0" in deferring) == trained.get("encoder", True)


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


def plan_of(model: nn.Module, batch: list[Batch], **stages: int) -> Plan:
    return replace(mm.plan(model, collate(batch), num_microbatches=4, stages=stages), schedule="zb-h1")


def in_one_process(steps: list[list[Batch]]) -> TrainingRun:
    return train(ALL["llava"].build(torch.float64), steps, num_microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_processes_train_as_one_process_does(stages: int) -> None:
    """Two and three stages."""
    steps = [samples(ALL["llava"], 8, dtype=torch.float64, seed=seed) for seed in (1, 3)]
    wanted = in_one_process(steps)
    model = ALL["llava"].build(torch.float64)
    plan = plan_of(model, steps[0][:2], language_model=stages)
    with mm.parallelize(model, collate(steps[0][:2]), plan, optimizer=ADAMW) as engine:
        metrics = [engine.step(step, trace=True) for step in steps]
        kinds = {event.kind for event in engine.trace()}
        got = engine.state_dict()
    assert {ActionKind.I, ActionKind.W} <= kinds
    assert ActionKind.B not in kinds
    assert [step.loss for step in metrics] == pytest.approx(wanted.losses, rel=TOLERANCE, abs=0)
    assert max(float((got[name] - value).abs().max()) for name, value in wanted.parameters.items()) < TOLERANCE


def test_with_recomputation_it_is_refused() -> None:
    model = ALL["llava"].build()
    plan = plan_of(model, samples(ALL["llava"], 2, seed=0))
    check_runnable(plan)
    with pytest.raises(PlanError, match="zb-h1 keeps what weight gradients read, which recompute full would not"):
        check_runnable(replace(plan, recompute="full"))
