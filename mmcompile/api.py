"""What scripts and the command line call: capture, freeze, plan, look at stages, parallelize."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import nn

from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.balancer import Balancer
from mmcompile.batching.balance.correction import Correction, Corrector
from mmcompile.batching.balance.plan_balancer import balancer_of_json, plan_balancer
from mmcompile.batching.balance.simulated_step import StepShape, step_time
from mmcompile.batching.pack import Packer
from mmcompile.batching.sample_costs import costs_of_samples
from mmcompile.captured_model import built, captured_step, fingerprint_of, padding, subject_of
from mmcompile.codegen.attention_choice import AttentionChoice
from mmcompile.codegen.program import StageProgram
from mmcompile.codegen.program_cache import Patterns
from mmcompile.codegen.stage_passes import with_axes
from mmcompile.codegen.stage_programs import lower
from mmcompile.config import Attention, EncoderPlacement, ProjectorPlacement, Recomputation, ScheduleKind
from mmcompile.costmodel.calibration import Calibration
from mmcompile.costmodel.cluster import Cluster
from mmcompile.data.collate import Sample, Value
from mmcompile.data.readers import read_stats
from mmcompile.data.stats import DatasetStats
from mmcompile.errors import ConfigError
from mmcompile.ir.graph import ModelGraph
from mmcompile.ir.inputs import completed
from mmcompile.ir.parameter_patterns import matches
from mmcompile.planner.plan.constraints import Constraint, parse_constraint
from mmcompile.planner.plan.placement import Placement, check_runnable
from mmcompile.planner.plan.plan import Plan, check_fingerprint
from mmcompile.planner.strategies.strategies import AUTO
from mmcompile.planning import Wanted, check_agrees, make_plan
from mmcompile.runtime.engine import Engine
from mmcompile.runtime.launch.background_balancer import AsideBalancer, Recipe


def capture(
    model: nn.Module | str | Path, batch: Mapping[str, Any] | None = None, dynamic: Mapping[str, Any] | None = None
) -> ModelGraph:
    """Capture the training step of a model as a graph of components and layers, with gradient flow annotated.

    Args:
        model: a Hugging Face model or any module whose forward returns a loss, with real weights or fake ones; or the path of a
            config.json (or a folder with one, or an id in the local cache): then it is built without weights.
        batch: what the model is called with, by name; at best two samples or more, with every modality in it. Made from the
            config for Hugging Face models of common conventions when not given.
        dynamic: a second batch: sizes in which it differs stay symbolic where the model's code allows.

    Raises:
        BatchError: the model refuses the batch.
        CaptureError: the model cannot be captured; the message has the reasons.
    """
    return captured_step(*built(model, batch), dynamic).graph


def freeze(model: nn.Module, train: str | Sequence[str]) -> None:
    """Train what matches and freeze the rest.

    Args:
        model: changed in place (`requires_grad`).
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
    num_microbatches: int | None = None,
    stages: Mapping[str, int] | None = None,
    projector: ProjectorPlacement | None = None,
    autocast: bool | Sequence[str] | None = None,
    attention: Attention | None = None,
    context_parallel: int | None = None,
    global_batch: int | None = None,
    stats: DatasetStats | str | Path | None = None,
    strategy: str = AUTO,
    schedule: ScheduleKind | None = None,
    recompute: Recomputation | None = None,
    placement: EncoderPlacement | None = None,
    tensor_parallel: int | Mapping[str, int] | None = None,
    replicas: int | Mapping[str, int] | None = None,
    fsdp: bool | Sequence[str] | None = None,
    packing: Sequence[Sample] | None = None,
    constraints: Sequence[Constraint | str] = (),
    calibration: Calibration | str | Path | None = None,
    solver_seconds: float | None = None,
    fault_tolerance: int | None = None,
    on_phase: Callable[[str, float], None] | None = None,
) -> Plan:
    """Find where every layer runs.

    Without `global_batch`, each replica of the language model computes `num_microbatches` times the captured batch in a step, and
    the plan is one that the engine runs. With it, everything is searched that is not decided here: tensor, context and data
    parallel degrees of every component, microbatches, schedule, recomputation, encoders beside the language model or on its
    devices.

    Args:
        model: with `requires_grad` as it will train; or a path, as for `capture`.
        batch: one microbatch, with every modality in it; made from the config when not given.
        cluster: for example `"4x8xH100"`, or `"local"` for this machine.
        num_microbatches: microbatches of a step, of one replica of the language model; 4, or searched with a global batch.
        stages: chain name -> number of stages, where that is decided already.
        projector: `"with_encoder"`, `"alone"`, `"with_language_model"`; None lets the simulator choose.
        autocast: compute products in bfloat16 from float32 parameters, as `torch.autocast` does: in all components, or in those
            named. None: in none.
        attention: `"model"`, as the model does it; or `"bitfield"`: in the language model, masks become words of one int64 a
            token and empty parts of the mask cost nothing. None: bitfield if context_parallel needs it.
        context_parallel: ranks that share the tokens of each stage of the language model; 1, or searched with a global batch and
            bitfield attention.
        global_batch: samples of a step.
        stats: the dataset that the step is predicted for, or where to read it (`mmcompile.data.readers.read_stats`); without
            it, all samples are like those of the captured batch.
        strategy: `"auto"`, or the name of a published search or a baseline (`mmcompile.planner.strategies.strategies`).
        schedule: None: 1F1B, or searched with a global batch.
        recompute: what the backward of every layer computes again: `"none"`, `"selective"` (all but products, convolutions and
            attention) or `"full"`; or `"auto"`: for each layer what its rank's memory needs, with least time, so nothing where
            everything fits. None: none, or `"auto"` with a global batch. With fault tolerance, auto is one mode for all layers.
        placement: `"disjoint"`, encoders on devices of their own, or `"colocated"`, before the language model on its devices;
            None: disjoint, or searched with a global batch.
        tensor_parallel: ranks that share the tensors of every layer, in every chain; or chain (or component) name -> its ranks, 1
            for those not named. None: 1, or searched with a global batch. What cannot be shared by so many is computed by each of
            them; the plan's notes say what and why.
        replicas: of the language model; or chain (or component) name -> its replicas, kept as they are. Without a global batch,
            chains that are not named get as many as the language model, which has 1 if not named; with one, the search chooses.
            Chains that lead from one encoder to the language model have equally many.
        fsdp: replicas share parameters, gradients and optimizer state instead of holding them, in every chain that has several;
            or in the chains of the components named. Layers gather parameters before they compute; with recompute `"full"` or
            `"selective"` they do so again in the backward and hold none in between, otherwise weights stay until the backward.
            Replicas of the language model must have samples in every microbatch; those of an encoder need none. Not with a global
            batch: there `strategy="fsdp"` does it.
        packing: two or more conversations, as a processor returns them, which stand for a microbatch in place of `batch`. The
            plan is then for microbatches that are one row of documents without padding, and says what keeps documents apart.
        constraints: values or texts (`mmcompile.planner.plan.constraints`): layers together or apart, on a stage, memory caps.
        calibration: measured times of layers, or the file they are in (`mmcompile profile`).
        solver_seconds: time for Z3 to prove the cuts; 5 with constraints, else only on demand.
        fault_tolerance: nodes that may fail at once without losing a layer. The plan then has a pipeline template for every
            number of nodes that failures may leave (`Plan.resilience`), and says which numbers of nodes can be used in full.
        on_phase: told the seconds of each phase: `"capture"`, `"cost"`, `"search"`, `"proof"`, `"templates"`, `"links"`.

    Raises:
        BatchError, CaptureError: from the capture.
        PlanError: nothing fits (the message has the nearest requests that do), a constraint conflicts, or `stages` asks for what
            does not exist; the model's tokens cannot be shared, or packed documents would see each other; the cluster or the
            step is too small for one more replica than nodes that may fail.
        ConfigError: options that conflict or have no effect; a calibration for another machine.
    """
    subject = subject_of(model, batch, packing)
    wanted = Wanted(
        cluster=Cluster.parse(cluster) if isinstance(cluster, str) else cluster,
        num_microbatches=num_microbatches,
        stages=stages,
        projector=projector,
        autocast=autocast or (),
        attention=_attention(attention, context_parallel),
        search_tokens=attention == "bitfield" and context_parallel is None and global_batch is not None,
        global_batch=global_batch,
        stats=stats if isinstance(stats, DatasetStats | None) else read_stats(stats),
        strategy=strategy,
        schedule=schedule,
        recompute=recompute,
        placement=placement,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        fsdp=fsdp or (),
        packing=subject.packing,
        constraints=tuple(parse_constraint(own) if isinstance(own, str) else own for own in constraints),
        calibration=calibration if isinstance(calibration, Calibration | None) else Calibration.load(calibration),
        solver_seconds=solver_seconds,
        fault_tolerance=fault_tolerance,
    )
    wanted.check()
    on_phase = on_phase or (lambda name, seconds: None)
    started = time.perf_counter()
    captured = subject.capture()
    on_phase("capture", time.perf_counter() - started)
    batch = completed(subject.model, subject.batch)
    return make_plan(captured, batch, wanted, fingerprint_of(captured.graph), on_phase)


