"""Models cut into stages along a plan made by hand, and the stages run one after another in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from zoo import ALL

from mmcompile.captured_model import fingerprint_of
from mmcompile.codegen.cut import cut
from mmcompile.codegen.load import load_stage
from mmcompile.codegen.program import PatternPrograms, Port, StageProgram
from mmcompile.codegen.stage_module import StageModule
from mmcompile.codegen.stage_programs import links
from mmcompile.codegen.weight_grad_split import DeferredGradient
from mmcompile.costmodel.cluster import Cluster
from mmcompile.ir.capture import Capture, capture
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.passes.gradient_flow import GradientFlow
from mmcompile.passes.pipeline import Pipeline
from mmcompile.planner.plan.plan import Plan
from mmcompile.planner.plan.plan_record import Chain, Prediction, Segment, Stage, StagePrediction
from support.graphs.hand_graph import with_flags
from support.oracles.eager import Outcome
from support.oracles.one_process import IGNORE, token_loss_sum

_NOTHING_PREDICTED = StagePrediction(
    forward_s=0.0,
    input_grad_s=0.0,
    weight_grad_s=0.0,
    parameter_bytes=0,
    gradient_bytes=0,
    optimizer_bytes=0,
    activation_bytes=0,
    in_flight=1,
)


@functools.cache
def captured(name: str) -> tuple[nn.Module, dict[str, Any], Capture]:
    """A zoo family in float64, its batch, and the capture of it. Callers may change `requires_grad` only."""
    model, batch = ALL[name].build(torch.float64), ALL[name].batch(torch.float64)
    return model, completed(model, batch), capture(model, batch)


def with_present_flags(model: nn.Module, found: Capture) -> Capture:
    """The capture as it is with the model's `requires_grad` flags of now."""
    found = replace(found, graph=with_flags(found.graph, model))
    Pipeline(passes=(GradientFlow(),)).run(found.graph)
    return found


def even_plan(graph: ModelGraph, stages: Mapping[str, int], cluster: Cluster | None = None) -> Plan:
    """Each component a chain, cut into equally long stages (one unless `stages` has a number), each on its own rank."""
    chains, rank = [], 0
    for component in graph.components:
        count, length = stages.get(component.name, 1), len(component.layers)
        bounds = [round(length * index / count) for index in range(count + 1)]
        made = []
        for index, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
            segment = Segment(component=component.name, first=first, last=last)
            made.append(_stage(f"{component.name}.{index}", segment, graph, rank, depth=count - 1 - index))
            rank += 1
        chains.append(Chain(name=component.name, components=(component.name,), stages=tuple(made)))
    plan = Plan(
        fingerprint=fingerprint_of(graph),
        cluster=cluster or Cluster.local(2),
        chains=tuple(chains),
        links=(),
        num_microbatches=1,
        shared_values=(),
        predicted=Prediction(iteration_s=0.0, bubble=0.0, lower_bound_s=0.0, gap=0.0),
    )
    parts = cut(graph, plan)
    return replace(plan, links=links(parts), shared_values=parts.shared_values)


def _stage(name: str, segment: Segment, graph: ModelGraph, rank: int, depth: int) -> Stage:
    layers = graph.component(segment.component).layers[segment.first : segment.last]
    return Stage(
        name=name,
        segments=(segment,),
        layer_names=tuple(layer.name for layer in layers),
        ranks=(rank,),
        has_backward=True,
        depth=depth,
        prediction=_NOTHING_PREDICTED,
    )


