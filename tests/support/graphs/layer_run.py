"""Models whose every layer is a stage, and their programs run one after another in one process, as an executor runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from zoo.family import Family, Size
from zoo.parts import Pretrained, text_config

from mmcompile.codegen.program import PreparedMicrobatch, StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.stage_module import StageModule
from mmcompile.codegen.weight_grad_split import DeferredGradient
from mmcompile.config import Recompute, ScheduleKind
from mmcompile.ir.capture import capture
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.planner.plan.by_layers import by_layers
from support.graphs.split import even_plan
from support.oracles.eager import Outcome
from support.plans.with_recompute import with_recompute

Load = Callable[[StageProgram, Mapping[str, Tensor]], Callable[..., tuple[Tensor, ...]]]


def llama(num_layers: int) -> Family:
    """A tiny Llama that reads text only."""
    return Family(
        name=f"llama of {num_layers} layers",
        model=Pretrained(class_name="LlamaForCausalLM", config=lambda: text_config(num_hidden_layers=num_layers)),
        inputs=lambda draw, size: _text(draw.tokens(size.samples, size.length)),
        first=Size(samples=2, length=12, media=0),
        second=Size(samples=3, length=15, media=0),
        text_only=True,
    )


def layer_patterns(
    model: nn.Module, batch: Mapping[str, Any], schedule: ScheduleKind = "1f1b", recompute: Recompute = "none"
) -> Patterns:
    """Patterns of a model in which every layer is a stage of its own."""
    batch = completed(model, batch)
    found = capture(model, batch)
    Pipeline(passes=(GradientFlow(),)).run(found.graph)
    plan = replace(by_layers(with_recompute(even_plan(found.graph, {}), recompute)), schedule=schedule)
    return Patterns(model, plan, found, batch)


def run_layers(model: nn.Module, microbatch: PreparedMicrobatch, load: Load) -> Outcome:
    """Forward and backward of all programs on the model's own tensors; the loss is the mean over valid tokens."""
    model.zero_grad()
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    made: dict[str, Tensor] = {}
    back: dict[str, Tensor] = {}
    ran: list[tuple[StageProgram, list[Any], tuple[Tensor, ...]]] = []
    deferred: list[DeferredGradient] = []
    for program in microbatch.programs.programs.values():
        given = [_given(port, microbatch, made, program.has_backward) for port in program.inputs]
        stage = load(program, tensors)
        with torch.set_grad_enabled(program.has_backward):
            results, late = stage.run_deferring(*given) if isinstance(stage, StageModule) else (stage(*given), ())
        deferred += late
        made |= {port.name: value for port, value in zip(program.outputs, results, strict=True)}
        ran.append((program, given, results))
    back["loss_sum"] = 1 / made["num_tokens"]
    for program, given, results in reversed(ran):
        pairs = [
            (value, back[port.name])
            for port, value in zip(program.outputs, results, strict=True)
            if value.requires_grad and port.name in back
        ]
        if program.has_backward:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        for port, value in zip(program.inputs, given, strict=True):
            if port.gradient and value.grad is not None:
                back[port.name] = back.get(port.name, 0) + value.grad
    for gradient in deferred:
        gradient.add()
    return Outcome(
        loss=float(made["loss_sum"].detach() / made["num_tokens"]),
        gradients={name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    )


def _given(port: Any, microbatch: PreparedMicrobatch, made: Mapping[str, Tensor], backward: bool) -> Any:
    if port.kind == "link":
        return made[port.name].detach().requires_grad_(backward and port.gradient)
    return microbatch.sizes[port.name] if port.kind == "size" else microbatch.values[port.name]


def _text(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