def _attention(attention: Attention | None, context_parallel: int | None) -> AttentionChoice:
    context_parallel = 1 if context_parallel is None else context_parallel
    if context_parallel < 1:
        raise ConfigError(
            f"context_parallel is {context_parallel}; each stage of the language model has at least 1 rank"
        )
    if attention == "model" and context_parallel > 1:
        raise ConfigError(
            f"context_parallel {context_parallel} needs attention 'bitfield', got 'model': the model's own masks are for whole "
            "sequences"
        )
    if attention not in (None, *get_args(Attention)):
        raise ConfigError(f"attention is {attention!r}; choose one of {', '.join(get_args(Attention))}")
    return AttentionChoice(
        attention=attention or ("bitfield" if context_parallel > 1 else "model"), context_parallel=context_parallel
    )


def pack(model: nn.Module, samples: Sequence[Sample]) -> dict[str, Value]:
    """Samples as one batch of one row: documents one after the other, each with positions of its own, without padding.

    Raises:
        BatchError: samples that do not go together, or have no tokens.
        PlanError: the model takes no positions.
    """
    return Packer.of(model, padding(model)).pack(samples)


def stage_programs(model: nn.Module, batch: Mapping[str, Any], plan: Plan) -> Mapping[str, StageProgram]:
    """The programs that the stages of a plan run for batches like `batch`, by stage name."""
    captured = captured_step(model, batch)
    check_fingerprint(plan, fingerprint_of(captured.graph))
    return lower(with_axes(captured, plan), plan).programs


