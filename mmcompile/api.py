"""Functions for scripts and the command line: capture, freeze, plan, stage programs, parallelize."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

from torch import nn

from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.correction import Correction, Corrector
from mmcompile.batching.balance.registry import balancer_of_json, plan_balancer
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.batching.pack import Packer
from mmcompile.batching.sample_costs import costs_of_samples
from mmcompile.captured_model import CapturedModel, built, captured_step, fingerprint_of, padding
from mmcompile.codegen.pipeline import with_stage_passes
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.program_cache import OnCapture, Patterns
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import (
    Attention,
    Components,
    Counts,
    Degrees,
    EncoderPlacement,
    PlanRequest,
    ProjectorPlacement,
    Recomputation,
    ScheduleKind,
)
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.collate import Sample, Value
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError
from mmcompile.ir.capture import verified
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.passes.base import AnyPass
from mmcompile.passes.untrained import refuse_untrained
from mmcompile.planner.plan.constraints import Constraint
from mmcompile.planner.plan.placement import Placement, check_runnable
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planner.search.candidate import Strategy
from mmcompile.planner.strategies.search import AUTO
from mmcompile.planning import PlanInputs, make_plan
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.launch.background_balancer import BackgroundBalancer, Recipe
from mmcompile.runtime.optim.param_groups import matches


def capture(
    model: nn.Module | str | Path,
    batch: Mapping[str, Any] | None = None,
    dynamic: Mapping[str, Any] | None = None,
    *,
    verify: Literal["structure", "gradients"] = "structure",
) -> ModelGraph:
    """Capture the training step of a model as a graph of components and layers, with gradient flow annotated.

    Args:
        model: a Hugging Face model or any module whose forward returns a loss, with real weights or fake ones; or the path of a
            config.json (or a folder with one, or an id in the local cache): then it is built without weights.
        batch: what the model is called with, by name; at best two samples or more, with every modality in it. Made from the
            config for Hugging Face models of common conventions when not given.
        dynamic: a second batch: sizes in which it differs stay symbolic where the model's code allows.
        verify: "structure" compares which parameters get a gradient with autograd's record of the model's forward; "gradients"
            also runs model and graph on the batch and compares loss and all gradients.

    Raises:
        BatchError: the model refuses the batch.
        CaptureError: the model cannot be captured, or the graph differs from it; the message has the reasons.
        ConfigError: gradients of a model without weights cannot be compared.
    """
    module, given = built(model, batch)
    captured = captured_step(module, given, dynamic)
    if verify == "gradients":
        verified(module, given, captured)
    return captured.graph


def freeze(model: nn.Module, train: str | Sequence[str]) -> None:
    """Set matching parameters to train and freeze all others.

    Args:
        train: `"all"`, or patterns over parameter names: a component or module name (`projector`, `language_model`), or a
            glob (`*.lora_*`).

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    patterns = [train] if isinstance(train, str) else list(train)
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches(name, pattern)}
        if not matched:
            modules = sorted({name.rpartition(".")[0].split(".")[i] for name in names for i in range(name.count("."))})
            known = ", ".join(part for part in modules if not part.isdigit())
            raise ConfigError(f"train pattern {pattern!r} matches no parameter; use 'all', a glob, or one of: {known}")
        chosen |= matched
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def plan(
    model: nn.Module | str | Path,
    batch: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str = "local",
    global_batch: int | None = None,
    stats: DatasetStats | str | Path | None = None,
    strategy: str | Strategy = AUTO,
    num_microbatches: int | None = None,
    schedule: ScheduleKind | None = None,
    recompute: Recomputation | None = None,
    placement: EncoderPlacement | None = None,
    tensor_parallel: Degrees | None = None,
    replicas: Degrees | None = None,
    fsdp: Components | None = None,
    stages: Counts | None = None,
    projector: ProjectorPlacement | None = None,
    autocast: Components | None = None,
    attention: Attention | None = None,
    context_parallel: int | None = None,
    constraints: Sequence[Constraint | str] = (),
    calibration: Calibration | str | Path | None = None,
    solver_seconds: float | None = None,
    fault_tolerance: int | None = None,
    allow_unused: bool = False,
    packing: Sequence[Sample] | None = None,
    passes: Sequence[AnyPass] = (),
    cache: str | Path | None = None,
    on_phase: Callable[[str, float], None] | None = None,
) -> Plan:
    """Plan the training of a model: assignment of every layer to devices, degrees, microbatches and schedule.

    Without `global_batch`, each replica of the language model computes `num_microbatches` times the captured batch in a step, and
    the plan is one that the engine runs. With it, everything is searched that is not decided here: tensor, context and data
    parallel degrees of every component, microbatches, schedule, recomputation, encoders beside the language model or on its
    devices.

    Args:
        model: with `requires_grad` as it will train; or a path, as for `capture`.
        batch: one microbatch, with every modality in it; made from the config when not given.
        packing: two or more conversations, as a processor returns them, which stand for a microbatch in place of `batch`. The
            plan is then for microbatches that are one row of documents without padding, and its notes contain how documents are
            kept apart.
        passes: own passes, run on the whole model before its layers are priced (`mmcompile passes` prints the order). Give
            `parallelize` and `stage_programs` the same.
        cache: folder of your own for captures, so that a second start of the same job makes none; none by default.
        strategy: name of a strategy, or a function from a problem to candidates (`mmcompile.planner.search.candidate.Strategy`).
        on_phase: receives the seconds of each phase: `"capture"`, `"cost"`, `"search"`, `"proof"`, `"templates"`, `"links"`.
        cluster, global_batch, ...: all others are fields of `mmcompile.config.PlanRequest`, described there. A cluster, a
            dataset, a calibration and constraints may also be given as values instead of their texts and files.

    Raises:
        BatchError, CaptureError: from the capture.
        PlanError: nothing fits (the message has the nearest requests that do), a constraint conflicts, or `stages` asks for what
            does not exist; the model's tokens cannot be shared, or packed documents would see each other; the cluster or the
            step is too small for one more replica than nodes that may fail.
        ConfigError: options that conflict or have no effect; a calibration for another machine.
    """
    request = _request(locals())
    inputs = PlanInputs.read(
        cluster=cluster, stats=stats, calibration=calibration, constraints=constraints, passes=passes, strategy=strategy
    )
    return planned(CapturedModel.of(model, batch, packing, cache), request, inputs, on_phase)


