"""`mmcompile train`: train a model as a pipeline of processes on this machine, or on the ranks of torchrun."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from mmcompile import api
from mmcompile.batching.balance.arrival_order import Arrival
from mmcompile.batching.balance.auto import Auto
from mmcompile.batching.balance.registry import BALANCERS, balancer
from mmcompile.cli.console import ERRORS, busy, print_json, print_text
from mmcompile.cli.data import DATA_HELP, epochs, load_samples, richest
from mmcompile.cli.model import Weights, load_model
from mmcompile.cli.options import (
    AttentionOption,
    AutocastOption,
    ContextParallelOption,
    DtypeOption,
    FaultToleranceOption,
    FsdpOption,
    JsonOption,
    ModelArgument,
    Projector,
    ProjectorOption,
    RecomputeOption,
    ReductionChoice,
    ReplicasOption,
    ScheduleChoice,
    ScheduleOption,
    StagesOption,
    TensorParallelOption,
    TrainOption,
    parse_components,
    parse_degrees,
    parse_stages,
)
from mmcompile.cli.planning import (
    Subject,
    Wanted,
    make_plan,
    recompute_kind,
    refuse_with_plan,
    schedule_kind,
    set_trainable,
)
from mmcompile.cli.train_elastic import RUN, ElasticOptions, node_at, refuse_elastic, train_elastic
from mmcompile.config import DEFAULT_MICROBATCHES
from mmcompile.costmodel.hardware import LOCAL_NAME
from mmcompile.data.collate import Sample, collate
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.planner.plan.plan import Plan
from mmcompile.report.run_folder import PLAN, write_events, write_programs
from mmcompile.runtime.engine import Engine, StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    steps: int
    loss: float
    tokens: int
    samples: int
    seconds: float


def train(
    model: ModelArgument,
    data: Annotated[str, typer.Option(help=DATA_HELP, show_default=False)],
    plan: Annotated[
        Path | None, typer.Option(help="Train by this plan instead of making one.", show_default=False)
    ] = None,
    train: TrainOption = None,
    stages: StagesOption = None,
    projector: ProjectorOption = Projector.SEARCH,
    schedule: ScheduleOption = None,
    recompute: RecomputeOption = None,
    autocast: AutocastOption = None,
    attention: AttentionOption = None,
    context_parallel: ContextParallelOption = None,
    tensor_parallel: TensorParallelOption = None,
    replicas: ReplicasOption = None,
    fsdp: FsdpOption = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches of each replica in a step.", show_default="the plan's, else 4"),
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Who computes which sample: {', '.join(BALANCERS)}.",
            show_default="auto; arrival with templates",
        ),
    ] = None,
    correct: Annotated[
        bool, typer.Option("--correct", help="Learn from measured times what samples cost; steps then depend on them.")
    ] = False,
    pack: Annotated[
        bool, typer.Option("--pack", help="Pack the texts of a microbatch into one row instead of padding them.")
    ] = False,
    fault_tolerance: FaultToleranceOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Nodes to play on this machine, each a process; needs --fault-tolerance.", show_default=False
        ),
    ] = None,
    reduction: Annotated[
        ReductionChoice,
        typer.Option(help="How gradients add up; with 'fixed', lost nodes do not change a bit of the result."),
    ] = ReductionChoice.FAST,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between checkpoints, in a run with templates.", show_default="the end only"),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Be one node of a run that `mmcompile coordinate` serves.", show_default=False
        ),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Name of this node, with --coordinator.", show_default=False)] = None,
    secret: Annotated[
        Path | None, typer.Option(help="File with the secret of the run, with --coordinator.", show_default=False)
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=2, help="Batches to an update.", show_default="every batch updates")
    ] = None,
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Update half-precision parameters in float32.")
    ] = False,
    shard_optimizer: Annotated[
        bool, typer.Option("--shard-optimizer", help="Keep optimizer state once among replicas (ZeRO stage 1).")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 16,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-4,
    clip_norm: Annotated[
        float | None, typer.Option(min=0.0, help="Largest global gradient norm.", show_default="no clipping")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of samples, and of random weights.")] = 0,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Start from random weights, not stored ones.")
    ] = False,
    dtype: DtypeOption = None,
    compile: Annotated[bool, typer.Option("--compile", help="Run stages through torch.compile.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder: plan, stage sources, measured events.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to go on from, up to --steps.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to write at the end, for --resume.", show_default=False)
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Folder to write the trained model to, for from_pretrained.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train MODEL on DATA, one process a stage, with AdamW.

    Starts its processes on this machine; under torchrun (--no-python mmcompile train ...) it uses the launched ones.

    With --fault-tolerance, or a plan made with it, nodes may die, and training goes on with those that are left.
    """
    wanted = Wanted(
        stages=parse_stages(stages),
        projector=projector,
        schedule=schedule_kind(_decided("--schedule", schedule)),
        recompute=recompute_kind(recompute),
        autocast=parse_components(autocast),
        fsdp=parse_components(fsdp),
        attention=attention,
        context_parallel=context_parallel,
        tensor_parallel=parse_degrees("--tensor-parallel", tensor_parallel),
        replicas=parse_degrees("--replicas", replicas),
    )
    if plan is not None:
        refuse_with_plan(
            stages=wanted.stages,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            autocast=wanted.autocast,
            fsdp=wanted.fsdp,
            attention=attention,
            context_parallel=context_parallel,
            tensor_parallel=wanted.tensor_parallel,
            replicas=wanted.replicas,
            fault_tolerance=None if fault_tolerance is None else str(fault_tolerance),
            nodes=nodes,
        )
    if (fault_tolerance is None) != (nodes is None):
        raise ConfigError(
            "--fault-tolerance and --nodes go together: how many nodes there are, and how many may fail at once"
        )
    if balance is not None:
        balancer(balance)  # a wrong name is told before anything is read
    samples = load_samples(data)
    torch.manual_seed(seed)
    with busy(f"loading {model}"):
        loaded = load_model(model, Weights.RANDOM if random_weights else Weights.STORED, dtype)
        set_trainable(loaded.model, train)
    wanted = replace(wanted, microbatches=microbatches, fault_tolerance=fault_tolerance)
    made, subject = _planned(loaded.model, samples, batch_size, plan, wanted, pack, nodes)
    leading = int(os.environ.get("RANK", "0")) == 0
    if out is not None and leading:
        write_atomic(out / PLAN, made.to_json())
        write_programs(out, api.stage_programs(loaded.model, subject.batch, made))
    if made.resilience is not None:
        refuse_elastic(
            correct=correct,
            pack=pack,
            resume=resume is not None,
            accumulate=accumulate is not None,
            **{"master-weights": master_weights, "shard-optimizer": shard_optimizer},
        )
        options = ElasticOptions(
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            clip_norm=clip_norm,
            seed=seed,
            compile=compile,
            reduction=reduction.value,
            balance=balance or Arrival.name,
            save_every=save_every,
            save=save,
            export=export,
            folder=None if out is None else out / RUN,
            at=node_at(coordinator, node, secret),
        )
        done = train_elastic(loaded.model, made, subject, samples, options)
        if done:
            _report(_summed(done), out, save, export, json, traced=False)
        return
    for name, value in (("save-every", save_every), ("coordinator", coordinator), ("node", node), ("secret", secret)):
        if value is not None:
            raise ConfigError(f"--{name} has no effect without templates: plan with --fault-tolerance, or drop it")
    optimizer = functools.partial(torch.optim.AdamW, lr=lr)
    given: dict[str, Any] = {"packing": subject.packing} if pack else {"batch": subject.batch}
    with api.parallelize(
        loaded.model,
        plan=made,
        balance=balance or Auto.name,
        correct=correct,
        optimizer=optimizer,
        clip_norm=clip_norm,
        accumulate=accumulate or 1,
        master_weights=master_weights,
        shard_optimizer=shard_optimizer,
        compile=compile,
        reduction=reduction.value,
        **given,
    ) as engine:
        if resume is not None:
            engine.load(resume)
            if engine.num_steps >= steps:
                raise ConfigError(f"checkpoint {resume} is at step {engine.num_steps} already; ask for more --steps")
        batches = _Batches(size=batch_size, first=engine.num_steps, last=steps, to_a_step=accumulate or 1, seed=seed)
        result = _run(engine, samples, batches, traced=out is not None)
        if out is not None and leading:
            write_events(out, engine.trace())
        if save is not None:
            engine.save(save)
        if export is not None:
            engine.export(export)
    if leading:
        _report(result, out, save, export, json)