def parallelize(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    *,
    cluster: Cluster | str = "local",
    num_microbatches: int | None = None,
    stages: Mapping[str, int] | None = None,
    projector: ProjectorPlacement | None = None,
    schedule: ScheduleKind | None = None,
    recompute: Recomputation | None = None,
    autocast: bool | Sequence[str] | None = None,
    attention: Attention | None = None,
    context_parallel: int | None = None,
    tensor_parallel: int | Mapping[str, int] | None = None,
    replicas: int | Mapping[str, int] | None = None,
    fsdp: bool | Sequence[str] | None = None,
    packing: Sequence[Sample] | None = None,
    balance: str | Balancer = Auto.name,
    correct: bool = False,
    on_capture: Callable[[int], None] | None = None,
    **options: Any,
) -> Engine:
    """Split a model over processes and return the engine that trains it.

    In a plain script the other processes are started here; under torchrun the launched ranks are used.

    Args:
        model: on rank 0, with real weights.
        batch: one microbatch, with every modality in it; its values are not trained on. Made from the config for Hugging Face
            models of common conventions when not given.
        plan: as made by `plan`; by default it is made here, for `cluster`.
        cluster, num_microbatches, stages, projector, schedule, recompute, autocast, attention, context_parallel,
            tensor_parallel, replicas, fsdp: as for `plan`, when none is given.
        packing: as for `plan`. With a plan for packed samples it is needed too: what stands for a microbatch.
        balance: which samples each replica of each encoder and of the language model computes together: a balancer's name
            (`mmcompile.batching.balance.registry`), or a balancer. `"auto"` takes the one whose step is predicted to be shortest,
            and arrival order where that is as good.
        correct: learn from measured times what samples cost. Steps then depend on the machine, not on their samples alone.
        on_capture: called before each later capture with the number of captures so far.
        options: of `Engine` (optimizer, scheduler, clip_norm, compile, ...).

    Raises:
        PlanError: the plan has axes that the engine does not run, or belongs to another model.
    """
    if plan is not None:
        check_runnable(plan)
        decided = {
            "schedule": schedule,
            "recompute": recompute,
            "autocast": autocast,
            "tensor_parallel": tensor_parallel,
        }
        check_agrees(plan, attention, context_parallel, packing, **decided, replicas=replicas, fsdp=fsdp)
    subject = subject_of(model, batch, packing)
    model, batch, captured = subject.model, subject.batch, subject.capture()
    wanted = Wanted(
        cluster=Cluster.parse(cluster) if isinstance(cluster, str) else cluster,
        num_microbatches=num_microbatches,
        stages=stages,
        projector=projector,
        schedule=schedule,
        recompute=recompute,
        autocast=autocast or (),
        attention=_attention(attention, context_parallel),
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        fsdp=fsdp or (),
        packing=subject.packing,
    )
    wanted.check()
    if plan is None:
        plan = make_plan(captured, completed(model, batch), wanted, fingerprint_of(captured.graph))
    check_fingerprint(plan, fingerprint_of(captured.graph))
    patterns = Patterns(model, plan, captured, batch, on_capture)
    if packing is None:
        options.setdefault("pad", padding(model))
    else:
        options["collate"] = Packer.of(model, padding(model)).pack
    decides = plan_balancer(plan, balance) if isinstance(balance, str) else balance
    return Engine(
        Placement.of(plan),
        patterns,
        model=model,
        balancer=AsideBalancer(decides, _recipe(plan, balance)) if isinstance(balance, str) else decides,
        costs=functools.partial(costs_of_samples, plan),
        corrector=Corrector(decides, Correction(step_time=step_time(StepShape.of(plan)))) if correct else None,
        **options,
    )


def _recipe(plan: Plan, name: str) -> Recipe:
    """How another process makes the balancer of a name, for steps of a plan."""
    function = balancer_of_json
    return Recipe(module=function.__module__, function=function.__name__, arguments=(plan.to_json(), name))