def planned(
    subject: CapturedModel,
    request: PlanRequest,
    inputs: PlanInputs,
    on_phase: Callable[[str, float], None] | None = None,
) -> Plan:
    """Find the plan of a request as `plan` does; `inputs` are values of options that the request holds as text or file names."""
    inputs = replace(inputs, packing=subject.packing)
    on_phase = on_phase or (lambda name, seconds: None)
    started = time.perf_counter()
    captured = subject.capture()
    on_phase("capture", time.perf_counter() - started)
    batch = completed(subject.model, subject.batch)
    return make_plan(captured, batch, request, inputs, fingerprint_of(captured.graph), on_phase)


def _request(given: Mapping[str, Any]) -> PlanRequest:
    options: dict[str, Any] = {own.name: given[own.name] for own in fields(PlanRequest) if own.name in given}
    options |= {
        name: _text(options[name])
        for name in ("cluster", "stats", "calibration", "strategy")
        if options.get(name) is not None
    }
    options["constraints"] = tuple(map(str, options.get("constraints", ())))
    return PlanRequest(**options)


def _text(value: object) -> str:
    match value:
        case DatasetStats():
            return value.name
        case Calibration():
            return value.device
        case FunctionType():
            return value.__name__
        case _:
            return str(value)


def pack(model: nn.Module, samples: Sequence[Sample]) -> dict[str, Value]:
    """Return samples packed into one row without padding: documents one after the other, each with its own positions.

    Raises:
        BatchError: samples cannot be joined, or have no tokens.
        PlanError: the model takes no positions.
    """
    return Packer.of(model, padding(model)).pack(samples)


def stage_programs(
    model: nn.Module,
    batch: Mapping[str, Any],
    plan: Plan,
    *,
    passes: Sequence[AnyPass] = (),
    cache: str | Path | None = None,
) -> Mapping[str, StageProgram]:
    """Return the programs that the stages of a plan run for batches like `batch`, by stage name.

    Args:
        passes: own passes that the plan was made with; they run on the whole model, before it is split over ranks.
        cache: as for `parallelize`.
    """
    captured = CapturedModel.of(model, batch, cache=cache).capture()
    check_fingerprint(plan, fingerprint_of(captured.graph))
    return lower(with_stage_passes(captured, plan, own=passes), plan).programs