def _decided(option: str, choice: ScheduleChoice | None) -> ScheduleChoice | None:
    if choice == ScheduleChoice.SEARCH:
        raise ConfigError(
            f"{option} search is for `mmcompile plan`, which knows the cluster; say which, or train by a --plan"
        )
    return choice


def _planned(
    model: nn.Module,
    samples: Sequence[Sample],
    batch_size: int,
    path: Path | None,
    wanted: Wanted,
    pack: bool,
    nodes: int | None,
) -> tuple[Plan, Subject]:
    """The plan, and what it is for."""
    stored = None if path is None else Plan.load(path)
    count = wanted.microbatches or DEFAULT_MICROBATCHES
    if stored is not None:
        count = stored.num_microbatches * stored.chains[-1].dp
    chosen = richest(samples, max(-(-batch_size // count), 2 if pack else 1))
    packing = chosen if pack else None
    batch = api.pack(model, chosen) if pack else collate(chosen)
    subject = Subject(model=model, batch=batch, packing=packing)
    cluster = "local" if nodes is None else f"{nodes}x1x{LOCAL_NAME}"
    made = stored or make_plan(subject, cluster, replace(wanted, microbatches=count))
    if batch_size < made.num_microbatches * made.chains[-1].dp:
        raise ConfigError(
            f"--batch-size {batch_size} is less than the {made.num_microbatches} microbatches of a step, in each of "
            f"{made.chains[-1].dp} replicas; raise it, or plan for fewer"
        )
    return made, subject


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batches:
    """What a run reads: the batches of steps `first` (done before) to `last`."""

    size: int
    first: int
    last: int
    to_a_step: int
    seed: int

    def chosen(self, num_samples: int) -> Iterator[Sequence[int]]:
        """Samples of each batch, by index."""
        all_batches = epochs(num_samples, self.size, self.seed)
        return itertools.islice(all_batches, self.first * self.to_a_step, self.last * self.to_a_step)


def _run(engine: Engine, samples: Sequence[Sample], batches: _Batches, *, traced: bool) -> _Result:
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    done: list[StepMetrics] = []
    with Progress(*columns, console=ERRORS, disable=engine.rank != 0) as progress:
        task = progress.add_task("step", total=batches.last, completed=batches.first, loss=float("nan"), rate="")
        loaded = ([samples[index] for index in chosen] for chosen in batches.chosen(len(samples)))
        for metrics in engine.train(loaded, trace={batches.last} if traced else ()):
            done.append(metrics)
            progress.update(task, completed=engine.num_steps, loss=metrics.loss, rate=_rate(metrics))
    return _summed(done)


def _summed(done: Sequence[StepMetrics]) -> _Result:
    return _Result(
        steps=done[-1].step,
        loss=done[-1].loss,
        tokens=sum(metrics.num_tokens for metrics in done),
        samples=sum(metrics.num_samples for metrics in done),
        seconds=sum(metrics.seconds for metrics in done),
    )


def _rate(metrics: StepMetrics) -> str:
    """Tokens with a label a second; samples where the model does not say."""
    if metrics.num_tokens:
        return f"{metrics.num_tokens / metrics.seconds:,.0f} tokens/s"
    return f"{metrics.num_samples / metrics.seconds:,.0f} samples/s"


def _report(
    result: _Result, out: Path | None, save: Path | None, export: Path | None, json: bool, *, traced: bool = True
) -> None:
    if json:
        named = {"out": out, "checkpoint": save, "model": export}
        folders = {name: None if folder is None else str(folder) for name, folder in named.items()}
        figures = {name: getattr(result, name) for name in ("steps", "loss", "tokens", "samples", "seconds")}
        print_json(figures | folders)
        return
    print_text(f"{result.steps} steps, {result.samples} samples in {result.seconds:.1f} s; last loss {result.loss:.4f}")
    if out is not None:
        print_text(f"run folder {out}" + (f"; `mmcompile trace {out}` draws its last step" if traced else ""))
    if save is not None:
        print_text(f"checkpoint {save}")
    if export is not None:
        print_text(f"model {export}")
