"""`mmcompile train`: train a model as a pipeline of processes on this machine, or on the ranks of torchrun."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from mmcompile import api
from mmcompile.cli.console import ERRORS, busy, print_json, print_text
from mmcompile.cli.data import DATA_HELP, epochs, load_samples, richest
from mmcompile.cli.model import Weights, load_model
from mmcompile.cli.options import (
    AttentionOption,
    ContextParallelOption,
    DtypeOption,
    FaultToleranceOption,
    JsonOption,
    ModelArgument,
    Projector,
    ProjectorOption,
    ReductionChoice,
    ReplicasOption,
    StagesOption,
    TrainOption,
    parse_replicas,
    parse_stages,
)
from mmcompile.cli.planning import Subject, Wanted, make_plan, refuse_with_plan, set_trainable
from mmcompile.cli.train_elastic import RUN, ElasticOptions, node_at, refuse_elastic, train_elastic
from mmcompile.costmodel.hardware import LOCAL_NAME
from mmcompile.errors import ConfigError
from mmcompile.files import write_atomic
from mmcompile.plan.plan import Plan
from mmcompile.planning import DEFAULT_MICROBATCHES
from mmcompile.report.run_folder import PLAN, write_events, write_programs
from mmcompile.runtime.engine import Engine, StepMetrics
from mmcompile.step.balance.auto import Auto
from mmcompile.step.balance.baselines import Arrival
from mmcompile.step.balance.registry import BALANCERS, balancer
from mmcompile.step.collate import Sample, collate


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
    attention: AttentionOption = None,
    context_parallel: ContextParallelOption = None,
    replicas: ReplicasOption = None,
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
        Path | None, typer.Option(help="Checkpoint folder to write at the end.", show_default=False)
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
        attention=attention,
        context_parallel=context_parallel,
        replicas=parse_replicas(replicas),
    )
    if plan is not None:
        refuse_with_plan(
            stages=wanted.stages,
            microbatches=microbatches,
            attention=attention,
            context_parallel=context_parallel,
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
        refuse_elastic(correct=correct, pack=pack, resume=resume is not None)
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
            folder=None if out is None else out / RUN,
            at=node_at(coordinator, node, secret),
        )
        done = train_elastic(loaded.model, made, subject, samples, options)
        if done:
            _report(_summed(done), out, save, json, traced=False)
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
        compile=compile,
        reduction=reduction.value,
        **given,
    ) as engine:
        if resume is not None:
            engine.load(resume)
            if engine.num_steps >= steps:
                raise ConfigError(f"checkpoint {resume} is at step {engine.num_steps} already; ask for more --steps")
        result = _run(engine, samples, steps, batch_size, seed, traced=out is not None)
        if out is not None and leading:
            write_events(out, engine.trace())
        if save is not None:
            engine.save(save)
    if leading:
        _report(result, out, save, json)


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


def _run(engine: Engine, samples: Sequence[Sample], steps: int, batch_size: int, seed: int, *, traced: bool) -> _Result:
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    done: list[StepMetrics] = []
    first = engine.num_steps
    batches = itertools.islice(epochs(len(samples), batch_size, seed), first, steps)
    with Progress(*columns, console=ERRORS, disable=engine.rank != 0) as progress:
        task = progress.add_task("step", total=steps, completed=first, loss=float("nan"), rate="")
        loaded = ([samples[index] for index in chosen] for chosen in batches)
        for metrics in engine.train(loaded, trace={steps} if traced else ()):
            done.append(metrics)
            progress.update(task, advance=1, loss=metrics.loss, rate=_rate(metrics))
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


def _report(result: _Result, out: Path | None, save: Path | None, json: bool, *, traced: bool = True) -> None:
    if json:
        folders = {"out": None if out is None else str(out), "checkpoint": None if save is None else str(save)}
        figures = {name: getattr(result, name) for name in ("steps", "loss", "tokens", "samples", "seconds")}
        print_json(figures | folders)
        return
    print_text(f"{result.steps} steps, {result.samples} samples in {result.seconds:.1f} s; last loss {result.loss:.4f}")
    if out is not None:
        print_text(f"run folder {out}" + (f"; `mmcompile trace {out}` draws its last step" if traced else ""))
    if save is not None:
        print_text(f"checkpoint {save}")