def parallelize(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    *,
    cluster: Cluster | str = "local",
    num_microbatches: int | None = None,
    stages: Counts | None = None,
    projector: ProjectorPlacement | None = None,
    schedule: ScheduleKind | None = None,
    recompute: Recomputation | None = None,
    autocast: Components | None = None,
    attention: Attention | None = None,
    context_parallel: int | None = None,
    tensor_parallel: Degrees | None = None,
    replicas: Degrees | None = None,
    fsdp: Components | None = None,
    allow_unused: bool = False,
    packing: Sequence[Sample] | None = None,
    balance: str | Balancer = Auto.name,
    correct: bool = False,
    passes: Sequence[AnyPass] = (),
    cache: str | Path | None = None,
    on_capture: OnCapture | None = None,
    **options: Any,
) -> Engine:
    """Split a model over processes and return the engine that trains it.

    In a plain script the other processes are started here; under torchrun the launched ranks are used.

    Args:
        model: on rank 0, with real weights.
        batch: one microbatch, with every modality in it; its values are not trained on. Made from the config for Hugging Face
            models of common conventions when not given.
        plan: as made by `plan`; by default it is made here, for `cluster`.
        cluster: as for `plan`, when no plan is given; likewise num_microbatches, stages, projector, schedule, recompute,
            autocast, attention, context_parallel, tensor_parallel, replicas and fsdp.
        allow_unused: train although some of what is set to train gets no gradient.
        packing: as for `plan`; needed too with a plan for packed samples, which are captured in place of `batch`.
        balance: which samples each replica of each encoder and of the language model computes together: a balancer's name
            (`mmcompile.batching.balance.registry`), or a balancer. `"auto"` takes the one whose step is predicted to be shortest,
            and arrival order where that is as good.
        correct: learn from measured times what samples cost. Steps then depend on the machine, not on their samples alone.
        passes: own passes, those that the plan was made with; they run on every capture of the model, before it is split over
            ranks.
        cache: folder of your own for captures, so that a second start of the same job makes none; none by default. Files there
            hold pickles, and the integers of a few microbatches.
        on_capture: called before each later capture with the number of captures so far, and the reason for which none of them
            holds for the batch; by default a line is logged.
        options: of `Engine` (optimizer, scheduler, clip_norm, compile, ...).

    Raises:
        PlanError: the plan has axes that the engine does not run, or belongs to another model.
        ConfigError: options that conflict or have no effect; a parameter that is set to train gets no gradient.
    """
    request = _request(locals())
    if plan is not None:
        check_runnable(plan)
        _check_agrees(plan, request, packed=packing is not None)
    subject = CapturedModel.of(model, batch, packing, cache)
    model, batch, captured = subject.model, subject.batch, subject.capture()
    if not allow_unused:
        refuse_untrained(captured.graph)
    if plan is None:
        inputs = replace(PlanInputs.read(cluster=cluster, passes=passes), packing=subject.packing)
        plan = make_plan(captured, completed(model, batch), request, inputs, fingerprint_of(captured.graph))
    check_fingerprint(plan, fingerprint_of(captured.graph))
    patterns = Patterns(model, plan, captured, batch, on_capture, passes, subject.store)
    if packing is None:
        options.setdefault("pad", padding(model))
    else:
        options["collate"] = Packer.of(model, padding(model)).pack
    decides = plan_balancer(plan, balance) if isinstance(balance, str) else balance
    return Engine(
        Placement.of(plan),
        patterns,
        model=model,
        balancer=BackgroundBalancer(decides, _recipe(plan, balance)) if isinstance(balance, str) else decides,
        costs=functools.partial(costs_of_samples, plan),
        corrector=Corrector(decides, Correction(step_time=step_time(StepShape.of(plan)))) if correct else None,
        **options,
    )


def _check_agrees(plan: Plan, request: PlanRequest, *, packed: bool) -> None:
    """Raise ConfigError if an option contradicts the given plan. `packed`: the caller gave several samples to pack in one row."""
    attention, context_parallel = request.attention, request.context_parallel
    if attention not in (None, plan.attention) or context_parallel not in (None, plan.context_parallel):
        raise ConfigError(
            f"the plan has attention {plan.attention!r} and context_parallel {plan.context_parallel}, asked were "
            f"{attention!r} and {context_parallel}: a plan decides these; leave them out, or make another plan"
        )
    for name in ("schedule", "recompute", "autocast", "tensor_parallel", "replicas", "fsdp"):
        value = getattr(request, name)
        if value is not None:
            raise ConfigError(
                f"{name}={value} has no effect together with a plan: the plan decides it; drop one of the two"
            )
    if (plan.packing is not None) != packed:
        said = "does not pack samples" if plan.packing is None else "packs samples"
        raise ConfigError(
            f"the plan {said}, and packing was {'' if packed else 'not '}given: give packing (two samples or more) both to plan "
            "and to parallelize, or to none"
        )


def _recipe(plan: Plan, name: str) -> Recipe:
    """Return the function, and its arguments as text, by which another process makes a plan's balancer called `name`."""
    function = balancer_of_json
    return Recipe(module=function.__module__, function=function.__name__, arguments=(plan.to_json(), name))