def root_values(found: Capture, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Value of every input that is no link, by port name."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    bound = found.sizes.bind(tensors)
    assert bound is not None, "the capture does not hold for this batch"
    sizes = found.sizes.size_inputs(bound)
    return {**tensors, **sizes, **found.host.run({**tensors, **sizes}).values}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """One tensor that went from one stage to another, as its producer made it."""

    output: Port
    input: Port
    shape: tuple[int, ...]
    dtype: str
    required_grad: bool
    """Autograd had a history for it where it was made."""
    got_gradient: bool
    """A gradient came back from the consumer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRun:
    """One forward and backward over all stages."""

    outcome: Outcome
    num_tokens: int
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ran:
    program: StageProgram
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]
    deferred: tuple[DeferredGradient, ...]


def run_split(
    model: nn.Module,
    programs: PatternPrograms,
    roots: Mapping[str, Any],
    load: Callable[[StageProgram, Mapping[str, Tensor]], StageModule] = load_stage,
) -> SplitRun:
    """Forward and backward stage by stage: every link is cut from autograd, and only flagged gradients go back."""
    model.zero_grad()
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    made: dict[str, Tensor] = {}
    ran: list[_Ran] = []
    for program in _in_order(programs):
        arguments = tuple(
            made[port.name].detach().requires_grad_(port.gradient) if port.kind == "link" else roots[port.name]
            for port in program.inputs
        )
        results, deferred = load(program, tensors).run_deferring(*arguments)
        made |= {port.name: result for port, result in zip(program.outputs, results, strict=True) if port.peers}
        ran.append(_Ran(program=program, arguments=arguments, results=results, deferred=deferred))
    own = [result for port, result in zip(ran[-1].program.outputs, ran[-1].results, strict=True) if not port.peers]
    loss_sum, num_tokens = own if len(own) == 2 else (own[0], torch.ones(()))  # a mean that is no sum over tokens
    crossings = tuple(_backward(ran, made, num_tokens))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    outcome = Outcome(loss=float(loss_sum.detach() / num_tokens), gradients=gradients)
    return SplitRun(outcome=outcome, num_tokens=int(num_tokens), crossings=crossings)


def _in_order(programs: PatternPrograms) -> Iterator[StageProgram]:
    """Programs so that producers come first, the loss stage last."""
    waiting, done = dict(programs.programs), set()
    while waiting:
        ready = [n for n, p in waiting.items() if {peer for port in p.inputs for peer in port.peers} <= done]
        assert ready, f"stages wait for each other: {sorted(waiting)}"
        for name in sorted(ready, key=lambda name: waiting[name].is_loss):
            yield waiting.pop(name)
            done.add(name)


def _backward(ran: list[_Ran], made: Mapping[str, Tensor], num_tokens: Tensor) -> Iterator[Crossing]:
    back: dict[str, Tensor] = {}
    for stage in reversed(ran):
        seeds = {
            port.name: 1 / num_tokens.to(result) if port.name == "loss_sum" else back.get(port.name)
            for port, result in zip(stage.program.outputs, stage.results, strict=True)
        }
        pairs = [
            (result, seeds[port.name])
            for port, result in zip(stage.program.outputs, stage.results, strict=True)
            if result.requires_grad and seeds[port.name] is not None
        ]
        assert bool(pairs) == stage.program.has_backward
        if pairs:
            torch.autograd.backward([result for result, _ in pairs], [seed for _, seed in pairs])
        for gradient in stage.deferred:
            gradient.add()
        for port, value in zip(stage.program.inputs, stage.arguments, strict=True):
            if port.kind == "link":
                yield _crossing(ran, port, made[port.name], value)
                if value.grad is not None:
                    back[port.name] = back.get(port.name, 0) + value.grad


def _crossing(ran: list[_Ran], port: Port, value: Tensor, received: Tensor) -> Crossing:
    (producer,) = (stage.program for stage in ran if (stage.program.stage,) == port.peers)
    (output,) = (out for out in producer.outputs if out.name == port.name)
    return Crossing(
        output=output,
        input=port,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        required_grad=value.requires_grad,
        got_gradient=received.grad is not None,
    )


def eager_from_logits(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Outcome, int]:
    """Loss and gradients of the eager model, the loss made from its logits in their own dtype; and the valid tokens."""
    model.zero_grad()
    count = int((batch["labels"][:, 1:] != IGNORE).sum())
    loss = token_loss_sum(model(**batch)["logits"], batch["labels"]) / count
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss=float(loss.detach()), gradients=gradients), count
